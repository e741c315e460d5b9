from __future__ import annotations

import itertools

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards import gantt
from dashboards.palette import RED

SECOND = 10**9


def spans(*rows: tuple) -> pd.DataFrame:
    """Rows of (span_id, parent, lane, start s, end s or None, rollout)."""
    frame = pd.DataFrame(rows, columns=["span_id", "parent_span_id", "lane", "start", "end", "rollout_id"])
    return frame.assign(
        name="rl.worker.call", phase=None, method=None, step=1, failed=False,
        start_ns=[int(s * SECOND) for s in frame["start"]],
        end_ns=pd.array([None if pd.isna(e) else int(e * SECOND) for e in frame["end"]], dtype="Int64"),
    )  # fmt: skip


def drawn(frame: pd.DataFrame, now: float = 100) -> dict[tuple[float, float], float]:
    """(start, length) of each bar to its row's centre."""
    figure = gantt.gantt(frame, pd.DataFrame({"step": [1], "start_ns": [0]}), int(now * SECOND)).figure
    return {
        (round(base, 3), round(length, 3)): y
        for bar in figure.data
        for base, length, y in zip(bar.base, bar.x, bar.y, strict=True)
    }


def test_children_hang_under_their_parent() -> None:
    """A span inside another stands in a lower row; a later sibling reuses that row."""
    at = drawn(
        spans(
            ("p", None, "policy/0", 0, 10, None), ("a", "p", "policy/0", 1, 4, None), ("b", "p", "policy/0", 4, 9, None)
        )
    )
    assert at[(0, 10)] < at[(1, 3)] == at[(4, 5)]


def test_controller_stands_above_workers_above_rollouts() -> None:
    """Lanes are ordered by role, then rank as a number; rollouts have the last lane."""
    lanes = ["rollouts", "policy/10", "reward/0", "policy/2", "controller"]
    assert sorted(lanes, key=gantt.lane_order) == ["controller", "policy/2", "policy/10", "reward/0", "rollouts"]


def test_a_rollout_and_its_turns_share_a_row() -> None:
    """Turns are drawn over their rollout, whatever process they ran in; another rollout gets its own row."""
    at = drawn(
        spans(
            ("r", None, "policy/0", 0, 6, "r0"), ("t", "r", "policy/0", 0, 2, "r0"), ("s", None, "policy/0", 1, 5, "r1")
        )
    )
    assert at[(0, 6)] == at[(0, 2)] != at[(1, 4)]


def test_open_spans_run_to_now_and_are_hatched() -> None:
    """A span without an end reaches the present and looks different from a finished one."""
    frame = spans(("p", None, "controller", 0, None, None), ("a", "p", "controller", 1, 3, None))
    figure = gantt.gantt(frame, pd.DataFrame(), 20 * SECOND).figure
    hatched = {bar.marker.pattern.shape: list(bar.x) for bar in figure.data}
    assert hatched == {"/": [20.0], None: [2.0]}


def test_failed_spans_are_outlined() -> None:
    """A span that ended in an error has a red border."""
    frame = spans(("p", None, "controller", 0, 1, None)).assign(failed=True)
    bar = gantt.gantt(frame, pd.DataFrame(), 0).figure.data[0]
    assert bar.marker.line.color == RED
    assert list(bar.marker.line.width) == [1.5]


def test_what_finds_no_row_is_counted() -> None:
    """More overlapping spans than rows: the rest is left out and said so."""
    frame = spans(*[(str(i), None, "rollouts", 0, 1 + i, f"r{i}") for i in range(gantt.MAX_ROWS + 5)])
    assert gantt.gantt(frame, pd.DataFrame(), 0).hidden == 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=40))
def test_spans_in_one_row_never_overlap(intervals: list[tuple[int, int]]) -> None:
    """Whatever the spans, two in the same row do not cover each other."""
    frame = spans(*[(str(i), None, "policy/0", s, s + n, None) for i, (s, n) in enumerate(intervals)])
    figure = gantt.gantt(frame, pd.DataFrame(), 0).figure
    by_row: dict[float, list[tuple[float, float]]] = {}
    for bar in figure.data:
        for base, length, y in zip(bar.base, bar.x, bar.y, strict=True):
            by_row.setdefault(y, []).append((base, base + length))
    for row in by_row.values():
        row.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(row))
