"""Whole runs on the real model whose engine fails at times: what it costs, what is stored, and what a resume gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core_trainer import checkpoint
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import GenerateRequest, RolloutEngine
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import Turn
from core_trainer.workers import policy
from rlinsight import names
from rlinsight.errors import EngineError
from tests.core_trainer import test_train_loop
from tests.core_trainer.stored import recording
from tests.core_trainer.test_train_loop import Watcher, train

pytestmark = pytest.mark.slow  # seconds each: a model is trained

_one_process = test_train_loop._one_process  # the fixture


def failing(when: Callable[[str], bool], nan: bool = False) -> Callable[..., RolloutEngine]:
    """The native engine, but for requests of which ``when`` holds by id: those raise, or compute a NaN."""

    def build(*args: Any, **options: Any) -> RolloutEngine:
        engine = build_engine(*args, **options)
        assert isinstance(engine, NativeEngine)
        plain, sample = engine.generate, engine._sample

        async def generate(request: GenerateRequest) -> Turn:
            if when(request.request_id):
                raise EngineError("no room for 3 blocks")
            return await plain(request)

        def damaged(sequences: list[Any], hidden: torch.Tensor) -> None:
            hidden = hidden.clone()
            for row, sequence in enumerate(sequences):
                if when(sequence.request.request_id) and sequence.num_sampled == 1:
                    hidden[row] = math.nan
            sample(sequences, hidden)

        if nan:
            engine._sample = damaged  # type: ignore[method-assign]
        else:
            engine.generate = generate  # type: ignore[method-assign]
        return engine

    return build


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Watcher, dict[str, torch.Tensor]]:
    """Steps and weights of the run that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_train_loop.cluster, "WorkerGroup", test_train_loop.Group)
        patch.setattr(test_train_loop.cluster.Cluster, "_start_ray", lambda *_: None)
        watcher = Watcher()
        done = train(tmp_path_factory.mktemp("whole"), tiny_model, watcher)
    return watcher, weights(done.checkpoint)


def weights(directory: Path | None) -> dict[str, torch.Tensor]:
    assert directory is not None
    return load_file(directory / "model.safetensors")


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("nan", [False, True], ids=["error", "NaN"])
def test_a_request_that_goes_well_the_second_time_changes_nothing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any, nan: bool
) -> None:
    """Bit for bit, although every third request of step 2 failed at first."""
    first = failing(lambda name: "s000002" in name and name[-4] in "02" and "retry" not in name, nan)
    monkeypatch.setattr(policy, "build_engine", first)
    watcher = Watcher()
    with recording(tmp_path) as store:
        done = train(tmp_path, tiny_model, watcher)
    assert watcher.steps == undisturbed[0].steps
    assert same(weights(done.checkpoint), undisturbed[1])
    ((failed, rollouts),) = store.rows(
        "SELECT count(*), count(DISTINCT rollout_id) FROM serving_requests WHERE error_type IS NOT NULL AND step = 2"
    )
    assert failed == rollouts == 4
    types = store.rows("SELECT DISTINCT error_type, corrupted FROM serving_requests WHERE error_type IS NOT NULL")
    assert types == [("NonFiniteLogProbs", True) if nan else ("EngineError", None)]
    rows = "SELECT count(*), count(DISTINCT request_id), count(DISTINCT rollout_id) FROM serving_requests"
    assert store.rows(rows) == [(28, 28, 24)]  # one an attempt
    assert store.rows("SELECT DISTINCT kind FROM errors") == [("request",)]
    assert store.rows("SELECT edge, n, linked FROM v_linkage WHERE n <> linked") == []


def test_requests_that_fail_for_good_cost_their_rollouts_and_no_more(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of step 2 one group is lost, one too small to compare; the run goes on, and the trace has no hole."""
    lost = ("a1-s000002-g0000-r000", "a1-s000002-g0000-r001", "a1-s000002-g0002-r001")
    monkeypatch.setattr(policy, "build_engine", failing(lambda name: name.startswith(lost)))
    watcher = Watcher()
    with recording(tmp_path) as store:
        assert train(tmp_path, tiny_model, watcher, rollout={"on_error": "drop"}).status == "finished"
    assert [step[names.M_FAILED_ROLLOUTS] for step in watcher.steps] == [0, 3, 0]
    assert [step[names.M_GROUPS_DROPPED] for step in watcher.steps] == [0, 2, 0]
    drops = store.rows("SELECT step, reason, rollouts FROM group_drops ORDER BY reason")
    assert drops == [(2, "engine_error", 2), (2, "too_small", 2)]
    errors = store.rows("SELECT kind, type, place, n FROM errors WHERE kind IN ('request', 'rollout') ORDER BY kind")
    assert errors == [("request", "EngineError", "policy/0", 6), ("rollout", "EngineError", None, 3)]
    assert store.rows("SELECT edge, n, linked FROM v_linkage WHERE n <> linked") == []
    ((step, evidence),) = store.rows("SELECT step, evidence_sql FROM alerts WHERE rule = 'failed_rollouts'")
    assert step == 2
    assert len(store.rows(evidence)) == 2


def test_or_end_the_run_which_goes_on_as_if_nothing_had_been(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    """The checkpoint is of step 1; steps 2 and 3 on a good engine are those of a run that never failed, bit for bit."""
    monkeypatch.setattr(policy, "build_engine", failing(lambda name: "s000002-g0003-r001" in name))
    first, second = Watcher(), Watcher()
    with pytest.raises(
        EngineError, match="g0003-r001-t0 to rollout engine native failed for good: no room for 3 blocks"
    ):
        train(tmp_path, tiny_model, first)
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert checkpoint.read_state(saved).step == 1
    monkeypatch.setattr(policy, "build_engine", build_engine)
    done = train(tmp_path, tiny_model, second, resume=saved)
    assert first.steps + second.steps == undisturbed[0].steps
    assert same(weights(done.checkpoint), undisturbed[1])
