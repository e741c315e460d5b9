"""Who has the device when, and the ledger of weight syncs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core_trainer.optimizer import MasterOptimizer
from core_trainer.rollout import checksum
from core_trainer.rollout.engine import WeightSync
from core_trainer.rollout.hybrid import HybridEngine
from rlinsight.config import TrainerSection
from rlinsight.errors import EngineError
from tests.core_trainer.scripted_engine import ScriptedEngine
from tests.core_trainer.stored import recording


class Optimizer:
    """Says what it was asked to do, in the engine's own list."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def offload(self) -> int:
        self.calls.append("offload")
        return 1

    def reload(self) -> int:
        self.calls.append("reload")
        return 2


class Replicas(ScriptedEngine):
    """Two replicas; the second may serve other weights, or fail."""

    def __init__(self, model: nn.Module, stale: bool = False, fails: bool = False) -> None:
        super().__init__(replica="router")
        self.model, self.stale, self.fails = model, stale, fails

    def sync_weights(self, policy_version: int) -> list[WeightSync]:
        super().sync_weights(policy_version)
        if self.fails:
            raise EngineError("server/1 did not take the weights")
        served = checksum.of(self.model.named_parameters())
        return [
            WeightSync("server/0", 80, 0, "keep", in_flight=3, aborted=1, checksum_served=served),
            WeightSync("server/1", 80, 8, checksum_served="0" * 16 if self.stale else None),
        ]


def hybrid(engine: ScriptedEngine, model: nn.Module) -> HybridEngine:
    return HybridEngine(engine, model, [Optimizer(engine.calls)])  # type: ignore[arg-type, list-item]


def test_memory_changes_hands_only_between_users(tmp_path: Path) -> None:
    """Who gives up goes first; a span per change says what was moved, and a second use of the same kind makes none."""
    model = nn.Linear(4, 4)
    engine = ScriptedEngine()
    with recording(tmp_path) as store:
        both = hybrid(engine, model)
        both.publish(0)
        with both.generating():
            pass
        for _ in range(3):
            with both.training():
                pass
        both.publish(1)
        with both.generating():
            pass
        both.close()
    assert engine.calls == [
        *("offload", "wake", "sync 0"),
        *("sleep", "reload"),
        *("offload", "wake", "sync 1"),
        "close",
    ]
    spans = store.rows(
        "SELECT span_attributes->>'rlinsight.handover.to', "
        "CAST(span_attributes->>'rlinsight.handover.bytes' AS BIGINT), bucket "
        "FROM otel_spans WHERE name = 'rl.handover' ORDER BY start_ns"
    )
    assert spans == [("generating", 11, "overhead"), ("training", 102, "overhead"), ("generating", 11, "overhead")]


def test_the_ledger_has_a_row_for_every_replica(tmp_path: Path) -> None:
    """What was published, what each serves, what became of its requests; a stale one is told, an unknown one is not."""
    model = nn.Linear(4, 4)
    with recording(tmp_path) as store:
        first, second = hybrid(Replicas(model, stale=True), model).publish(7)
    trained = checksum.of(model.named_parameters())
    assert (first.is_stale, second.is_stale) == (False, True)
    rows = store.rows(
        "SELECT policy_version, engine, replica, bytes, refreshed_bytes, pause_mode, in_flight, aborted, "
        "checksum_trained, checksum_served, end_ns > start_ns, status_code, error_type "
        "FROM weight_syncs ORDER BY replica"
    )
    assert rows == [
        (7, "scripted", "server/0", 80, 0, "keep", 3, 1, trained, trained, True, 0, None),
        (7, "scripted", "server/1", 80, 8, "wait", 0, 0, trained, "0" * 16, True, 0, None),
    ]
    problems = store.rows("SELECT replica, problem FROM sync_health('r') WHERE problem IS NOT NULL")
    assert problems == [("server/1", "checksum")]


def test_a_replica_that_cannot_tell_is_not_called_stale() -> None:
    """Unknown is not wrong."""
    model = nn.Linear(4, 4)
    assert [entry.is_stale for entry in hybrid(Replicas(model), model).publish(1)] == [False, False]


def test_a_sync_that_failed_is_in_the_ledger(tmp_path: Path) -> None:
    """With its error, and what was to be published."""
    model = nn.Linear(4, 4)
    with recording(tmp_path) as store, pytest.raises(EngineError, match="did not take"):
        hybrid(Replicas(model, fails=True), model).publish(7)
    rows = store.rows("SELECT policy_version, replica, status_code, error_type, checksum_trained FROM weight_syncs")
    assert rows == [(7, "router", 2, "EngineError", checksum.of(model.named_parameters()))]
    assert store.rows("SELECT problem FROM sync_health('r')") == [("failed",)]


def test_an_optimizer_on_a_cpu_moves_nothing() -> None:
    """And goes on as if nobody had asked."""
    model = nn.Linear(4, 4)
    optimizer = MasterOptimizer(model, TrainerSection(), torch.float32)
    assert (optimizer.offload(), optimizer.reload()) == (0, 0)


def test_what_an_optimizer_moves_is_all_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters, gradient and both moments change place with their values; a step afterwards is the same."""
    models = [nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, moved = (MasterOptimizer(model, TrainerSection(), torch.float32) for model in models)

    def step(model: nn.Module, optimizer: MasterOptimizer, number: int) -> None:
        model(torch.full((2, 4), float(number))).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(number)

    for number in (1, 2):
        for model, optimizer in zip(models, (plain, moved), strict=True):
            step(model, optimizer, number)
        if number == 1:  # there is one device here: a copy in other memory stands for the other one
            before = {id(tensor): tensor.data_ptr() for tensor in (moved.master, moved.gradient)}
            monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor.clone())
            elsewhere: Any = SimpleNamespace(type="elsewhere")
            assert moved._move(elsewhere) == 4 * 20 * 4 + moved.state_dict()["step"].nbytes
            monkeypatch.undo()
            assert all(tensor.data_ptr() != before[id(tensor)] for tensor in (moved.master, moved.gradient))
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
