from __future__ import annotations

import threading
import time
from pathlib import Path

import duckdb
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collectors import memory
from collectors.database import Database
from collectors.decode import Decoder
from collectors.intake import Intake
from collectors.memory import INGEST_BYTES, MemoryLimit
from collectors.payload import PROTOBUF
from collectors.quack import Gate
from collectors.writer import MAX_GROUP_SHARED_BYTES, Writer
from rlinsight.memory import QUERY_BYTES, memory_bytes, query_bytes

GIB = 1024**3


def _limit(con: duckdb.DuckDBPyConnection) -> str:
    return con.execute("SELECT current_setting('memory_limit')").fetchone()[0]  # type: ignore[index]


def _used(con: duckdb.DuckDBPyConnection) -> int:
    return con.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchone()[0]  # type: ignore[index]


def _text(size: int) -> str:
    """A size as DuckDB tells it."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


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
        assert (narrow, wide) == (_text(INGEST_BYTES), _text(query_bytes(memory_bytes())))


def test_what_queries_cached_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a query that read more than ingest's allowance, no more than that stays in memory."""
    allowance = 16 * 2**20
    monkeypatch.setattr(memory, "INGEST_BYTES", allowance)
    with Database(tmp_path / "s.duckdb") as database:
        database.memory.narrow()
        con = database.queries.open()
        con.execute("CREATE TABLE x AS SELECT random() AS a, random() AS b FROM range(2_000_000)")
        con.execute("CHECKPOINT")
        con.execute("SELECT sum(a), sum(b) FROM x").fetchall()
        assert _used(con) > 1.5 * allowance  # else there is nothing to see here
        database.queries.release(con)
        assert _used(database.con) <= allowance


@pytest.mark.parametrize(
    ("available", "expected"), [(64 * GIB, QUERY_BYTES), (2 * GIB, GIB // 2), (GIB // 4, GIB // 16)]
)
def test_a_small_machine_gives_a_quarter(available: int, expected: int) -> None:
    """A quarter of what the machine or control group has, never more than the cap, and ingest within it."""
    con = duckdb.connect()
    limit = MemoryLimit(con, available)
    limit.narrow()
    assert _limit(con) == _text(min(INGEST_BYTES, expected))
    limit.widen()
    assert _limit(con) == _text(expected)


def test_a_query_that_holds_more_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrowing while another connection holds more than ingest's allowance changes nothing, and raises nothing."""
    monkeypatch.setattr(memory, "INGEST_BYTES", 16 * 2**20)
    con = duckdb.connect()
    limit = MemoryLimit(con, 64 * GIB)
    wide = _limit(con)
    con.execute("CREATE TEMP TABLE held AS SELECT random() AS a FROM range(4_000_000)")
    con.execute("SET max_temp_directory_size = '0B'")  # nowhere to spill to: what is held stays in memory
    limit.narrow()
    assert _limit(con) == wide


def test_what_is_lent_is_taken_back_after_the_last_loan() -> None:
    """A later loan renews the one that is out; one timer takes it back, and none outlives the database."""
    con = duckdb.connect()
    limit = MemoryLimit(con, 64 * GIB)
    limit.narrow()
    before = set(threading.enumerate())
    for _ in range(20):
        limit.lend(3)
    assert len(set(threading.enumerate()) - before) == 1
    time.sleep(2)
    limit.lend(3)
    time.sleep(2)
    assert _limit(con) == _text(QUERY_BYTES)
    deadline = time.monotonic() + 10
    while _limit(con) != _text(INGEST_BYTES):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    limit.lend(60)
    limit.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("sql", ["FROM runs", "SELECT 1"])
def test_a_statement_let_through_quack_has_a_querys_memory(sql: str, tmp_path: Path) -> None:
    """Quack runs it after the question, and does not say when it ends."""
    with Database(tmp_path / "s.duckdb") as database:
        database.memory.narrow()
        gate = Gate(database.queries)
        assert not gate("session", "CREATE TABLE x (a INT)")
        assert _limit(database.con) == _text(INGEST_BYTES)
        assert gate("session", sql)
        assert _limit(database.con) == _text(query_bytes(memory_bytes()))


def test_a_batch_of_the_largest_size_allowed_is_stored(tmp_path: Path) -> None:
    """Its transaction takes more than ingest's allowance; answered as a full disk is, it would be sent for ever."""
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    for _ in range(10):
        records.add().attributes.add(key="k").value.string_value = "\x01" * 10**6  # six bytes each, as JSON
    with Database(tmp_path / "s.duckdb") as database:
        database.memory.narrow()
        narrow = _limit(database.con)
        writer = Writer(database.con, database.columns, database.memory)
        writer.start()
        accepted = Intake(Decoder(database.columns), writer).take(
            "logs", request.SerializeToString(), PROTOBUF, "p", "1"
        )
        writer.close()
        assert accepted.done.result(0) is True
        assert _limit(database.con) == narrow


def test_batches_that_are_large_in_the_store_go_into_transactions_of_their_own(tmp_path: Path) -> None:
    """Kilobytes each, of small spans under one large resource: together they would be more than memory holds."""
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key="k").value.string_value = "x" * 50_000
    spans = resource_spans.scope_spans.add().spans
    for _ in range(MAX_GROUP_SHARED_BYTES // 50_000 + 1):
        span = spans.add()
        span.trace_id, span.span_id, span.start_time_unix_nano, span.end_time_unix_nano = b"1" * 16, b"1" * 8, 1, 2
    with Database(tmp_path / "s.duckdb") as database:
        writer = Writer(database.con, database.columns, database.memory)
        intake = Intake(Decoder(database.columns), writer)
        for number in range(2):
            intake.take("traces", request.SerializeToString(), PROTOBUF, "p", str(number))
        writer.start()
        writer.close()
        assert (writer.stats.commits, writer.stats.failures) == (2, 0)
