"""Interval macros and text functions against naive loops and numbers worked by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinsight import schema

CON = duckdb.connect()
schema.apply(CON, Path(":memory:"))

FOREVER = 10**6  # past every end the strategies make
Interval = tuple[int, int, int | None]  # id, start, end; None is open


def _values(rows: list[tuple]) -> str:
    """Rows as a CTE body; one that is empty still has its columns."""
    columns = "id, start_ns, end_ns, parent_id"
    tuples = ", ".join(
        "(" + ", ".join("NULL" if value is None else str(value) for value in (*row, *[None] * (4 - len(row)))) + ")"
        for row in [*rows, (0, 0, 0)]
    )
    casts = "id::BIGINT AS id, start_ns::BIGINT AS start_ns, end_ns::BIGINT AS end_ns, parent_id::BIGINT AS parent_id"
    return f"SELECT {casts} FROM (VALUES {tuples}) v({columns}) WHERE id > 0"


def _ask(sql: str, **relations: list[tuple]) -> list[tuple]:
    ctes = ", ".join(f"{name} AS ({_values(rows)})" for name, rows in relations.items())
    return CON.execute(f"WITH {ctes} {sql}").fetchall()


def _end(interval: Interval) -> int:
    return FOREVER if interval[2] is None else interval[2]


def _unend(end: int) -> int | None:
    return None if end == FOREVER else end


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    """Up to 12 small intervals: empty, touching, equal and open ones among them."""
    rows = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 6)), max_size=12))
    return [(i + 1, start, None if length < 0 else start + length) for i, (start, length) in enumerate(rows)]


@given(intervals())
@settings(max_examples=30, deadline=None)
def test_overlap_count_is_how_many_hold_a_moment(rows):
    """At each moment as many as a loop finds; open ones to the end."""
    found = _ask("SELECT ts, n FROM intervals_overlap_count('a') ORDER BY ts", a=rows)
    edges = {ts for row in rows if row[1] < _end(row) for ts in (row[1], _end(row)) if ts != FOREVER}
    assert [ts for ts, _ in found] == sorted(edges)
    for ts, n in found:
        assert n == sum(row[1] <= ts < _end(row) for row in rows), ts


@given(intervals(), intervals())
@settings(max_examples=30, deadline=None)
def test_intersect_is_every_pair_that_overlaps(a, b):
    """The pairs of a double loop with a common part that is not empty; also of a relation with itself."""

    def naive(xs: list[Interval], ys: list[Interval]) -> list[tuple]:
        parts = [(x[0], y[0], max(x[1], y[1]), min(_end(x), _end(y))) for x in xs for y in ys]
        return sorted((i, j, start, _unend(end)) for i, j, start, end in parts if start < end)

    assert sorted(_ask("FROM intervals_intersect('a', 'b')", a=a, b=b)) == naive(a, b)
    assert sorted(_ask("FROM intervals_intersect('a', 'a')", a=a)) == naive(a, a)


def _stretches(rows: list[Interval]) -> list[list[int]]:
    stretches: list[list[int]] = []
    for start, end in sorted((row[1], _end(row)) for row in rows if row[1] < _end(row)):
        if stretches and start <= stretches[-1][1]:
            stretches[-1][1] = max(end, stretches[-1][1])
            stretches[-1][2] += 1
        else:
            stretches.append([start, end, 1])
    return stretches


@given(intervals())
@settings(max_examples=30, deadline=None)
def test_union_merges_and_gaps_are_between(rows):
    """Stretches of a loop over the sorted intervals, and what lies between two of them."""
    stretches = _stretches(rows)
    union = _ask("FROM intervals_union('a') ORDER BY 1", a=rows)
    assert union == [(start, _unend(end), n) for start, end, n in stretches]
    gaps = [(left[1], right[0], right[0] - left[1]) for left, right in pairwise(stretches)]
    assert _ask("FROM intervals_gaps('a') ORDER BY 1", a=rows) == gaps


@given(intervals())
@settings(max_examples=30, deadline=None)
def test_flatten_gives_each_moment_to_the_innermost(rows):
    """Moment by moment the interval that began last, of those the shortest, of those the last id."""
    found = _ask("FROM intervals_flatten('a') ORDER BY 2", a=rows)
    for left, right in pairwise(found):
        assert _end(left) <= right[1]
        assert _end(left) < right[1] or left[0] != right[0], "slices of one id that touch are one"
    for moment in range(25):
        holders = [row for row in rows if row[1] <= moment < _end(row)]
        wanted = max(holders, key=lambda row: (row[1], -_end(row), row[0]))[0] if holders else None
        owners = [id_ for id_, start, end in found if start <= moment < (FOREVER if end is None else end)]
        assert owners == ([] if wanted is None else [wanted])


@given(intervals(), st.data())
@settings(max_examples=30, deadline=None)
def test_self_time_is_what_no_child_covers(rows, data):
    """Moments of an interval that are in none of its children; NULL for one that is open."""
    parents = {row[0]: data.draw(st.integers(0, row[0] - 1)) for row in rows}
    tree = [(*row, parents[row[0]] or None) for row in rows]
    found = {row[0]: row[4] for row in _ask("FROM intervals_self_time('a')", a=tree)}
    assert set(found) == set(parents)
    for id_, start, end in rows:
        children = [row for row in rows if parents[row[0]] == id_]
        if end is None:
            assert found[id_] is None
            continue
        own = [t for t in range(start, end) if not any(row[1] <= t < _end(row) for row in children)]
        assert found[id_] == len(own)


def test_intervals_by_hand():
    """Empty relation; touching; three deep; one inside that ends with its parent."""
    assert _ask("FROM intervals_union('a')", a=[]) == []
    assert _ask("FROM intervals_flatten('a')", a=[]) == []
    touching = [(1, 0, 5), (2, 5, 9)]
    assert _ask("FROM intervals_union('a')", a=touching) == [(0, 9, 2)]
    assert _ask("FROM intervals_gaps('a')", a=touching) == []
    assert _ask("FROM intervals_intersect('a', 'a') WHERE a_id < b_id", a=touching) == []
    nested = [(1, 0, 10, None), (2, 2, 10, 1), (3, 4, 6, 2)]
    slices = [(1, 0, 2), (2, 2, 4), (3, 4, 6), (2, 6, 10)]
    assert _ask("FROM intervals_flatten('a')", a=nested) == slices
    assert _ask("SELECT id, self_ns FROM intervals_self_time('a') ORDER BY 1", a=nested) == [(1, 2), (2, 6), (3, 2)]


def test_hundred_thousand_intervals_are_no_hundred_thousand_squared():
    """Trees of 10 nested spans, 100,000 in all, in a CTE that is used twice: minutes when all pairs are compared."""
    trees = """WITH a AS (SELECT i AS id, i // 10 * 1000 + i % 10 * 10 AS start_ns,
      i // 10 * 1000 + 1000 - i % 10 * 10 AS end_ns FROM range(100000) t(i))"""
    assert CON.execute(f"{trees} SELECT count(*) FROM intervals_intersect('a', 'a')").fetchone() == (1_000_000,)
    assert CON.execute(f"{trees} SELECT count(*) FROM intervals_flatten('a')").fetchone() == (190_000,)


@pytest.mark.parametrize(
    ("q", "value"),
    [(0.0, 1.0), (0.2, 1.5), (0.4, 2.0), (0.6, 3.0), (0.8, 4.0), (1.0, 4.0)],
)
def test_hist_quantile_by_hand(q, value):
    """0, 10, 10, 5 observations up to 1, 2, 4 and beyond; evenly spread in a bucket, the last has no upper bound."""
    found = CON.execute("SELECT hist_quantile([1.0, 2.0, 4.0], [0, 10, 10, 5]::UBIGINT[], ?)", [q]).fetchone()
    assert found == (pytest.approx(value),)


def test_hist_quantile_of_nothing_is_unknown_and_the_first_bucket_starts_at_zero():
    """Empty histogram; and half of a first bucket up to 10."""
    empty = CON.execute("SELECT hist_quantile([1.0, 2.0], [0, 0, 0]::UBIGINT[], 0.5)").fetchone()
    assert empty == (None,)
    assert CON.execute("SELECT hist_quantile([10.0], [4, 0]::UBIGINT[], 0.5)").fetchone() == (5.0,)


@pytest.mark.parametrize(
    ("text", "repeated", "garbled"),
    [
        (None, None, None),
        ("", 0, 0),
        ("one two three", 0, 0),
        ("the cat sat on the mat", 0, 0),
        ("a b c d a b c d", 1 / 5, 0),
        ("no no no no no no no no no no no no no", 0.9, 0),
        ("line\n\tnext", 0, 0),
        ("ab\ufffd\x07\x85", 0, 3 / 5),
        ("Größe 数学 🙂", 0, 0),
    ],
)
def test_texts_by_hand(text, repeated, garbled):
    """Runs of four words that came before; characters that are no text. Other scripts and line breaks are text."""
    found = CON.execute("SELECT repeated_fraction(?), garbled_fraction(?)", [text, text]).fetchone()
    assert found is not None
    for value, wanted in zip(found, (repeated, garbled), strict=True):
        assert (value is None) == (wanted is None)
        assert wanted is None or math.isclose(value, wanted, abs_tol=1e-12)


@given(st.lists(st.sampled_from("abc"), max_size=30))
@settings(max_examples=30, deadline=None)
def test_repeated_fraction_counts_runs_of_four_words(words):
    """As a loop over all runs counts them."""
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    wanted = 1 - len(set(runs)) / len(runs) if runs else 0
    found = CON.execute("SELECT repeated_fraction(?)", [" ".join(words)]).fetchone()
    assert found == (pytest.approx(wanted),)
