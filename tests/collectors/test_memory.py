from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from collectors.database import Database
from collectors.memory import INGEST_BYTES, QUERY_BYTES, MemoryLimit

GIB = 1024**3


def _limit(con: duckdb.DuckDBPyConnection) -> str:
    return con.execute("SELECT current_setting('memory_limit')").fetchone()[0]  # type: ignore[index]


def _used(con: duckdb.DuckDBPyConnection) -> int:
    return con.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchone()[0]  # type: ignore[index]


def test_ingest_gets_little_and_queries_get_much(tmp_path: Path) -> None:
    """The limit is wide while at least one query is open, and narrow before, after, and when one was interrupted."""
    with Database(tmp_path / "s.duckdb") as database:
        database.memory.narrow()
        narrow = _limit(database.con)
        first, second = database.queries.open(), database.queries.open()
        wide = _limit(database.con)
        database.queries.release(first)
        assert _limit(database.con) == wide
        database.queries.release(second)
        assert _limit(database.con) == narrow
        assert (narrow, wide) == ("160.0 MiB", "2.0 GiB")


def test_what_queries_cached_is_let_go(tmp_path: Path) -> None:
    """After a query that read a gigabyte, no more than ingest's allowance stays in memory."""
    with Database(tmp_path / "s.duckdb") as database:
        con = database.queries.open()
        con.execute("CREATE TABLE x AS SELECT random() AS a, random() AS b FROM range(20_000_000)")
        con.execute("CHECKPOINT")
        con.execute("SELECT sum(a), sum(b) FROM x").fetchall()
        assert _used(con) > 1.5 * INGEST_BYTES  # else there is nothing to see here
        database.queries.release(con)
        assert _used(database.con) <= INGEST_BYTES


@pytest.mark.parametrize(
    ("available", "expected"), [(64 * GIB, QUERY_BYTES), (2 * GIB, GIB // 2), (GIB // 4, GIB // 16)]
)
def test_a_small_machine_gives_a_quarter(available: int, expected: int) -> None:
    """A quarter of what the machine or control group has, never more than the cap, and ingest within it."""
    con = duckdb.connect()
    limit = MemoryLimit(con, available)
    limit.narrow()
    assert _limit(con) == f"{min(INGEST_BYTES, expected) / 2**20:.1f} MiB"
    limit.widen()
    unit, size = ("GiB", GIB) if expected >= GIB else ("MiB", 2**20)
    assert _limit(con) == f"{expected / size:.1f} {unit}"


def test_a_query_that_holds_more_keeps_its_memory() -> None:
    """Narrowing while another connection holds more than ingest's allowance changes nothing, and raises nothing."""
    con = duckdb.connect()
    limit = MemoryLimit(con, 64 * GIB)
    limit.widen()
    wide = _limit(con)
    con.execute("CREATE TEMP TABLE held AS SELECT random() AS a FROM range(40_000_000)")
    con.execute("SET max_temp_directory_size = '0B'")  # nowhere to spill to: what is held stays in memory
    limit.narrow()
    assert _limit(con) == wide
