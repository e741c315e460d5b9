"""Promise 8. Readers never block the writer; a heavy query is cut off by time and memory limits.

The time limit of one query, and statements that end with their client: tests/test_store.py.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from collectors import quack
from collectors.memory import MemoryLimit
from collectors.otlp_http import MAX_QUERIES
from collectors.queries import Queries
from rlinsight.attach import connect, extension
from rlinsight.errors import StoreError
from rlinsight.store import query
from tests.collectors.live import Collector, collector
from tests.promises.support import log_request

HEAVY = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range % 7 = 3"
LARGE = "SELECT list(range) FROM range(300000000)"  # over the memory a collector gives DuckDB, in one value
PROTOBUF = {"content-type": "application/x-protobuf"}

pytestmark = pytest.mark.slow


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Collector]:
    with collector(tmp_path / "s.duckdb") as running:
        yield running
        assert running.process.poll() == 0 or running.stop() == 0


def _store(running: Collector, indices: range) -> None:
    """Store events one by one; each must be acknowledged."""
    for index in indices:
        reply = running.http.post("/v1/logs", content=log_request([index]), headers=PROTOBUF)
        assert reply.status_code == 200


def _count(running: Collector) -> int:
    return query("SELECT count(*) AS n FROM otel_logs", store=Path(running.endpoint.store))["n"][0].as_py()


def _ask(running: Collector, sql: str, timeout_s: float, outcomes: list[str]) -> None:
    try:
        query(sql, store=Path(running.endpoint.store), timeout_s=timeout_s)
    except StoreError as error:
        outcomes.append(str(error))


@contextmanager
def asking(running: Collector, sql: str, clients: int, timeout_s: float) -> Iterator[list[str]]:
    """So many clients with a query, started before the block; what each was told after it."""
    outcomes: list[str] = []
    threads = [threading.Thread(target=_ask, args=(running, sql, timeout_s, outcomes)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while "active_queries 0.0" in running.http.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield outcomes
    for thread in threads:
        thread.join()


def test_batches_are_acknowledged_while_heavy_queries_run(running: Collector) -> None:
    """More runaways than may run at once: batches are stored all along, then each is cut off by its time limit."""
    stored = 0
    with asking(running, HEAVY, MAX_QUERIES + 2, 3) as outcomes:
        while outcomes == []:
            _store(running, range(stored, stored + 1))
            stored += 1
    assert stored > 5  # a hundred and more on a machine that is not busy
    assert len(outcomes) == MAX_QUERIES + 2
    assert all("over 3 s and was stopped" in outcome for outcome in outcomes)
    assert _count(running) == stored


def test_a_query_that_needs_too_much_memory_is_an_error_of_its_own(running: Collector) -> None:
    """The limit ends that query; batches before, meanwhile and after it are stored by the same process."""
    _store(running, range(10))
    before = psutil.Process(running.process.pid).memory_info().rss
    with asking(running, LARGE, 2, 60) as outcomes:
        _store(running, range(10, 20))
    assert len(outcomes) == 2
    assert all("memory" in outcome.lower() for outcome in outcomes)
    _store(running, range(20, 30))
    assert _count(running) == 30
    assert psutil.Process(running.process.pid).memory_info().rss < before + 1024**3


def test_readers_that_do_not_take_their_answer_block_nobody(running: Collector) -> None:
    """As many as may query at once ask for megabytes and read none of them: batches and other queries go on."""
    address = running.endpoint.http.removeprefix("http://")
    slow = [http.client.HTTPConnection(address) for _ in range(MAX_QUERIES)]
    body = json.dumps({"sql": "SELECT repeat('x', 1000) FROM range(20000)"})
    for connection in slow:
        connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.request("POST", "/v1/sql", body, {"Content-Type": "application/json", **running.auth})
    for connection in slow:
        assert connection.getresponse().status == 200  # the head; the rest stays in the collector
    _store(running, range(30))
    assert _count(running) == 30
    for connection in slow:
        connection.close()


def test_a_collector_that_is_stopped_waits_for_no_query(running: Collector) -> None:
    """SIGTERM ends it in order while queries run; their clients ask again, the file now, and are cut off there."""
    with asking(running, HEAVY, MAX_QUERIES, 5) as outcomes:
        assert running.stop() == 0
    assert len(outcomes) == MAX_QUERIES


def _through_quack(running: Collector, sql: str) -> Any:
    con = duckdb.connect()
    for name in ("httpfs", "quack"):
        con.execute(f"LOAD '{extension(name)}'")
    return con.execute(
        "SELECT * FROM quack_query(?, ?, token = ?)", [running.endpoint.sql, sql, running.endpoint.token]
    )


def test_a_quack_client_that_reads_half_an_answer_blocks_nobody(running: Collector) -> None:
    """An open result holds a snapshot: batches go in, checkpoints included, and its client still sees what it asked."""
    _store(running, range(5))
    result = _through_quack(running, "SELECT o.body, range FROM otel_logs o, range(300000)")
    assert len(result.fetchmany(10)) == 10
    _store(running, range(5, 30))
    assert _count(running) == 30
    assert len(result.fetchall()) == 5 * 300_000 - 10


def test_a_statement_through_quack_has_a_querys_memory(running: Collector) -> None:
    """One value over what ingest gets: the statement runs with what its rehearsal had."""
    store = Path(running.endpoint.store)
    with connect(store) as con:
        con.execute("CREATE TABLE got AS FROM in_store('SELECT list(range) AS numbers FROM range(30000000)')")
        assert con.execute("SELECT len(numbers) FROM got").fetchall() == [(30_000_000,)]


def test_quack_refuses_what_does_not_end(tmp_path: Path) -> None:
    """Through Quack nothing can be interrupted: a statement is let through once it was seen to end within the limit."""
    con = duckdb.connect(str(tmp_path / "s.duckdb"))
    gate = quack.Gate(Queries(con, MemoryLimit(con, 2**30)), timeout_s=0.5)
    outcomes: list[bool] = []
    threads = [threading.Thread(target=lambda: outcomes.append(gate("session", HEAVY))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == [False] * 6
    began = os.times().user
    time.sleep(0.3)
    assert os.times().user - began < 0.2  # none of them runs on
    assert [gate("session", sql) for sql in ("SELECT 1", "FROM nowhere", "BEGIN", "COMMIT")] == [True] * 4
    assert [gate("session", sql) for sql in ("CREATE TABLE x (a INT)", "SELECT 1; SELECT 2")] == [False] * 2
    assert con.execute("SELECT count(*) FROM duckdb_tables()").fetchone() == (0,)


def test_a_runaway_through_quack_delays_no_batch_and_no_end(tmp_path: Path) -> None:
    """While a collector finds out that statements do not end it stores batches, and it can be stopped in order."""
    with collector(tmp_path / "s.duckdb") as running:
        ended: list[str] = []

        def ask() -> None:
            with pytest.raises(duckdb.Error):
                _through_quack(running, HEAVY)
            ended.append("x")

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        _store(running, range(30))
        assert _count(running) == 30
        assert ended == []
        assert running.stop() == 0
        for client in clients:
            client.join(60)
        assert len(ended) == 2
