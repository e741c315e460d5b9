"""The collector as a service: probes, metrics, systemd, its log, memory limits, and stock senders of every signal."""

from __future__ import annotations

import gzip
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import anyio
import duckdb
import grpc
import httpx
import psutil
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import Compression, _log_exporter, metric_exporter, trace_exporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import AlwaysOnExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from prometheus_client.parser import text_string_to_metric_families

from collectors import intake, otlp_http, server
from collectors.decode import Decoder
from collectors.payload import PayloadError, parse
from collectors.writer import PATIENCE_S, Overloaded, Writer
from collectors.writer import Batch as writer_batch
from rlinsight import collecting, memory, schema
from rlinsight.store import query, read_endpoint
from rlinsight.wire import DELIVER_S, SPOOL_RECORDS, SPOOL_TYPE, Batch, read_outcomes, record
from tests.collectors.live import Collector, collector
from tests.promises.support import log_request

PROTOBUF = {"content-type": "application/x-protobuf"}
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("service") / "s.duckdb") as running:
        yield running


def _ask(running: Collector, sql: str, **params: Any) -> list[dict[str, Any]]:
    return query(sql, store=Path(running.endpoint.store), params=params).to_pylist()


def _exporters(running: Collector, transport: str) -> tuple[Any, Any, Any]:
    """OpenTelemetry's own exporters of spans, logs and metrics."""
    if transport == "grpc":
        options: dict[str, Any] = {
            "endpoint": running.endpoint.grpc, "insecure": True, "compression": grpc.Compression.Gzip
        }  # fmt: skip
        kinds = grpc_traces.OTLPSpanExporter, grpc_logs.OTLPLogExporter, grpc_metrics.OTLPMetricExporter
        return tuple(kind(**options) for kind in kinds)  # type: ignore[return-value]
    kinds = trace_exporter.OTLPSpanExporter, _log_exporter.OTLPLogExporter, metric_exporter.OTLPMetricExporter
    return tuple(
        kind(endpoint=f"{running.endpoint.http}/v1/{signal}", compression=Compression.Gzip)
        for kind, signal in zip(kinds, ("traces", "logs", "metrics"), strict=True)
    )  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_stock_senders_of_all_signals_land(shared: Collector, transport: str) -> None:
    """Spans, logs, exponential histograms and exemplars of an unmodified SDK without one of our names, gzipped."""
    spans, logs, metrics = _exporters(shared, transport)
    resource = Resource({"service.name": f"stock-{transport}", "host.name": "h"})
    tracing = TracerProvider(resource=resource)
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    logging = LoggerProvider(resource=resource)
    logging.add_log_record_processor(SimpleLogRecordProcessor(logs))
    view = View(instrument_name="latency", aggregation=ExponentialBucketHistogramAggregation())
    metering = MeterProvider(
        [PeriodicExportingMetricReader(metrics, export_interval_millis=10**6)], resource,
        exemplar_filter=AlwaysOnExemplarFilter(), views=[view],
    )  # fmt: skip
    meter = metering.get_meter("m")
    with tracing.get_tracer("t").start_as_current_span("checkout", attributes={"cart": 3}) as span:
        meter.create_histogram("latency", "ms").record(250, {"route": "/"})
        meter.create_counter("orders").add(2)
        from opentelemetry._logs import LogRecord

        logging.get_logger("l").emit(LogRecord(body="paid", severity_text="INFO"))
    for provider in (tracing, logging, metering):
        provider.shutdown()
    service = f"stock-{transport}"
    trace_id = format(span.get_span_context().trace_id, "032x")
    assert _ask(shared, "SELECT name, trace_id, run_id FROM otel_spans WHERE service_name = $s", s=service) == [
        {"name": "checkout", "trace_id": trace_id, "run_id": None}
    ]
    assert _ask(shared, "SELECT body, trace_id FROM otel_logs WHERE service_name = $s", s=service) == [
        {"body": "paid", "trace_id": trace_id}
    ]
    points = _ask(
        shared,
        "SELECT name, kind, coalesce(sum, value) AS total, detail ->> '$.scale' AS scale, "
        "exemplars ->> '$[0].trace_id' AS seen_in FROM otel_metrics WHERE service_name = $s ORDER BY name",
        s=service,
    )
    assert [(point["name"], point["kind"], point["total"]) for point in points] == [
        ("latency", "exponential_histogram", 250.0),
        ("orders", "sum", 2.0),
    ]
    assert points[0]["scale"] is not None
    assert points[0]["seen_in"] == trace_id


def _metrics(running: Collector) -> dict[str, float]:
    families = text_string_to_metric_families(running.http.get("/metrics").text)
    return {
        ",".join([sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))]): sample.value
        for family in families
        for sample in family.samples
    }


def _spool(running: Collector, body: bytes, **headers: str) -> httpx.Response:
    named = {"content-type": SPOOL_TYPE, "x-rlinsight-producer": "spooler"} | headers
    return running.http.post("/v1/spool", content=body, headers=named)


@pytest.mark.slow
def test_the_records_of_a_spool_are_batches_of_their_own_in_one_transaction(shared: Collector) -> None:
    """Each has the row it would have had alone, and its own status; one that is malformed harms no other."""
    sent = [
        Batch("logs", 3, log_request(range(3), event="spooled")),
        Batch("traces", 1, b"\xff"),
        Batch("metrics", 0, b""),
        Batch("logs", 2, log_request(range(3, 5), event="spooled")),
    ]
    body = b"".join(record(batch, seq) for seq, batch in enumerate(sent, start=1))
    sent = [replace(batch, seq=seq) for seq, batch in enumerate(sent, start=1)]
    for _ in range(2):  # the second time nothing is new, and the answer the same
        reply = _spool(shared, body)
        found = read_outcomes(reply.content, sent)
        assert found is not None
        assert [(each.status, each.rejected) for each in found] == [(200, 0), (400, 0), (200, 0), (200, 0)]
        assert "OTLP traces" in found[1].detail
    alone = {**PROTOBUF, "x-rlinsight-producer": "spooler", "x-rlinsight-seq": "4"}
    shared.http.post("/v1/logs", content=sent[3].payload, headers=alone).raise_for_status()
    ledger = "SELECT batch_id, rows, bytes FROM ingest_batches WHERE producer = 'spooler' ORDER BY seq"
    assert _ask(shared, ledger) == [
        {"batch_id": "spooler/logs/1", "rows": 3, "bytes": len(sent[0].payload)},
        {"batch_id": "spooler/metrics/3", "rows": 0, "bytes": 0},
        {"batch_id": "spooler/logs/4", "rows": 2, "bytes": len(sent[3].payload)},
    ]
    commits = "SELECT count(DISTINCT committed_ns) AS n FROM ingest_batches WHERE producer = 'spooler'"
    assert _ask(shared, commits) == [{"n": 1}]
    assert _ask(shared, "SELECT count(*) AS n FROM otel_logs WHERE event_name = 'spooled'") == [{"n": 5}]


@pytest.mark.slow
def test_a_body_that_is_no_spool_is_refused_whole(shared: Collector) -> None:
    """Cut short, damaged, empty, too many records, nobody's, or of a type that a web page could send."""
    good = record(Batch("logs", 1, log_request([0], event="refused")), 1)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for body, status in (
        (good + good[:-1], 400),
        (good + bytes(flipped), 400),
        (good + b"more", 400),
        (b"", 400),
        (good * (SPOOL_RECORDS + 1), 400),
    ):
        assert _spool(shared, body).status_code == status
    assert _spool(shared, good, **{"x-rlinsight-producer": ""}).status_code == 400
    assert _spool(shared, good, **PROTOBUF).status_code == 415
    assert _spool(shared, gzip.compress(bytes(20 * 1024**2)), **{"content-encoding": "gzip"}).status_code == 413
    assert _ask(shared, "SELECT count(*) AS n FROM otel_logs WHERE event_name = 'refused'") == [{"n": 0}]


def test_patient_batches_wait_for_others_and_an_impatient_one_takes_them_along() -> None:
    """Those that come within a moment share a transaction; a foreign batch neither waits nor lets them."""
    con = duckdb.connect()
    schema.apply(con, Path(":memory:"))
    columns = schema.columns(con)
    writer, decoder = Writer(con, columns), Decoder(columns)

    def submit(number: int, patient: bool) -> Any:
        body = log_request([number])
        decoded = decoder.logs(parse("logs", body, PROTOBUF["content-type"]), f"p/logs/{number}", 1)
        return writer.submit(writer_batch(f"p/logs/{number}", "p", number, "logs", 1, 1, decoded, patient=patient))

    writer.start()
    began = time.monotonic()
    first, second = submit(0, True), None
    time.sleep(PATIENCE_S / 5)
    second = submit(1, True)
    assert first.result(10)
    assert second.result(10)
    assert time.monotonic() - began >= PATIENCE_S
    assert writer.stats.commits == 1
    third = submit(2, True)
    assert submit(3, False).result(10)
    assert third.done()
    assert writer.stats.commits == 2
    writer.close()


@pytest.mark.parametrize(("now", "last"), [(DELIVER_S * 7 + 0.1, True), (DELIVER_S * 7 + 1, False)])
def test_records_out_of_turn_wait_for_each_other_alone(now: float, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn all of a request may wait for others; else the last good one ends the wait of those before it."""
    con = duckdb.connect()
    schema.apply(con, Path(":memory:"))
    columns, queued = schema.columns(con), []

    class Queue(Writer):
        def submit(self, batch: writer_batch) -> Any:
            queued.append(batch)
            return batch.done

    monkeypatch.setattr(intake.time, "time", lambda: now)
    payloads = [log_request([0]), log_request([1]), b"\xff"]
    body = b"".join(record(Batch("logs", 1, payload), seq) for seq, payload in enumerate(payloads, start=1))
    taken = intake.Intake(Decoder(columns), Queue(con, columns)).take_spool(body, "p")
    assert [batch.patient for batch in queued] == [True, last]
    assert [isinstance(accepted, PayloadError) for _, accepted in taken] == [False, False, True]


@pytest.mark.slow
def test_metrics_count_what_happened(tmp_path: Path) -> None:
    """Batches and items by outcome, bytes, commits, requests by transport and status, sizes, in Prometheus' format."""
    with collector(tmp_path / "s.duckdb") as running:
        body, headers = log_request(range(7)), {**PROTOBUF, "x-rlinsight-producer": "p", "x-rlinsight-seq": "1"}
        for _ in range(2):
            running.http.post("/v1/logs", content=body, headers=headers).raise_for_status()
        assert running.http.post("/v1/logs", content=b"\xff", headers=PROTOBUF).status_code == 400
        assert running.http.get("/nothing/here").status_code == 404
        with grpc.insecure_channel(running.endpoint.grpc) as channel:
            channel.unary_unary(LOGS)(log_request(range(3)))
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(LOGS)(b"\xff")
        seen = _metrics(running)
        prefix = "rlinsight_collector_"
        for name, value in {
            "batches_total,outcome=stored,signal=logs": 2,
            "batches_total,outcome=duplicate,signal=logs": 1,
            "items_total,outcome=stored,signal=logs": 10,
            "bytes_total": len(body) + len(log_request(range(3))),
            "requests_total,endpoint=logs,status=200,transport=http": 2,
            "requests_total,endpoint=logs,status=400,transport=http": 1,
            "requests_total,endpoint=other,status=404,transport=http": 1,
            "requests_total,endpoint=logs,status=OK,transport=grpc": 1,
            "requests_total,endpoint=logs,status=INVALID_ARGUMENT,transport=grpc": 1,
            "commit_seconds_count": 3,
            "queue_batches": 0,
            "active_queries": 0,
            "ready": 1,
        }.items():
            assert seen[f"{prefix}{name}"] == value, name
        assert seen[f"{prefix}store_bytes,file=wal"] > 0
        assert seen["process_resident_memory_bytes"] > 10**7


@pytest.mark.slow
def test_an_overloaded_collector_tells_when_to_come_back(tmp_path: Path) -> None:
    """While its disk is full, gRPC senders get UNAVAILABLE with RetryInfo, in both places it is looked for."""
    import psutil

    with collector(tmp_path / "s.duckdb") as running:
        process = psutil.Process(running.process.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (64 * 1024, psutil.RLIM_INFINITY))
        with grpc.insecure_channel(running.endpoint.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(LOGS)(log_request(range(20_000)))
        error: Any = caught.value
        trailers = dict(error.trailing_metadata())
        info, status = RetryInfo(), Status.FromString(trailers["grpc-status-details-bin"])
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert (status.code, status.message) == (14, error.details())
        assert status.details[0].Unpack(info)
        assert info.retry_delay.seconds == 1
        assert trailers["google.rpc.retryinfo-bin"] == info.SerializeToString()
        assert running.http.get("/readyz").status_code == 503
        assert _metrics(running)["rlinsight_collector_ready"] == 0


@pytest.mark.slow
def test_systemd_is_told_when_it_starts_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY=1 once it answers, STOPPING=1 before it drains; SIGTERM ends it with 0, and its log is on stderr."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with collector(tmp_path / "s.duckdb") as running:
            assert sock.recv(4096).decode().splitlines()[0] == "READY=1"
            assert running.http.get("/readyz").status_code == 200
            assert running.stop() == 0
            assert sock.recv(4096) == b"STOPPING=1"
            assert running.process.stderr is not None
            assert b"collecting into" in running.process.stderr.read()


@pytest.mark.slow
def test_a_started_collector_is_no_service_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What systemd waits for from a training service its collector must not say; its log is private."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        endpoint = server.start_process(tmp_path / "s.duckdb", os.getpid())
        os.kill(endpoint.pid, 15)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    assert stat.S_IMODE(server.log_path(tmp_path / "s.duckdb").stat().st_mode) == 0o600


class Arrival:
    """A request whose body comes in pieces; "stall" waits for ever."""

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, *pieces: bytes | str) -> None:
        self._pieces = pieces

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, str):
                await anyio.sleep_forever()
            else:
                yield piece


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        ([b"ab", b"c"], b"abc"),
        ([b"ab", "stall"], 408),
        ([b"x" * 30, b"x" * 30], 413),
        ([b"x" * 45], Overloaded),
    ],
)
def test_bodies_on_their_way_in_are_bounded(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes | str], outcome: Any
) -> None:
    """In time, in bytes each, and in bytes of all together; whatever happens to one, its share is free again."""
    monkeypatch.setattr(otlp_http, "MAX_BODY_BYTES", 50)
    monkeypatch.setattr(otlp_http, "MAX_ARRIVING_BYTES", 100)
    monkeypatch.setattr(otlp_http, "BODY_TIMEOUT_S", 0.05)
    arriving = otlp_http._Arriving()
    arriving.size = 60 if outcome is Overloaded else 0  # of others
    others, seen = arriving.size, None

    async def read() -> bytes:
        with arriving.body() as body:
            return await body.read(Arrival(*pieces))  # type: ignore[arg-type]

    try:
        seen = anyio.run(read)
    except PayloadError as error:
        seen = error.status
    except Overloaded as error:
        seen = type(error)
    assert seen == outcome
    assert arriving.size == others


def test_the_log_keeps_its_newest_half(tmp_path: Path) -> None:
    """Over its size the oldest lines go, whole lines, and who has the file open appends behind the rest."""
    store = tmp_path / "s.duckdb"
    with server.log_path(store).open("ab") as writer:
        line = 0
        while writer.tell() <= server.MAX_LOG_BYTES:
            writer.write(f"line {line}\n".encode())
            line += 1
        writer.flush()
        server.cap_log(store)
        writer.write(b"after\n")
    lines = server.log_path(store).read_text().splitlines()
    assert server.log_path(store).stat().st_size <= server.MAX_LOG_BYTES // 2 + 10
    assert lines[-2:] == [f"line {line - 1}", "after"]
    assert all(text.startswith("line ") for text in lines[:-1])
    server.cap_log(tmp_path / "none.duckdb")


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000"}, 1_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "500000", "a/memory.max": "1000000"}, 500_000),
        ("0::/\n", {"memory.max": "700000"}, 700_000),
        ("5:cpu:/x\n4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "800000"}, 800_000),
        ("4:memory:/gone/in/container\n", {"memory/memory.limit_in_bytes": "900000"}, 900_000),
        ("4:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("0::/a\n", {}, None),
        (None, {}, None),
    ],
)
def test_the_control_groups_limit_counts_where_it_is_lower(
    tmp_path: Path, cgroups: str | None, files: dict[str, str], expected: int | None
) -> None:
    """Versions 1 and 2, limits of ancestors, a container's own root, and none at all (None: the machine's)."""
    import psutil

    if cgroups is not None:
        (tmp_path / "cgroup").write_text(cgroups)
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    found = memory.memory_bytes(tmp_path / "cgroup", tmp_path / "fs")
    assert found == (expected or psutil.virtual_memory().total)


def test_a_collector_of_a_run_yields_the_processors(tmp_path: Path) -> None:
    """Started by a run it runs, once it serves, when nothing else wants to; started by hand as any program does."""
    endpoint = server.start_process(tmp_path / "s.duckdb", os.getpid())
    process = psutil.Process(endpoint.pid)
    policies = set[int]()
    for _ in range(100):  # it serves, so it is about to
        policies = {os.sched_getscheduler(thread.id) for thread in process.threads()}
        if policies == {os.SCHED_IDLE}:
            break
        time.sleep(0.1)
    assert policies == {os.SCHED_IDLE}
    process.terminate()
    process.wait(20)
    with collector(tmp_path / "t.duckdb") as by_hand:
        assert os.sched_getscheduler(by_hand.process.pid) == os.sched_getscheduler(0)


@pytest.mark.slow
def test_one_that_takes_over_yields_them_before_it_serves(tmp_path: Path) -> None:
    """Training goes on meanwhile, and nobody waits for it."""
    store, policies = tmp_path / "s.duckdb", set[int]()
    with collecting.collector(store) as endpoint:
        os.kill(endpoint.pid, signal.SIGKILL)
        deadline = time.monotonic() + server.IDLE_START_TIMEOUT_S
        while (now := read_endpoint(store)) is None or now.pid == endpoint.pid:
            assert time.monotonic() < deadline
            for child in psutil.Process().children():
                with suppress(psutil.Error, ProcessLookupError):
                    if str(store) in child.cmdline():
                        policies.add(os.sched_getscheduler(child.pid))
            time.sleep(0.01)
    assert os.SCHED_IDLE in policies
