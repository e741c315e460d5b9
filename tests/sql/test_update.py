"""Views and macros of what updates did and validations found, with numbers worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rlinsight import schema

KEY = {"run_id": "r", "attempt": 1, "step": 1}


@pytest.fixture
def con():
    connection = duckdb.connect()
    schema.apply(connection, Path(":memory:"))
    yield connection
    connection.close()


def _insert(con: duckdb.DuckDBPyConnection, table: str, *rows: dict[str, Any]) -> None:
    for row in rows:
        con.execute(f"INSERT INTO {table} BY NAME SELECT {', '.join(f'? AS {key}' for key in row)}", list(row.values()))


def _rows(con: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    cursor = con.execute(sql)
    return [dict(zip([column[0] for column in cursor.description], row, strict=True)) for row in cursor.fetchall()]


def _eval(step: int, value: float, metric: str = "mean@4", **facts: Any) -> dict[str, Any]:
    told = {"dataset": "d", "metric": metric, "value": value, "std_error": 0.1, "time_ns": step}
    return KEY | {"step": step} | told | facts


def test_best_so_far_is_the_first_highest_and_of_a_loss_the_lowest(con):
    """0.2, 0.5, NaN, 0.5, 0.4: the best is 0.5 of step 2 from there on; a loss of 3, 2, 4 is best at step 2."""
    values = [0.2, 0.5, math.nan, 0.5, 0.4]
    _insert(con, "evals", *[_eval(step, v, std_error=v / 10) for step, v in enumerate(values, 1)])
    _insert(con, "evals", *[_eval(step, v, "loss") for step, v in enumerate([3.0, 2.0, 4.0], 1)])
    found = con.execute("SELECT best, best_step, best_std_error FROM validation WHERE metric = 'mean@4' ORDER BY step")
    assert found.fetchall() == [(0.2, 1, 0.02), *[(0.5, 2, 0.05)] * 4]
    found = con.execute("SELECT best, best_step FROM validation WHERE metric = 'loss' ORDER BY step").fetchall()
    assert found == [(3.0, 1), (2.0, 2), (2.0, 2)]


def test_a_validation_that_was_redone_counts_once(con):
    """Attempt 1 validated steps 0, 2 and 4; attempt 2 resumed from step 2: 0 and 2 stay, 4 is the later one."""
    _insert(con, "run_starts", {"run_id": "r", "attempt": 1, "time_ns": 0})
    _insert(con, "run_starts", {"run_id": "r", "attempt": 2, "resumed_from_step": 2, "time_ns": 9})
    _insert(con, "evals", _eval(0, 0.1), _eval(2, 0.2), _eval(4, 0.9), _eval(4, 0.3, attempt=2))
    found = con.execute("SELECT step, value, best FROM validation ORDER BY step").fetchall()
    assert found == [(0, 0.1, 0.1), (2, 0.2, 0.2), (4, 0.3, 0.3)]


def _group(con: duckdb.DuckDBPyConnection, name: str, rewards: list[float], tokens: int, reason: str | None) -> None:
    group = KEY | {"group_id": name, "prompt_id": f"p{name}", "time_ns": 1}
    _insert(con, "group_prompts", group)
    for i, reward in enumerate(rewards):
        rollout = {"rollout_id": f"{name}{i}", "group_id": name, "response_tokens": tokens}
        _insert(con, "rollout_samples", KEY | rollout)
        scored = {"run_id": "r", "attempt": 1, "rollout_id": f"{name}{i}", "reward": reward, "time_ns": 1}
        _insert(con, "rollout_scores", scored)
    if reason:
        _insert(con, "dropped_groups", group | {"reason": reason})


def test_group_signal_before_and_after_dropping(con):
    """Groups a mixed, b and c all fail, d mixed; b and d are dropped: half have no signal before as after."""
    _group(con, "a", [0, 1], 10, None)
    _group(con, "b", [0, 0], 20, "zero_variance")
    _group(con, "c", [0, 0], 30, None)
    _group(con, "d", [0, 1], 40, "too_hard")
    (row,) = _rows(con, "FROM group_signal")
    assert {key: row[key] for key in ("groups", "mixed", "all_fail", "dropped")} == {
        "groups": 4,
        "mixed": 2,
        "all_fail": 2,
        "dropped": 2,
    }
    assert (row["zero_variance"], row["zero_variance_learned"]) == (0.5, 0.5)
    assert row["wasted_tokens"] == pytest.approx((20 + 30) / 100)
    drops = con.execute("SELECT reason, groups, share, rollouts, response_tokens, example FROM group_drops ORDER BY 1")
    assert drops.fetchall() == [("too_hard", 1, 0.25, 2, 80, "pd"), ("zero_variance", 1, 0.25, 2, 40, "pb")]
    assert con.execute("SELECT group_id FROM groups WHERE dropped IS NULL ORDER BY 1").fetchall() == [("a",), ("c",)]


def _trained(con: duckdb.DuckDBPyConnection, rollout_id: str, **lists: list) -> None:
    _insert(con, "rollout_samples", KEY | {"rollout_id": rollout_id, "group_id": "g"})
    _insert(con, "rollout_training", KEY | {"rollout_id": rollout_id, "turn_index": 0} | lists)


@pytest.fixture
def updated(con):
    """Rollout a of three loss tokens and one outside the loss, b of one and one that was rejected, c all rejected: a's
    ratios 2, 1, 1, b's 0.5. A token whose importance weight is 0 stays in the loss, a rejected one leaves it.
    """
    _trained(
        con, "a", loss_mask=[True, True, True, False], log_probs=[math.log(0.5), -1.0, -1.0, 5.0],
        old_log_probs=[math.log(0.25), -1.0, -1.0, 0.0], ref_log_probs=[math.log(0.5), -1.0, -1.0, 0.0],
        entropy=[0.3, 0.6, 0.9, 99.0], advantages=[1.0, -1.0, 3.0, 99.0], clipped=[True, False, False, True],
        weights=[0.0, 1.0, 0.5, 99.0], critic_values=[0.0, 0.5, 1.0, 99.0], returns=[1.0, 1.0, 1.0, 99.0],
    )  # fmt: skip
    _trained(
        con, "b", loss_mask=[True, False], log_probs=[math.log(0.25), 5.0], old_log_probs=[math.log(0.5), 0.0],
        ref_log_probs=[math.log(0.5), 0.0], entropy=[0.2, 99.0], advantages=[-2.0, 99.0], clipped=[True, False],
        weights=[1.0, 0.0], critic_values=[0.25, 99.0], returns=[0.0, 99.0],
    )  # fmt: skip
    _trained(
        con, "c", loss_mask=[False, False], log_probs=[5.0, 5.0], old_log_probs=[0.0, 0.0], ref_log_probs=[0.0, 0.0],
        entropy=[99.0, 99.0], advantages=[99.0, 99.0], clipped=[False, False], weights=[0.0, 0.0],
        critic_values=[99.0, 99.0], returns=[99.0, 99.0],
    )  # fmt: skip
    return con


BY_ROLLOUT = {  # mean over the loss tokens of a, of b
    "token_share": (3 / 4, 1 / 4),
    "clip_fraction": (1 / 3, 1.0),
    "ratio": (4 / 3, 0.5),
    "ratio_max": (2.0, 0.5),
    "weight": (0.5, 1.0),
    "rejected": (1 / 3, 1 / 2),  # of 3 tokens, of 2
    "advantage": (1.0, -2.0),
    "abs_advantage": (5 / 3, 2.0),
    "entropy": (0.6, 0.2),
    "policy_kl": ((2 - math.log(2) - 1) / 3, 0.5 + math.log(2) - 1),  # k3 with r = p_new / p_old
    "ref_kl": (0.0, 2 - math.log(2) - 1),  # k3 with r = p_ref / p_new
    "value": (0.5, 0.25),
    "value_target": (1.0, 0.0),
}


def test_means_of_a_rollout_are_over_its_loss_tokens(updated):
    """Each quantity by hand; a token outside the loss is in none but the share that was rejected."""
    *found, rejected = _rows(updated, "FROM update_by_rollout('r') ORDER BY rollout_id")
    assert [(row["rollout_id"], row["group_id"], row["loss_tokens"]) for row in found] == [("a", "g", 3), ("b", "g", 1)]
    assert {key: value for key, value in rejected.items() if value is not None} == {
        "step": 1, "group_id": "g", "rollout_id": "c", "loss_tokens": 0, "token_share": 0, "rejected": 1,
        "judged_tokens": 2,
    }  # fmt: skip
    for quantity, wanted in BY_ROLLOUT.items():
        assert [row[quantity] for row in found] == pytest.approx(wanted, abs=1e-6), quantity


def test_a_step_in_tokens_and_in_sequences(updated):
    """The mean over 4 tokens is 3/4 a + 1/4 b, the mean over 2 rollouts (a + b) / 2; highest is the larger of both.

    Rejected are 1 of a's 3 tokens, 1 of b's 2 and both of c's.
    """
    found = {row["quantity"]: row for row in _rows(updated, "FROM update_diagnosis('r', first_step := 1)")}
    assert set(found) == set(BY_ROLLOUT) - {"token_share", "ratio_max"}
    rejected = found.pop("rejected")
    assert rejected["token_mean"] == pytest.approx(4 / 7)
    assert rejected["sequence_mean"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert (rejected["highest"], rejected["highest_mean"], rejected["rollouts"]) == ("c", 1, 3)
    for quantity, row in found.items():
        a, b = BY_ROLLOUT[quantity]
        assert row["token_mean"] == pytest.approx(0.75 * a + 0.25 * b, abs=1e-6), quantity
        assert row["sequence_mean"] == pytest.approx((a + b) / 2, abs=1e-6), quantity
        assert (row["highest"], row["rollouts"]) == ("a" if a > b else "b", 2), quantity
    assert _rows(updated, "FROM update_diagnosis('r', first_step := 2)") == []


def test_what_was_not_recorded_is_unknown(con):
    """Without a reference, critic or correction their quantities are NULL by rollout and absent by step."""
    _trained(con, "a", loss_mask=[True], log_probs=[-1.0], old_log_probs=[-1.0], advantages=[1.0])
    (row,) = _rows(con, "FROM update_by_rollout('r')")
    assert {key for key, value in row.items() if value is None} == {
        "clip_fraction", "weight", "rejected", "entropy", "ref_kl", "value", "value_target",
    }  # fmt: skip
    found = {row["quantity"] for row in _rows(con, "FROM update_diagnosis('r')")}
    assert found == {"ratio", "advantage", "abs_advantage", "policy_kl"}


def test_garbled_validation_is_not_training(con):
    """Of a garbled rollout of a validation and a clean one of training, the clean one alone is judged."""
    for rollout_id, split, text in (("v", "eval", "\ufffd" * 20), ("t", None, "as it should be")):
        _insert(con, "rollout_samples", KEY | {"rollout_id": rollout_id, "split": split})
        _insert(con, "token_runs", KEY | {"rollout_id": rollout_id, "turn_index": 0, "response_text": text})
    assert con.execute("SELECT turns, garbled FROM garbled_output('r')").fetchall() == [(1, 0.0)]


def test_a_call_hangs_by_the_measure_of_its_own_method(con):
    """Open for 400 s: update never took longer than 10 s and hangs; generate once took 300 s and does not, yet."""
    now = con.execute("SELECT now_ns()").fetchone()[0]
    _insert(con, "run_starts", {"run_id": "r", "attempt": 1, "time_ns": now})
    for method, longest in (("update", 10), ("generate", 300)):
        call = KEY | {"method": method, "start_ns": 0, "end_ns": longest * 10**9, "span_id": f"done-{method}"}
        _insert(con, "worker_calls", call)
        begun = KEY | {"trace_id": "t", "span_id": method, "name": "rl.worker.call", "lane": "policy/0"}
        _insert(con, "span_starts", begun | {"method": method, "start_ns": now - 400 * 10**9})
    found = con.execute("SELECT method, longest_s, innermost FROM hung_spans").fetchall()
    assert found == [("update", 10.0, True)]
    assert con.execute("SELECT method FROM timeline ORDER BY 1").fetchall() == [("generate",), ("update",)]
