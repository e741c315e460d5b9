"""Views over time: what must add up does, for any shape of spans, and equals a naive loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinsight import schema

CON = duckdb.connect()
schema.apply(CON, Path(":memory:"))

WALL = 40
KEY = {"run_id": "r", "attempt": 1, "step": 1}
PRIORITY = ["productive", "overhead", "wasted", "idle"]


@pytest.fixture(autouse=True)
def _empty():
    """Nothing of another test."""
    _clear()


def _clear() -> None:
    calls, rollouts = ("worker_calls", "span_starts", "producer_health"), ("rollout_samples", "tool_calls")
    for table in ("steps", "otel_spans", "turns", "serving_requests", "weight_syncs", *calls, *rollouts):
        CON.execute(f"DELETE FROM {table}")


def _insert(table: str, *rows: dict[str, Any]) -> None:
    for row in rows:
        CON.execute(f"INSERT INTO {table} BY NAME SELECT {', '.join(f'? AS {key}' for key in row)}", list(row.values()))


def _span(span_id: str, start: int, end: int, **facts: Any) -> dict[str, Any]:
    raw = {"trace_id": "t", "batch_id": "b", "ingest_ns": 1, "name": span_id, "lane": "x"}
    return raw | KEY | {"span_id": span_id, "start_ns": start, "end_ns": end} | facts


leaves = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(PRIORITY), st.integers(-5, WALL + 5), st.integers(0, 20)),
    max_size=10,
)


@given(leaves)
@settings(max_examples=30, deadline=None)
def test_goodput_adds_up_to_the_step(found):
    """Buckets and unattributed are the step to the nanosecond, together and by lane, as a loop over moments."""
    _clear()
    _insert("steps", KEY | {"trace_id": "t", "span_id": "s", "start_ns": 0, "end_ns": WALL})
    for i, (lane, bucket, start, length) in enumerate(found):
        _insert("otel_spans", _span(f"{i}", start, start + length, lane=lane, bucket=bucket))

    def naive(lanes: str) -> dict[str, int]:
        spent = dict.fromkeys([*PRIORITY, "unattributed"], 0)
        for t in range(WALL):
            held = {bucket for lane, bucket, start, length in found if lane in lanes and start <= t < start + length}
            spent[next((bucket for bucket in PRIORITY if bucket in held), "unattributed")] += 1
        return spent

    sql = "SELECT wall_ns, productive_ns, overhead_ns, wasted_ns, idle_ns, unattributed_ns FROM goodput"
    ((wall, *parts),) = CON.execute(sql).fetchall()
    assert dict(zip([*PRIORITY, "unattributed"], parts, strict=True)) == naive("ab")
    assert sum(parts) == wall == WALL
    by_lane = CON.execute("SELECT lane, bucket, ns FROM goodput_by_lane").fetchall()
    for lane in {lane for lane, *_ in by_lane}:
        assert {bucket: ns for owner, bucket, ns in by_lane if owner == lane} == {
            b: n for b, n in naive(lane).items() if n
        }


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Spans as (id, parent, start, end) under span 0, the step; children may stick out of their parents."""
    spans = []
    for i in range(1, draw(st.integers(0, 9)) + 1):
        start = draw(st.integers(-3, WALL))
        spans.append((i, draw(st.integers(0, i - 1)), start, start + draw(st.integers(0, 25))))
    return spans


def _critical(spans: list[tuple[int, int, int, int]], node: int, floor: int, ts: int) -> list[tuple[int, int, int]]:
    """Slices (start, end, id) of ``node`` between floor and ts, latest first."""
    slices = []
    while ts > floor:
        inside = [s for s in spans if s[1] == node and s[2] < ts and s[3] > floor and s[2] < s[3]]
        if not inside:
            return [*slices, (floor, ts, node)]
        child = max(inside, key=lambda s: (min(s[3], ts), -s[2], s[0]))
        end, start = min(child[3], ts), max(child[2], floor)
        if end < ts:
            slices.append((end, ts, node))
        slices += _critical(spans, child[0], start, end)
        ts = start
    return slices


@given(trees())
@settings(max_examples=30, deadline=None)
def test_the_critical_path_follows_who_ended_last(spans):
    """Its slices cover the step without hole or overlap, and are those of a recursive walk back from the end."""
    _clear()
    _insert("steps", KEY | {"trace_id": "t", "span_id": "0", "start_ns": 0, "end_ns": WALL})
    _insert("otel_spans", _span("0", 0, WALL))
    for i, parent, start, end in spans:
        _insert("otel_spans", _span(f"{i}", start, end, parent_span_id=f"{parent}"))
    found = CON.execute("SELECT start_ns, end_ns, span_id::INT FROM critical_path('r') ORDER BY 1").fetchall()
    assert found == sorted(_critical(spans, 0, 0, WALL))
    assert sum(end - start for start, end, _ in found) == WALL


def test_the_critical_path_of_two_ranks_is_the_slower_one():
    """A phase of two worker calls, 2-8 and 2-9: the path is phase, slower call, phase, then the step's rest."""
    _insert("steps", KEY | {"trace_id": "t", "span_id": "step", "start_ns": 0, "end_ns": 12})
    _insert("otel_spans", _span("step", 0, 12), _span("phase", 1, 10, parent_span_id="step"))
    for call, end in (("fast", 8), ("slow", 9)):
        _insert("otel_spans", _span(call, 2, end, parent_span_id="phase"))
    found = CON.execute("SELECT name, dur, depth FROM critical_path('r', first_step := 1, last_step := 1)").fetchall()
    assert found == [("step", 1, 0), ("phase", 1, 1), ("slow", 7, 2), ("phase", 1, 1), ("step", 2, 0)]


def test_turns_find_their_engine_request_by_id_or_by_parent():
    """By the request's id, else by its span under the turn's; a turn stays one row when a request was sent twice."""
    for i, request in enumerate(("q0", "q1", None)):
        _insert("turns", KEY | {"rollout_id": f"{i}", "request_id": request, "trace_id": "t", "span_id": f"turn{i}"})
    for _ in range(2):
        _insert("serving_requests", KEY | {"request_id": "q0", "span_id": "a", "queue_s": 0.5, "end_ns": 1})
    other = KEY | {
        "request_id": "chatcmpl-q1-0",
        "trace_id": "t",
        "span_id": "b",
        "parent_span_id": "turn1",
        "ttft_s": 2.0,
        "end_ns": 1,
    }
    _insert("serving_requests", other)
    found = CON.execute("SELECT rollout_id, request_span_id, queue_s, ttft_s FROM turn_requests ORDER BY 1").fetchall()
    assert found == [("0", "a", 0.5, None), ("1", "b", None, 2.0), ("2", None, None, None)]


def test_a_request_told_by_client_and_server_is_one_row_of_both():
    """The client's span knows the request's id, the server's how long it queued; neither is lost."""
    turn = {"rollout_id": "0", "request_id": "q0", "trace_id": "t", "span_id": "turn"}
    _insert("turns", KEY | turn)
    under = KEY | {"trace_id": "t", "parent_span_id": "turn"}
    _insert("serving_requests", under | {"request_id": "q0", "span_id": "client", "end_ns": 3, "ttft_s": 2.0})
    _insert("serving_requests", under | {"request_id": "cmpl-q0-0", "span_id": "server", "end_ns": 2, "queue_s": 0.5})
    found = CON.execute("SELECT request_span_id, queue_s, ttft_s FROM turn_requests").fetchall()
    assert found == [("client", 0.5, 2.0)]


def test_time_per_token_is_of_those_after_the_first():
    """Two seconds of decoding for five tokens are half a second each; one token, or no time, leaves it unknown."""
    for i, (tokens, decode_s) in enumerate([(5, 2.0), (1, 2.0), (5, None)]):
        request = {"request_id": f"q{i}", "span_id": f"{i}"}
        _insert("turns", KEY | request | {"output_tokens": tokens})
        _insert("serving_requests", KEY | request | {"decode_s": decode_s, "end_ns": 1})
    assert CON.execute("SELECT tpot_s FROM turn_requests ORDER BY request_id").fetchall() == [(0.5,), (None,), (None,)]


CAUSES = {  # what a late rollout of 30 s has beside all of those below it; the limits belong to none
    "failed": {"status": "error"},
    "tool": {"tool_s": 15.1},
    "queue": {"queue_s": 15.1},
    "preempted": {"preemptions": 1},
    "long": {"tokens": 200},
    "slow": {"status": "ok", "tool_s": 15.0, "queue_s": 15.0, "preemptions": 0, "tokens": 199},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_straggler_has_the_first_cause_that_holds(cause):
    """20 rollouts end after 10 s with 100 tokens, one after 15 s, which is in time; one after 30 s."""
    second = 10**9
    facts = {}
    for of_cause in reversed(list(CAUSES)[list(CAUSES).index(cause) :]):
        facts |= CAUSES[of_cause]
    for i in range(22):
        late = i == 21
        rollout = KEY | {"rollout_id": f"{i}", "start_ns": 0, "end_ns": {20: 15, 21: 30}.get(i, 10) * second}
        sampled = {"status": facts["status"] if late else "ok", "response_tokens": facts["tokens"] if late else 100}
        _insert("rollout_samples", rollout | sampled)
    of = KEY | {"rollout_id": "21"}
    _insert("turns", of | {"request_id": "q", "replica": "policy/0", "turn_index": 0})
    engine = {"queue_s": facts["queue_s"], "num_preemptions": facts["preemptions"]}
    _insert("serving_requests", of | {"request_id": "q", "end_ns": 1} | engine)
    _insert("tool_calls", of | {"start_ns": 0, "end_ns": int(facts["tool_s"] * second)})
    found = CON.execute("SELECT rollout_id, cause, held_s, duration_s, replica, tool_s FROM stragglers('r')").fetchall()
    assert found == [("21", cause, 20.0, 30.0, "policy/0", facts["tool_s"])]


def test_a_replica_that_joins_later_owes_no_earlier_version():
    """Replica b first gets version 2: version 1 is not missing there; version 3 is, which only a got."""
    for version, replica in ((1, "a"), (2, "a"), (2, "b"), (3, "a")):
        facts = {"policy_version": version, "replica": replica, "end_ns": version, "span_id": f"{version}{replica}"}
        _insert("weight_syncs", KEY | facts)
    found = CON.execute("SELECT policy_version, replica, problem FROM sync_health('r') WHERE problem IS NOT NULL")
    assert found.fetchall() == [(3, "b", "missing")]


def test_a_replica_that_is_given_a_version_again_is_compared_with_what_was_trained():
    """Only the sync of all tells that checksum. Replica a has it, b does not, and c cannot tell."""
    trained = KEY | {"policy_version": 1, "end_ns": 1, "checksum_trained": "x", "checksum_served": "x"}
    again = KEY | {"policy_version": 1, "end_ns": 2}
    for replica, served in (("a", "x"), ("b", "y"), ("c", None)):
        of = {"replica": replica}
        _insert("weight_syncs", trained | of | {"span_id": f"1{replica}"})
        _insert("weight_syncs", again | of | {"span_id": f"2{replica}", "checksum_served": served})
    found = CON.execute("SELECT replica, same_checksum, problem FROM sync_health('r') ORDER BY replica").fetchall()
    assert found == [("a", True, None), ("b", False, "checksum"), ("c", None, None)]


def test_a_rank_counts_from_the_start_of_its_call():
    """Rank 1 has begun the call and not ended it, so it is there. Rank 2, there in step 1, has not begun in step 2."""
    call = {"method": "update", "lane": "policy/0", "start_ns": 5}
    for rank in range(3):
        _insert("worker_calls", KEY | call | {"rank": rank, "span_id": f"1{rank}"})
    _insert("worker_calls", KEY | call | {"step": 2, "rank": 0, "span_id": "20"})
    started = KEY | call | {"step": 2, "rank": 1, "span_id": "21", "name": "rl.worker.call"}
    _insert("span_starts", started)
    found = CON.execute("SELECT step, rank, calls, expected_calls FROM missing_ranks('r')").fetchall()
    assert found == [(2, 2, 0, 1)]


@pytest.mark.parametrize("known_by", ["another call", "its health", "the size"])
def test_a_rank_that_never_made_a_call_is_missing_in_the_first_one(known_by):
    """Ranks 0 and 1 have begun their first update. Another call, its health or the group's size tells of rank 2."""
    begun = KEY | {"method": "update", "name": "rl.worker.call", "start_ns": 5}
    for rank in range(2):
        _insert("span_starts", begun | {"lane": f"policy/{rank}", "rank": rank, "span_id": f"u{rank}"})
    start = KEY | {"step": None, "method": "start", "start_ns": 1, "world_size": 3}
    if known_by == "its health":
        for service in ("rlinsight.policy", "rlinsight.reference"):  # the latter is another group's
            _insert("producer_health", {"run_id": "r", "attempt": 1, "service_name": service, "rank": 2})
        _insert("producer_health", {"run_id": "r", "attempt": 1, "service_name": "rlinsight.reference", "rank": 3})
    else:
        for rank in range(3 if known_by == "another call" else 1):
            size = {"world_size": None} if known_by == "another call" else {}
            call = {"lane": f"policy/{rank}", "rank": rank, "span_id": f"s{rank}"}
            _insert("worker_calls", start | call | size)
    found = CON.execute("SELECT method, rank, calls, expected_calls FROM missing_ranks('r') WHERE step = 1").fetchall()
    assert found == [("update", 2, 0, 1)]


def test_what_one_rank_does_alone_is_missing_nowhere():
    """A checkpoint under way outside a step, a call that ended well in one. One that failed or is open in it is not."""
    for rank in range(2):
        call = {"method": "start", "lane": f"policy/{rank}", "rank": rank, "span_id": f"s{rank}", "start_ns": 1}
        _insert("worker_calls", KEY | call | {"step": None, "status_code": 1})
    alone = {"lane": "policy/0", "rank": 0, "start_ns": 5}
    _insert("span_starts", KEY | alone | {"step": None, "method": "save", "name": "rl.worker.call", "span_id": "a"})
    _insert("worker_calls", KEY | alone | {"method": "probe", "span_id": "b", "status_code": 1})
    assert CON.execute("FROM missing_ranks('r')").fetchall() == []
    _insert("span_starts", KEY | alone | {"method": "update", "name": "rl.worker.call", "span_id": "c"})
    _insert("worker_calls", KEY | alone | {"method": "log_probs", "span_id": "d", "status_code": 2})
    found = CON.execute("SELECT method, rank FROM missing_ranks('r') ORDER BY method").fetchall()
    assert found == [("log_probs", 1), ("update", 1)]


def test_a_step_of_several_updates_does_not_make_its_rollouts_old_at_its_start():
    """Sampled by version 4 in a step that began at 4, consumed at 4 and 5: staleness 0 and 1, at_start 0."""
    CON.execute("DELETE FROM rollout_training")
    _insert("steps", KEY | {"start_ns": 0, "end_ns": 1, "policy_version_in": 4})
    for i in range(2):
        rollout = KEY | {"rollout_id": f"{i}"}
        _insert("rollout_samples", rollout | {"policy_version_min": 4, "policy_version_max": 4})
        _insert("rollout_training", rollout | {"turn_index": 0, "policy_version": 4 + i})
    found = CON.execute("SELECT staleness, at_start, rollouts, mixed_versions FROM staleness ORDER BY 1").fetchall()
    assert found == [(0, 0, 1, 0), (1, 0, 1, 0)]
