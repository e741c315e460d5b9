"""correction.mode bypass: the engine's log-probs are the old ones, and how far they are off still shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer import cluster
from core_trainer.metrics import TokenStats, token_stats
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.types import Turn
from rlinsight import names, telemetry
from rlinsight.config import AlgorithmSection
from tests.core_trainer.stored import recording
from tests.core_trainer.test_train_loop import Group, Watcher
from tests.core_trainer.test_train_loop import train as train_here

OFF = 0.25  # nats that the engine below says too much of every token
GAPS = (names.M_ROLLOUT_KL, names.M_ROLLOUT_ABS, names.M_ROLLOUT_MAX, names.M_MISMATCHED)


def test_only_what_is_known_counts_in_the_gap() -> None:
    """Of three loss tokens two are measured, by hand 0.5 and 0 apart; the other statistics are over all three."""
    mask, ones = torch.tensor([True, True, True, False]), torch.ones(4)
    rollout, log_probs = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -2.0, -9.0, -9.0])
    measured = torch.tensor([True, True, False, True])
    stats = token_stats(mask, log_probs, rollout, rollout, None, ones, ones, ones > 2, ones * 0, log_probs, measured)
    found = stats.metrics(AlgorithmSection(), 1)  # type: ignore[call-arg]
    assert [found[name] for name in GAPS] == [pytest.approx((np.exp(-0.5) - 0.5) / 2), 0.25, 0.5, 1.0]
    assert found[names.M_ENTROPY] == 1.0
    assert stats.gaps().metrics(AlgorithmSection(), 1)[names.M_ROLLOUT_ABS] == 0.25  # type: ignore[call-arg]
    assert stats.gaps().num_tokens == 0


def test_where_nothing_is_known_there_is_no_gap() -> None:
    """Absent rather than 0, also of no token at all."""
    ones = torch.ones(2)
    stats = token_stats(ones > 0, ones, ones, ones, None, ones, ones, ones > 2, ones, ones, ones < 0)
    for empty in (stats, TokenStats()):
        found = empty.metrics(AlgorithmSection(), 1)  # type: ignore[call-arg]
        assert [found[name] for name in GAPS] == [None] * 4
    assert stats.num_tokens == 2


@pytest.mark.parametrize(
    ("updates", "measured", "stored"), [({}, 8, 8), ({"num_mini_batches": 2}, 4, 4), ({"num_epochs": 2}, 8, 0)], ids=str
)
def test_an_engine_that_is_off_shows(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    updates: dict[str, int],
    measured: int,
    stored: int,
) -> None:
    """In metrics, alert and store, of the rollouts whose update is by the weights that sampled them; what is recorded
    as old is the engine's, as the loss takes it.
    """

    def off(*args: Any, **options: Any) -> Any:
        engine = build_engine(*args, **options)
        sample = engine.generate

        async def generate(request: GenerateRequest) -> Turn:
            turn = await sample(request)
            turn.rollout_log_probs[:] = [log_prob + OFF for log_prob in turn.rollout_log_probs]
            return turn

        engine.generate = generate  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr("core_trainer.workers.policy.build_engine", off)
    monkeypatch.setattr(cluster, "WorkerGroup", Group)
    monkeypatch.setattr(cluster.Cluster, "_start_ray", lambda *_: None)
    watcher = Watcher()
    algorithm = {"correction": {"mode": "bypass"}, **updates}
    with recording(tmp_path) as store:
        start = {names.CONFIG: json.dumps({"algorithm": algorithm}), names.RUN_NAME: "r"}
        telemetry.event(names.RUN_START, start)
        train_here(
            tmp_path,
            tiny_model,
            watcher,
            algorithm=algorithm,
            rollout={"max_new_tokens": 4},
            trainer={"total_steps": 1},
        )
    (metrics,) = watcher.steps
    assert metrics[names.M_LENGTH_MEAN] == 4
    k3 = np.exp(-OFF) + OFF - 1
    assert [metrics[name] for name in GAPS[:3]] == [pytest.approx(value, rel=1e-4) for value in (k3, OFF, OFF)]
    assert metrics[names.M_MISMATCHED] == 4 * measured
    assert store.rows("SELECT rule FROM alerts WHERE rule = 'mismatch'") == [("mismatch",)]
    for macro in ("mismatch", "mismatch_by_cause"):
        ((tokens, gap),) = store.rows(f"SELECT coalesce(sum(tokens), 0), max(gap) FROM {macro}('r')")
        assert (tokens, gap) == (4 * stored, pytest.approx(OFF, rel=1e-4) if stored else None), macro
    ((same,),) = store.rows("SELECT bool_and(old_log_prob = rollout_log_prob) FROM tokens WHERE run_id = 'r'")
    assert same
