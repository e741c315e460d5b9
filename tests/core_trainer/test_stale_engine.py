"""Whole runs on an engine that keeps the weights it had: caught in the first step, on the real store."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from core_trainer import attention, checkpoint
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import GenerateRequest, RolloutEngine
from core_trainer.types import Turn
from core_trainer.workers import policy
from rlinsight.errors import EngineError
from tests.core_trainer import test_train_loop
from tests.core_trainer.stored import recording
from tests.core_trainer.test_train_loop import Watcher, train

pytestmark = pytest.mark.slow  # seconds each: a model is trained

_one_process = test_train_loop._one_process  # the fixture


def skips_its_refresh(rollout: Any, data: Any, model: Any, *args: Any, **options: Any) -> RolloutEngine:
    """An engine over a copy of the policy that takes the first weights it is given and no others."""
    copy = deepcopy(model)
    attention.enable(copy)
    engine = build_engine(rollout, data, copy, *args, **options)
    take = engine.sync_weights

    def sync_weights(policy_version: int) -> list[Any]:
        if policy_version == 0:
            copy.load_state_dict(model.state_dict())
        return take(policy_version)

    engine.sync_weights = sync_weights  # type: ignore[method-assign]
    return engine


def reports_an_old_version(*args: Any, **options: Any) -> RolloutEngine:
    """An engine that serves the policy's weights, and says of each turn that version 0 sampled it."""
    engine = build_engine(*args, **options)
    plain = engine.generate

    async def generate(request: GenerateRequest) -> Turn:
        turn = await plain(request)
        turn.policy_version = 0
        return turn

    engine.generate = generate  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    ("engine", "first", "problem"),
    [
        (skips_its_refresh, (1, "stale_engine"), "checksum"),
        (reports_an_old_version, (2, "stale_rollouts"), "served_old"),  # step 1 is sampled by version 0 indeed
    ],
)
def test_a_stale_engine_raises_an_alert_at_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, first: tuple[int, str], problem: str
) -> None:
    """Its evidence finds the replica, the ledger has the checksums, and the run goes on to its end."""
    monkeypatch.setattr(policy, "build_engine", engine)
    with recording(tmp_path) as store:
        assert train(tmp_path, tiny_model, Watcher()).status == "finished"
    (step, rule, severity, evidence), *_ = store.rows(
        "SELECT step, rule, severity, evidence_sql FROM alerts WHERE rule LIKE 'stale%' ORDER BY time_ns"
    )
    assert ((step, rule), severity) == (first, "critical")
    columns = "policy_version, replica, problem"
    assert store.rows(f"SELECT {columns} {evidence} ORDER BY ALL")[0] == (1, "policy/0", problem)
    same = store.rows("SELECT policy_version, same_checksum FROM sync_health('r') ORDER BY ALL")
    if engine is skips_its_refresh:
        assert same == [(0, True), (1, False), (2, False), (3, False)]
    versions = store.rows("SELECT policy_version, count(DISTINCT checksum_trained) FROM weight_syncs GROUP BY ALL")
    assert sorted(versions) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert store.rows("SELECT count(DISTINCT checksum_trained) FROM weight_syncs") == [(4,)]


def test_or_ends_the_run_with_a_checkpoint(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rollout.on_stale: fail; the step it was found in is the checkpoint's, and a good engine goes on from it."""
    monkeypatch.setattr(policy, "build_engine", skips_its_refresh)
    with pytest.raises(EngineError, match=r"replica policy/0 serves weights .* after the sync of policy_version 1"):
        train(tmp_path, tiny_model, Watcher(), rollout={"on_stale": "fail"})
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert checkpoint.read_state(saved).step == 1
    monkeypatch.setattr(policy, "build_engine", build_engine)
    watcher = Watcher()
    done = train(tmp_path, tiny_model, watcher, resume=saved, rollout={"on_stale": "fail"})
    assert (done.status, len(watcher.steps)) == ("finished", 2)


def test_a_good_run_has_no_such_alert_and_every_edge_links(tmp_path: Path, tiny_model: Path) -> None:
    """One row a sync, device handed over twice a step, nothing missing in the trace."""
    with recording(tmp_path) as store:
        train(tmp_path, tiny_model, Watcher(), algorithm={"name": "remax"})
    assert store.rows("SELECT rule FROM alerts WHERE severity = 'critical'") == []
    health = store.rows("SELECT policy_version, problem, turns_after > 0, served_old FROM sync_health('r')")
    assert health == [(0, None, True, 0), (1, None, True, 0), (2, None, True, 0), (3, None, False, 0)]
    to = store.rows(
        "SELECT step, list(span_attributes->>'rlinsight.handover.to' ORDER BY start_ns) FROM otel_spans "
        "WHERE name = 'rl.handover' GROUP BY step ORDER BY step NULLS FIRST"
    )
    assert to == [(None, ["generating"])] + [(step, ["training", "generating"]) for step in (1, 2, 3)]
    edges = store.rows("SELECT edge, n, linked FROM v_linkage")
    assert {edge for edge, *_ in edges} >= {"rollout->training", "rollout->tokens", "rollout->reward"}
    assert [row for row in edges if row[1] != row[2]] == []
    splits = store.rows("SELECT split, count(*) FROM rollouts GROUP BY split ORDER BY split")
    assert splits == [("baseline", 12), ("train", 24)]
    assert store.rows("SELECT count(*) FROM groups") == [(12,)]
