"""The gap between trainer and engine, split by cause, over rows planted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rlinsight import schema

BY_CAUSE = """
SELECT cause, sum(tokens), sum(mismatched), max(gap_max) FROM mismatch_by_cause('r') GROUP BY cause ORDER BY cause
"""


def insert(con: duckdb.DuckDBPyConnection, table: str, **columns: Any) -> None:
    """One row of attempt 1 of run r."""
    columns |= {"run_id": "r", "attempt": 1}
    marks = ", ".join("?" for _ in columns)
    con.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", list(columns.values()))


def planted() -> duckdb.DuckDBPyConnection:
    """Step 3 starts from version 2. Five rollouts of two tokens: one for each cause, one without a gap."""
    con = duckdb.connect()
    schema.apply(con, Path(":memory:"))
    insert(con, "steps", step=3, policy_version_in=2, policy_version_out=3)
    rows: list[tuple[str, int, int, list[int], float]] = [
        # cached tokens, preemptions, version of each token, gap of the second token
        ("numerics", 0, 0, [2, 2], 0.25),
        ("cached", 30, 0, [2, 2], 0.5),
        ("preempted", 30, 1, [2, 2], 1.0),
        ("mixed", 30, 1, [2, 1], 2.0),
        ("same", 0, 0, [2, 2], 0.0),
    ]
    for name, cached, preemptions, versions, gap in rows:
        rollout = {"step": 3, "rollout_id": name}
        turn = {**rollout, "turn_index": 0}
        oldest, newest = min(versions), max(versions)
        insert(con, "rollout_samples", **rollout, policy_version_min=oldest, policy_version_max=newest)
        insert(con, "turns", **turn, request_id=name, cached_tokens=cached, policy_version=oldest)
        insert(con, "serving_requests", request_id=name, num_preemptions=preemptions, end_ns=1)
        mixed = versions if oldest < newest else None
        insert(con, "token_runs", **turn, rollout_log_probs=[-1.0, -2.0], policy_versions=mixed)
        insert(con, "rollout_training", **turn, old_log_probs=[-1.0, -2.0 + gap], loss_mask=[True, True])
    return con


@pytest.mark.parametrize(("mode", "expected"), [("bypass", (3, 1, 0.5)), ("decoupled", (6, 0, 0.0))])
def test_where_the_old_log_probs_are_the_engines_the_updates_own_are_compared(
    mode: str, expected: tuple[int, int, float]
) -> None:
    """Of three rollouts of two tokens those that the weights of the update sampled: three tokens, one of them 0.5 off.
    Without bypass the old log-probs are compared, whatever the update's are.
    """
    con = duckdb.connect()
    schema.apply(con, Path(":memory:"))
    insert(con, "run_starts", config=json.dumps({"algorithm": {"correction": {"mode": mode}}}))
    for name, versions, trained in (("fresh", [2, 2], 2), ("mixed", [1, 2], 2), ("stale", [2, 2], 3)):
        turn = {"step": 3, "rollout_id": name, "turn_index": 0}
        rollout = {"step": 3, "rollout_id": name}
        insert(con, "rollout_samples", **rollout, policy_version_min=min(versions), policy_version_max=max(versions))
        insert(con, "turns", **turn, policy_version=min(versions))
        mixed = versions if name == "mixed" else None
        insert(con, "token_runs", **turn, rollout_log_probs=[-1.0, -2.0], policy_versions=mixed)
        own = [-1.0, -2.5] if name == "fresh" else [-9.0, -2.0]
        found = {"old_log_probs": [-1.0, -2.0], "log_probs": own, "loss_mask": [True, True]}
        insert(con, "rollout_training", **turn, policy_version=trained, **found)
    for macro in ("mismatch", "mismatch_by_cause"):
        found = con.execute(f"SELECT sum(tokens), sum(mismatched), max(gap_max) FROM {macro}('r')").fetchone()
        assert found == expected, macro


def test_each_cause_holds_its_own_gap() -> None:
    """Stale tokens are told from the fresh ones of their rollout; preemption comes before a cache hit."""
    assert planted().execute(BY_CAUSE).fetchall() == [
        ("cache hit", 2, 1, 0.5),
        ("numerics", 4, 1, 0.25),
        ("preemption", 3, 1, 1.0),  # two of its own, and the mixed rollout's fresh one
        ("stale weights", 1, 1, 2.0),
    ]


def test_without_the_step_a_rollout_of_several_versions_is_stale() -> None:
    """A step that is still running has no row; its rollouts' own versions decide."""
    con = planted()
    con.execute("DELETE FROM steps")
    found = [row[:2] for row in con.execute(BY_CAUSE).fetchall()]
    assert found == [("cache hit", 2), ("numerics", 4), ("preemption", 2), ("stale weights", 2)]
