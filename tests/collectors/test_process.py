from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from collectors.payload import MAX_BODY_BYTES
from collectors.process import MAX_GRACE_S
from collectors.server import start_process
from rlinsight import names
from rlinsight.errors import CollectorError
from rlinsight.store import endpoint_path, is_alive, query, read_endpoint
from rlinsight.wire import DELIVER_S
from tests.collectors.live import Collector, collector, command
from tests.synthetic import Run, requests

PROTOBUF = {"content-type": "application/x-protobuf"}
SPANS = "SELECT count(*) AS n FROM otel_spans WHERE name = "

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):
    """One collector for the tests that do not end it; each uses names of its own."""
    store = tmp_path_factory.mktemp("shared") / "s.duckdb"
    with collector(store) as running:
        yield running


def _count(running: Collector, sql: str, *params) -> int:
    return query(sql, store=Path(running.endpoint.store), params=list(params))[0][0].as_py()


def _trace(name: str, count: int = 1) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for i in range(count):
        scope.spans.add(
            name=name,
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            start_time_unix_nano=i + 1,
            end_time_unix_nano=i + 2,
        )
    return request.SerializeToString()


def _wait(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("transport", ["grpc", "http", "http-gzip"])
def test_stock_exporters_land(shared, transport):
    """An unmodified OpenTelemetry SDK exporter reaches the tables, with our names promoted to columns."""
    if transport == "grpc":
        exporter = GrpcExporter(endpoint=shared.endpoint.grpc, insecure=True)
    else:
        from opentelemetry.exporter.otlp.proto.http import Compression

        compression = Compression.Gzip if transport.endswith("gzip") else Compression.NoCompression
        exporter = HttpExporter(endpoint=f"{shared.endpoint.http}/v1/traces", compression=compression)
    provider = TracerProvider(resource=Resource({names.RUN_ID: f"stock-{transport}", names.RANK: 3}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("t").start_as_current_span(names.STEP, attributes={names.STEP_INDEX: 7}):
        pass
    provider.shutdown()
    rows = query(
        "SELECT s.step, o.rank, o.attempt FROM steps s JOIN otel_spans o USING (span_id) WHERE s.run_id = ?",
        store=Path(shared.endpoint.store),
        params=[f"stock-{transport}"],
    )
    assert rows.to_pylist() == [{"step": 7, "rank": 3, "attempt": 1}]


def test_the_acknowledgement_comes_after_the_commit(shared):
    """What was answered with 200 is visible to the next query, every time."""
    for i in range(20):
        body = _trace(f"visible-{i}")
        assert shared.http.post("/v1/traces", content=body, headers=PROTOBUF).status_code == 200
        assert _count(shared, SPANS + "?", f"visible-{i}") == 1


def test_a_foreign_batch_sent_again_is_recognised_by_its_content(shared):
    """Senders without our headers are deduplicated by the hash of the decompressed body, over HTTP and gRPC alike."""
    body = _trace("foreign")
    zipped = gzip.compress(body)
    shared.http.post("/v1/traces", content=body, headers=PROTOBUF).raise_for_status()
    shared.http.post("/v1/traces", content=zipped, headers={**PROTOBUF, "content-encoding": "gzip"}).raise_for_status()
    with grpc.insecure_channel(shared.endpoint.grpc) as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        export(body)
    assert _count(shared, SPANS + "?", "foreign") == 1


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xfe", PROTOBUF, 400),
        (b"{", {"content-type": "application/json"}, 400),
        (b"", {"content-type": "text/plain"}, 415),
        (b"", {}, 415),
        (b"x", {**PROTOBUF, "content-encoding": "br"}, 415),
        (gzip.compress(b"\0" * (MAX_BODY_BYTES + 1)), {**PROTOBUF, "content-encoding": "gzip"}, 413),
        (b"x" * (MAX_BODY_BYTES + 1), PROTOBUF, 413),
        (b"", {**PROTOBUF, "x-rlinsight-seq": "1"}, 400),
        (b"", {**PROTOBUF, "x-rlinsight-seq": "-1", "x-rlinsight-producer": "p"}, 400),
    ],
)
def test_bad_requests_get_their_status_and_harm_nothing(shared, body, headers, status):
    """Each kind of bad request has its status and a message in its own encoding; the next good one is stored."""
    reply = shared.http.post("/v1/traces", content=body, headers=headers)
    assert reply.status_code == status
    if headers.get("content-type") == PROTOBUF["content-type"]:
        assert reply.headers["content-type"] == PROTOBUF["content-type"]
        assert Status.FromString(reply.content).message
    else:
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["code"] == status
        assert reply.json()["message"]
    assert shared.http.post("/v1/traces", content=_trace("after"), headers=PROTOBUF).status_code == 200


def test_bad_items_are_counted_in_partial_success(shared):
    """A batch with good and bad spans is stored; the answer says how many were not, and why."""
    request = ExportTraceServiceRequest.FromString(_trace("partial", 3))
    request.resource_spans[0].scope_spans[0].spans[1].trace_id = b""
    reply = shared.http.post("/v1/traces", content=request.SerializeToString(), headers=PROTOBUF)
    partial = ExportTraceServiceResponse.FromString(reply.content).partial_success
    assert reply.status_code == 200
    assert partial.rejected_spans == 1
    assert "trace id" in partial.error_message
    assert _count(shared, SPANS + "?", "partial") == 2


def test_a_malformed_grpc_call_fails_and_the_next_works(shared):
    """Garbage over gRPC is INVALID_ARGUMENT, too much of it RESOURCE_EXHAUSTED."""
    with grpc.insecure_channel(shared.endpoint.grpc) as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        for body, code in (
            (b"\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
            (b"x" * (MAX_BODY_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                export(body)
            assert caught.value.code() == code
        export(_trace("grpc-after"))
    assert _count(shared, SPANS + "?", "grpc-after") == 1


def test_all_but_otlp_needs_the_token(shared):
    """Reading, ending, scraping and removing take the token even on loopback; OTLP does not there."""
    asked = [("POST", path) for path in ("/v1/sql", "/v1/owners", "/v1/prune", "/v1/targets")]
    asked += [("DELETE", "/v1/owners"), ("DELETE", "/v1/targets"), ("GET", "/v1/targets")]
    for method, path in asked:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            reply = shared.http.request(method, path, json={"sql": "SELECT 1", "pid": 1}, headers=headers)
            assert reply.status_code == 401
    reply = shared.http.post("/v1/sql", content=b"{}", headers={**shared.auth, "content-type": "text/plain"})
    assert reply.status_code == 415


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"sql": None},
        {"sql": 1},
        {"sql": "SELECT 1", "timeout_s": "x"},
        {"sql": "SELECT 1", "timeout_s": None},
        {"sql": "SELECT 1", "timeout_s": -1},
        {"sql": "SELECT 1", "params": 1},
    ],
)
def test_a_malformed_query_is_a_400(shared, asked):
    """A body without a statement, or with something else than seconds or parameters, is the sender's fault."""
    reply = shared.http.post("/v1/sql", json=asked, headers=shared.auth)
    assert (reply.status_code, reply.json()["code"]) == (400, 400)


def test_reads_go_on_while_batches_arrive(shared):
    """Queries answer while a writer is busy, and see whole batches only."""
    sent = list(requests(Run(run_id="busy", steps=8)))
    sender = threading.Thread(target=lambda: [shared.post(request).raise_for_status() for request in sent])
    sender.start()
    seen = []
    while sender.is_alive():
        rows = query(
            "SELECT (SELECT count(*) FROM rollouts WHERE run_id = 'busy') AS n, "
            "(SELECT count(*) FROM turns WHERE run_id = 'busy') AS turns",
            store=Path(shared.endpoint.store),
        ).to_pylist()[0]
        assert rows["n"] == rows["turns"]
        seen.append(rows["n"])
    sender.join()
    assert len(set(seen)) > 2
    assert seen == sorted(seen)
    assert _count(shared, "SELECT count(*) FROM rollouts WHERE run_id = 'busy'") == 8 * 16


def test_the_endpoint_file_is_private_and_complete(shared):
    """Mode 0600, every field, and /healthz agrees with it."""
    path = endpoint_path(Path(shared.endpoint.store))
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(json.loads(path.read_text())) >= {"pid", "http", "grpc", "sql", "token", "store", "schema_version"}
    health = shared.http.get("/healthz").json()
    assert (health["pid"], health["status"]) == (shared.process.pid, "ok")


def test_the_store_is_as_private_as_its_token(shared):
    """The database file, its write-ahead log and the endpoint file are for their user alone."""
    shared.http.post("/v1/traces", content=_trace("private"), headers=PROTOBUF).raise_for_status()
    store = Path(shared.endpoint.store)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in store.parent.iterdir() if path.is_file()}
    assert modes == dict.fromkeys(("s.duckdb", "s.duckdb.wal", "s.duckdb.endpoint"), "0o600")


def test_only_one_collector_serves_a_store(shared):
    """A second start fails at once with one line that names the process of the first."""
    with pytest.raises(CollectorError, match=str(shared.process.pid)):
        start_process(Path(shared.endpoint.store), os.getpid())


def _quack(endpoint):
    """A DuckDB client, and a function that has the collector run a statement through it."""
    import duckdb

    from rlinsight.attach import extension

    con = duckdb.connect()
    for name in ("httpfs", "quack"):
        con.execute(f"LOAD '{extension(name)}'")

    def remote(sql: str):
        return con.execute("SELECT * FROM quack_query(?, ?, token = ?)", [endpoint.sql, sql, endpoint.token]).fetchall()

    return con, remote


def test_quack_serves_duckdb_clients_read_only(shared):
    """A plain DuckDB client with the quack extension reads live, and every way to write or reach out is refused."""
    import duckdb

    con, remote = _quack(shared.endpoint)
    shared.http.post("/v1/traces", content=_trace("quack"), headers=PROTOBUF).raise_for_status()
    assert remote("SELECT count(*) FROM otel_spans WHERE name = 'quack'") == [(1,)]
    assert len(remote("EXPLAIN ANALYZE SELECT count(*) FROM otel_spans")) == 1
    for sql in (
        "INSERT INTO steps (run_id) VALUES ('x')",
        "CREATE TABLE x (a INT)",
        "SELECT 1; SELECT 2",
        "SET threads = 1",
        "SELECT * FROM read_csv('/etc/passwd')",
        "FROM quack_serve('quack:127.0.0.1:1', token = 'abcdef')",
        "FROM checkpoint()",
    ):
        with pytest.raises(duckdb.Error):
            remote(sql)
    with pytest.raises(duckdb.Error):
        con.execute("SELECT * FROM quack_query(?, 'SELECT 1', token = 'wrong')", [shared.endpoint.sql])
    con.execute(f"CREATE SECRET (TYPE quack, TOKEN '{shared.endpoint.token}')")
    con.execute(f"ATTACH '{shared.endpoint.sql}' AS live")
    assert con.execute("SELECT count(*) FROM live.otel_spans WHERE name = 'quack'").fetchone() == (1,)


def test_explain_is_no_way_to_write_through_quack(shared):
    """EXPLAIN ANALYZE executes what follows, so behind EXPLAIN in any form only reading statements are let through."""
    import duckdb

    _, remote = _quack(shared.endpoint)
    catalog = (
        "SELECT table_name, sql FROM duckdb_tables() ORDER BY ALL",
        "SELECT view_name, sql FROM duckdb_views() ORDER BY ALL",
        "SELECT function_name, macro_definition FROM duckdb_functions() WHERE NOT internal ORDER BY ALL",
        "FROM schema_meta",
        "SELECT name, value FROM duckdb_settings() ORDER BY ALL",
    )
    before = [remote(sql) for sql in catalog]
    let_through = []
    for statement in (
        "CREATE TABLE x (a INT)",
        "CREATE TABLE x AS SELECT 1",
        "CREATE OR REPLACE VIEW runs AS SELECT 1",
        "CREATE OR REPLACE MACRO to_time(x) AS 1",
        "CREATE SCHEMA x",
        "CREATE SEQUENCE x",
        "CREATE TYPE x AS ENUM ('a')",
        "CREATE INDEX x ON steps (run_id)",
        "DROP TABLE schema_meta",
        "DROP VIEW runs",
        "ALTER TABLE steps ADD COLUMN x INT",
        "COMMENT ON TABLE steps IS 'x'",
        "INSERT INTO schema_meta VALUES (9, 'x', 1)",
        "WITH x AS (SELECT 1) INSERT INTO schema_meta SELECT 9, 'x', 1",
        "UPDATE schema_meta SET version = 9",
        "DELETE FROM schema_meta",
        "TRUNCATE schema_meta",
        "MERGE INTO schema_meta USING schema_meta s ON true WHEN MATCHED THEN DELETE",
        "COPY steps TO '/tmp/x.csv'",
        "COPY (SELECT 1) TO '/tmp/x.csv'",
        "COPY steps FROM '/tmp/x.csv'",
        "EXPORT DATABASE '/tmp/x'",
        "IMPORT DATABASE '/tmp/x'",
        "ATTACH ':memory:' AS x",
        "DETACH x",
        "USE memory",
        "SET threads = 1",
        "RESET threads",
        "PRAGMA threads = 1",
        "PRAGMA database_size",
        "CALL checkpoint()",
        "CHECKPOINT",
        "VACUUM",
        "VACUUM ANALYZE",
        "ANALYZE",
        "BEGIN",
        "COMMIT",
        "PREPARE x AS SELECT 1",
        "EXECUTE x",
        "DEALLOCATE x",
        "INSTALL json",
        "LOAD json",
        "UPDATE EXTENSIONS",
        "EXPLAIN SELECT 1",
        "FROM checkpoint()",
        "FROM query('CHECKPOINT')",
    ):
        for explain in (
            "EXPLAIN",
            "EXPLAIN ANALYZE",
            "EXPLAIN (ANALYZE, FORMAT json)",
            "explain /* ( */ (analyze)--\n",
        ):
            with contextlib.suppress(duckdb.Error):
                let_through.append((explain, statement, remote(f"{explain} {statement}")))
    assert let_through == []
    assert [remote(sql) for sql in catalog] == before


def test_sigterm_drains_what_was_accepted(tmp_path):
    """Batches in flight when SIGTERM comes are either answered with 200 and stored, or not answered at all; exit 0."""
    store = tmp_path / "s.duckdb"
    stored = []
    with collector(store) as running:

        def send(worker: int) -> None:
            for i in range(200):
                try:
                    reply = running.http.post("/v1/traces", content=_trace(f"{worker}-{i}", 50), headers=PROTOBUF)
                except OSError:
                    return
                except Exception:  # the connection is cut between requests
                    return
                if reply.status_code == 200:
                    stored.append(f"{worker}-{i}")

        senders = [threading.Thread(target=send, args=(worker,)) for worker in range(4)]
        for sender in senders:
            sender.start()
        _wait(lambda: len(stored) > 20)
        assert running.stop() == 0
        for sender in senders:
            sender.join()
    assert not endpoint_path(store).exists()
    assert not store.with_name("s.duckdb.wal").exists()
    counts = query("SELECT name, count(*) AS n FROM otel_spans GROUP BY name", store=store).to_pylist()
    assert {row["n"] for row in counts} == {50}
    assert set(stored) <= {row["name"] for row in counts}


def test_kill_9_of_the_process_keeps_what_was_acknowledged(tmp_path):
    """After kill -9 the stale endpoint counts as none, the file is read directly, and a new collector takes over."""
    store = tmp_path / "s.duckdb"
    acknowledged = 0
    for life in range(2):
        with collector(store) as running:
            body = _trace(f"life-{life}", 5)
            acknowledged += running.http.post("/v1/traces", content=body, headers=PROTOBUF).status_code == 200
            killer = threading.Timer(0.3, running.process.send_signal, [signal.SIGKILL])
            killer.start()
            try:
                while True:
                    body = _trace(f"life-{life}", 5)
                    acknowledged += running.http.post("/v1/traces", content=body, headers=PROTOBUF).status_code == 200
            except Exception:  # however a connection to a killed process ends
                killer.join()
        assert endpoint_path(store).exists()
        assert read_endpoint(store) is None
        n = query("SELECT count(*) FROM otel_spans", store=store)[0][0].as_py()
        assert acknowledged > 0
        assert 0 <= n - 5 * acknowledged <= 5 * (life + 1)


def test_it_leaves_when_its_last_owner_is_dead_or_released(tmp_path):
    """Two owners: one dies, one is released; only then, after a quiet grace, the collector ends by itself."""
    store = tmp_path / "s.duckdb"
    first = subprocess.Popen(["sleep", "60"])
    second = subprocess.Popen(["sleep", "60"])
    try:
        with collector(store, "--owner-pid", str(first.pid)) as running:
            reply = running.http.post("/v1/owners", json={"pid": second.pid}, headers=running.auth)
            assert reply.json()["owners"] == sorted([first.pid, second.pid])
            first.kill()
            _wait(lambda: running.http.get("/healthz").json()["owners"] == [second.pid])
            time.sleep(0.5)
            assert running.process.poll() is None
            running.http.request("DELETE", "/v1/owners", json={"pid": second.pid}, headers=running.auth)
            released = time.monotonic()
            assert running.http.post("/v1/traces", content=_trace("late"), headers=PROTOBUF).status_code == 200
            assert running.process.wait(60) == 0
            # Sooner and a living producer would lose it between deliveries; later and it would not heed the quiet.
            assert DELIVER_S < time.monotonic() - released < MAX_GRACE_S
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    assert query("SELECT count(*) FROM otel_spans WHERE name = 'late'", store=store)[0][0].as_py() == 1


def test_start_process_detaches_and_the_collector_outlives_nobody(tmp_path):
    """Started for a process that ends, the collector is in a session of its own and ends after it."""
    store = tmp_path / "deep" / "s.duckdb"
    script = (
        "import os, sys; from pathlib import Path; from collectors.server import start_process; "
        f"e = start_process(Path({str(store)!r}), os.getpid()); assert 'duckdb' not in sys.modules; "
        "print(e.pid, os.getsid(e.pid))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    pid, session = map(int, out.split())
    assert pid == session
    _wait(lambda: not is_alive(pid, time.time_ns()), MAX_GRACE_S)
    assert not endpoint_path(store).exists()


def test_modules_in_the_working_directory_do_not_shadow_the_collectors(tmp_path, monkeypatch):
    """A collector starts in a folder that holds a queue.py."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the one you want')\n")
    monkeypatch.chdir(tmp_path)
    endpoint = start_process(tmp_path / "s.duckdb", os.getpid())
    os.kill(endpoint.pid, signal.SIGTERM)
    _wait(lambda: read_endpoint(tmp_path / "s.duckdb") is None)


def test_a_full_disk_refuses_and_recovers(tmp_path):
    """A failed write is 503 with Retry-After, reads go on, /healthz tells; with room again the retry is stored."""
    store = tmp_path / "s.duckdb"
    with collector(store) as running:
        running.http.post("/v1/traces", content=_trace("before"), headers=PROTOBUF).raise_for_status()
        process = psutil.Process(running.process.pid)
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (64 * 1024, hard))
        body = _trace("big", 2000)
        for _ in range(2):
            reply = running.http.post("/v1/traces", content=body, headers=PROTOBUF)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert running.http.get("/healthz").json()["status"] == "failing"
        assert _count(running, "SELECT count(*) FROM otel_spans") == 1
        process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
        assert running.http.post("/v1/traces", content=body, headers=PROTOBUF).status_code == 200
        assert running.http.get("/healthz").json()["status"] == "ok"
        assert running.stop() == 0
    assert query("SELECT count(*) FROM otel_spans", store=store)[0][0].as_py() == 2001


def _fails(store: Path, *arguments: str) -> str:
    """The one line on stderr of a start that must fail with exit code 1 and no traceback."""
    done = subprocess.run(command(store, *arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("which", ["--http-port", "--grpc-port", "--sql-port"])
def test_a_taken_port_is_one_clear_line(tmp_path, which):
    """The message names the address and the option; the half-started collector leaves nothing behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = _fails(tmp_path / "s.duckdb", which, str(taken.getsockname()[1]))
    assert which in line
    assert not endpoint_path(tmp_path / "s.duckdb").exists()


def test_an_unusable_store_is_one_clear_line(tmp_path):
    """A folder, a file of something else, a path below a file: each says what and what to do; nothing is changed."""
    text = tmp_path / "notes.txt"
    text.write_text("dear diary" * 1000)
    assert "is a folder" in _fails(tmp_path)
    assert "not a DuckDB file" in _fails(text)
    assert text.read_text() == "dear diary" * 1000
    assert "--store" in _fails(text / "s.duckdb")
