"""counter_increase() on points worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from rlinsight import schema

SECOND = 10**9


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    schema.apply(connection, Path(":memory:"))
    return connection


def put(con: duckdb.DuckDBPyConnection, points: list[tuple[int, int | None, float]], **fields: Any) -> None:
    """Points (time and start in seconds, value) of a counter."""
    facts = {"name": "c", "kind": "sum", "is_monotonic": True, "temporality": "cumulative", "attributes": "{}"}
    facts |= {"run_id": "r", "resource_attributes": "{}", "batch_id": "b", "ingest_ns": 1} | fields
    number = "count" if facts["kind"] == "histogram" else "value"
    for time_s, start_s, value in points:
        row = {**facts, "time_ns": time_s * SECOND, "start_ns": start_s and start_s * SECOND, number: value}
        marks = ", ".join("?" * len(row))
        con.execute(f"INSERT INTO otel_metrics ({', '.join(row)}) VALUES ({marks})", list(row.values()))


def grown(con: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    """From, to (seconds), increase and whether the counter began anew, in order of time."""
    sql = "SELECT from_ns // $s, time_ns // $s, increase, is_reset FROM counter_increase('c') ORDER BY 2"
    return con.execute(sql, {"s": SECOND}).fetchall()


def test_growth_between_points(con: duckdb.DuckDBPyConnection) -> None:
    """Differences of values in order of time, in whatever order they came; duplicates count once; per_s is a rate."""
    put(con, [(30, 5, 20), (10, 5, 4), (20, 5, 10), (20, 5, 10)])
    assert grown(con) == [(5, 10, 4, False), (10, 20, 6, False), (20, 30, 10, False)]
    assert con.execute("SELECT per_s FROM counter_increase('c') ORDER BY time_ns").fetchall() == [
        (0.8,),
        (0.6,),
        (1.0,),
    ]


def test_an_unknown_start_says_nothing_of_the_first_point(con: duckdb.DuckDBPyConnection) -> None:
    """What a counter had before it was first seen is unknown, not zero."""
    put(con, [(10, None, 1000), (20, None, 1003)])
    assert grown(con) == [(None, 10, None, False), (10, 20, 3, False)]


def test_a_counter_that_begins_anew_counts_from_zero(con: duckdb.DuckDBPyConnection) -> None:
    """A value that falls, or a start that moves though the value grew, is a reset: all of the value is new."""
    put(con, [(10, None, 7), (20, 10, 2), (30, 10, 5), (40, 35, 6)])
    assert grown(con) == [(None, 10, None, False), (10, 20, 2, True), (20, 30, 3, False), (35, 40, 6, True)]


def test_series_are_apart(con: duckdb.DuckDBPyConnection) -> None:
    """Points of other labels, processes and runs are other series; a histogram grows by its count, deltas are growth"""
    put(con, [(10, 1, 5), (20, 1, 6)], attributes='{"k": "1"}')
    put(con, [(10, 1, 50)], attributes='{"k": "2"}')
    put(con, [(10, 1, 500)], run_id="other")
    put(con, [(10, 1, 3), (20, 1, 4)], name="c", kind="histogram", is_monotonic=None, service_instance_id="h")
    put(con, [(10, 1, 2), (20, 10, 2)], temporality="delta", service_instance_id="d")
    put(con, [(10, 1, 9)], is_monotonic=False, service_instance_id="up and down")
    total = """
        SELECT coalesce(run_id, ''), coalesce(service_instance_id, ''), sum(increase)
        FROM counter_increase('c') GROUP BY ALL ORDER BY ALL
    """
    assert con.execute(total).fetchall() == [("other", "", 500), ("r", "", 56), ("r", "d", 4), ("r", "h", 4)]
