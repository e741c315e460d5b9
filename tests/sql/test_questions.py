"""docs/questions.md answers: its own SQL finds exactly what was planted, and says nothing of a healthy run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.synthetic import FAULTS, SECOND, Run, fill

TEXT = (Path(__file__).parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")
QUESTIONS = {int(number): sql for number, sql in re.findall(r"### (\d+)\. .*?```sql\n(.*?)```", TEXT, flags=re.DOTALL)}
HEALTHY = {"steps": 10, "groups": 4, "group_size": 4, "replicas": 2, "serving": True}
HOUR = 3600 * SECOND

# Runs and the faults of step 7 in each: together where they show in different questions.
PLANTED = {
    "slow": ("truncation", "gap", "tool_error", "spike", "starved_engine", "stale_rollouts"),
    "held": ("zero_variance", "straggler", "sync_failed", "entropy_collapse", "clipped_rollout"),
    "bought": ("reward_hack", "mismatch", "slow_after_sync", "dropped_group", "eval_falls", "wrong_checksum"),
    "broken": ("garbled", "repetitive", "rollout_error", "always_off"),
    "stale": ("stale_engine", "lagged", "lost_content", "mixed_versions"),
    "cached": ("cache_mismatch", "missing_sync"),
    "other": ("diverging", "request_error"),
}


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """All runs in one store, so that every query also has to keep to its run."""
    path = tmp_path_factory.mktemp("questions") / "s.duckdb"
    now = time.time_ns()
    runs = [Run(name, **HEALTHY, faults=faults) for name, faults in PLANTED.items()]
    opened = {"status": None, "start_ns": now - HOUR}
    resumed = {"attempt": 2, "first_step": 7, "resumed_from_step": 6, "faults": ("bad_resume",)}
    fill(
        path,
        Run("healthy", **HEALTHY),
        *runs,
        Run("hung", **HEALTHY, **opened, faults=("hung",)),
        Run("waiting", **HEALTHY, **opened, faults=("missing_rank",)),
        Run("first", **(HEALTHY | {"steps": 0, "replicas": 4}), **opened, faults=("missing_rank",)),
        Run("pair", **(HEALTHY | {"steps": 0}), **opened, faults=("missing_rank",)),
        Run("resumed", **HEALTHY, status="interrupted", start_ns=now - 2 * HOUR),
        Run("resumed", **(HEALTHY | {"steps": 4}), **resumed),
        Run("continued", **HEALTHY, status="interrupted", start_ns=now - 2 * HOUR),
        Run("continued", **(HEALTHY | {"steps": 4}), **(resumed | {"faults": ()})),
    )
    with duckdb.connect(str(path), read_only=True) as connection:
        yield connection


def _ask(con: duckdb.DuckDBPyConnection, number: int, run: str, other: str = "other") -> list[dict]:
    cursor = con.execute(QUESTIONS[number].replace("'my-run'", f"'{run}'").replace("'other-run'", f"'{other}'"))
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


EXPECTED = [
    (1, "stale", "name lag", [("loss/total", 2)]),
    (2, "held", "step decile", [(7, 8), (7, 9), (7, 10)]),
    (3, "bought", "step mixed_versions worst", [(7, False, "bought/7/1/2")]),
    (3, "stale", "step mixed_versions worst", [(7, True, "stale/7/1/3")]),
    (3, "broken", "step mixed_versions", [(step, False) for step in range(1, 11)]),
    (4, "cached", "cached preempted replica", [(True, False, "policy/0"), (True, False, "policy/1")]),
    (5, "stale", "policy_version replica problem", [(7, "policy/1", "served_old")]),
    (5, "bought", "policy_version replica problem", [(7, "policy/0", "checksum")]),
    (5, "held", "policy_version replica problem", [(7, "policy/0", "failed")]),
    (5, "cached", "policy_version replica problem", [(7, "policy/1", "missing")]),
    (6, "held", "step groups all_fail wasted_tokens", [(7, 4, 4, 1.0)]),
    (7, "slow", "step truncated reward_truncated", [(7, 1.0, 0.0)]),
    (8, "bought", "component dataset metric", [("numeric", "sums-test", f"{name}@4") for name in ("mean", "pass")]),
    (9, "bought", "rollout_id prompts_answered", [(f"bought/7/{group}/0", 4) for group in range(4)]),
    (10, "broken", "step replica garbled repetitive", [(7, "policy/0", 0.0, 1.0), (7, "policy/1", 1.0, 0.0)]),
    (11, "slow", "step", [(7,)]),
    (12, "slow", "after_step after before phases", [(7, "rl.reward", "rl.micro_batch", None)]),
    (13, "held", "step rollout_id cause", [(7, "held/7/2/1", "queue")]),
    (14, "hung", "name phase lane step", [("rl.sample", "sample", "controller", 11)]),
    (15, "waiting", "step worker_group method rank calls expected_calls", [(11, "policy", "update", 1, 0, 1)]),
    (15, "first", "step worker_group method rank calls expected_calls", [(1, "policy", "update", 3, 0, 1)]),
    (15, "pair", "step worker_group method rank calls expected_calls", [(1, "policy", "update", 1, 0, 1)]),
    (16, "slow", "step replica running idle", [(7, "policy/1", 0.0, 1.0)]),
    (17, "slow", "step at_start staleness rollouts", [(7, 4, 4, 2)]),
    (18, "bought", "policy_version replica", [(6, "policy/1")]),
    (19, "slow", "kind type place n first_step", [("tool", "TimeoutError", "calculator", 1, 7)]),
    (19, "bought", "kind type place n example", [("dropped_group", "no rollout finished", "sums", 1, "bought/7/3")]),
    (19, "broken", "kind type place n example", [("rollout", "EnvironmentTimeout", "sums", 1, "broken/7/0/1")]),
    (19, "held", "kind type place n first_step", [("sync", "ConnectionError", "policy/0", 1, 7)]),
    (19, "other", "kind type place n example", [("request", "RequestTimeout", "policy/1", 1, "first-other/7/0/1")]),
    (20, "slow", "rollout_id pos", [("slow/7/0/0", 3), ("slow/7/0/0", 4)]),
    (21, "resumed", "attempt checkpoint name", [(2, 6, "optim/grad_norm")]),
    (25, "bought", "step metric best_step", [(step, name, 2) for step in (6, 8, 10) for name in ("mean@4", "pass@4")]),
    (26, "held", "step rollout_id", [(7, "held/7/1/1")]),
    (24, "stale", "edge n linked", [("rollout->tokens", 165, 164), ("training->tokens", 160, 159)]),
]


@pytest.mark.parametrize(("number", "run", "columns", "rows"), EXPECTED)
def test_a_planted_fault_is_found_and_nothing_else(con, number, run, columns, rows):
    """The step, replica, rank or rollout of the fault, and no other row."""
    found = [tuple(row[column] for column in columns.split()) for row in _ask(con, number, run)]
    assert sorted(found, key=str) == sorted(rows, key=str)


@pytest.mark.parametrize("number", sorted(set(QUESTIONS) - {22, 23}))
def test_a_healthy_run_gives_no_rows(con, number):
    """No fault, no row; nor for the healthy part of a resumed run."""
    assert _ask(con, number, "healthy") == []
    if number == 21:
        assert _ask(con, number, "continued") == []


def test_two_runs_part_where_one_was_changed(con):
    """Every metric that has a value differs from step 7 on; a run against an equal one does not."""
    found = _ask(con, 22, "healthy")
    assert len(found) > 15
    assert {row["first_step"] for row in found} == {7}
    assert _ask(con, 22, "healthy", "healthy") == []


def test_a_drill_down_has_every_rollout_of_the_step_worst_first(con):
    """16 rollouts of step 7 with what the update saw of each; the planted gap stands out."""
    found = _ask(con, 23, "bought")
    assert len(found) == 16
    assert [row["reward"] for row in found] == sorted(row["reward"] for row in found)
    assert [row["rollout_id"] for row in found if row["gap"] > 0.4] == ["bought/7/1/2"]
    assert all(row["trace_id"] and row["step_trained"] == 7 and row["staleness"] == 0 for row in found)


def test_every_question_and_every_fault_is_tested():
    """26 questions, each with a fault of its own; every fault of the synthetic run is planted somewhere."""
    assert set(QUESTIONS) == set(range(1, 27))
    assert {number for number, *_ in EXPECTED} | {22, 23} == set(QUESTIONS)
    planted = {fault for faults in PLANTED.values() for fault in faults}
    assert planted | {"hung", "missing_rank", "bad_resume"} == set(FAULTS)
