"""An OTLP/HTTP server that answers from a script and keeps a ledger as the collector does; if asked it knows spools."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rlinsight import wire


@dataclass(frozen=True)
class Answer:
    """One scripted answer. ``hang_up`` stores the batch and closes the connection without a word.

    ``after_s`` passes before a whole request is answered.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    rejected: int = 0
    hang_up: bool = False
    after_s: float = 0.0


@dataclass
class Request:
    """One request as it came in."""

    path: str
    producer: str
    seq: int
    body: bytes
    at: float  # time.monotonic


class Collector:
    """Requests received, and the batches stored once each by (producer, seq).

    A stock receiver, unless it knows ``spools``: then each record of a request is answered from ``script`` as if it had
    come alone, and the whole request from ``whole`` while there is anything in that.
    """

    def __init__(self, script: Sequence[Answer] = (), *, spools: bool = False, whole: Sequence[Answer] = ()) -> None:
        self.script = list(script)
        self.spools = spools
        self.whole = list(whole)
        self.spool_requests: list[list[int]] = []  # the numbers of the records of each
        self.requests: list[Request] = []
        self.stored: dict[tuple[str, int], Request] = {}
        self.duplicates = 0
        self.lock = threading.Lock()
        self.url = ""

    def take(self, request: Request) -> Answer:
        with self.lock:
            self.requests.append(request)
            answer = self.script.pop(0) if self.script else Answer()
            if answer.status == 200:
                key = request.producer, request.seq
                self.duplicates += key in self.stored
                self.stored.setdefault(key, request)
            return answer

    def spans(self) -> list[Span]:
        scopes = [s for batch in self._batches("/v1/traces") for r in batch.resource_spans for s in r.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def events(self, name: str | None = None) -> list[LogRecord]:
        scopes = [s for batch in self._batches("/v1/logs") for r in batch.resource_logs for s in r.scope_logs]
        return [record for s in scopes for record in s.log_records if name is None or record.event_name == name]

    def metrics(self, name: str) -> list[Metric]:
        """One per collection in which there were points of it, in order."""
        scopes = [s for batch in self._batches("/v1/metrics") for r in batch.resource_metrics for s in r.scope_metrics]
        return [metric for scope in scopes for metric in scope.metrics if metric.name == name]

    def num_points(self) -> int:
        scopes = [s for batch in self._batches("/v1/metrics") for r in batch.resource_metrics for s in r.scope_metrics]
        return sum(len(getattr(m, m.WhichOneof("data")).data_points) for s in scopes for m in s.metrics)

    def scopes(self) -> set[str]:
        resources = [resource for batch in self._batches("/v1/traces") for resource in batch.resource_spans]
        return {spans.scope.name for resource in resources for spans in resource.scope_spans}

    def span(self, name: str) -> Span:
        (span,) = [span for span in self.spans() if span.name == name]
        return span

    def resource(self) -> dict[str, Any]:
        batch = next(iter(self._batches("/v1/logs")))
        return attributes(batch.resource_logs[0].resource.attributes)

    def metric_resource(self) -> dict[str, Any]:
        batch = next(iter(self._batches("/v1/metrics")))
        return attributes(batch.resource_metrics[0].resource.attributes)

    def _batches(self, path: str) -> Iterator[Any]:
        kind = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}.get(
            path, ExportLogsServiceRequest
        )
        with self.lock:
            bodies = [request.body for request in self.stored.values() if request.path == path]
        return map(kind.FromString, bodies)

    @property
    def raw(self) -> bytes:
        with self.lock:
            return b"".join(request.body for request in self.stored.values())


def attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    """OTLP attributes as a dict."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_value(item) for item in value.array_value.values]
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


@contextmanager
def running(collector: Collector, port: int = 0, idle_timeout_s: float | None = None) -> Iterator[Collector]:
    """Serve ``collector``; ``idle_timeout_s`` closes quiet connections, as real servers do."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = idle_timeout_s

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == wire.SPOOL_PATH:
                self.spool(body)
                return
            assert self.headers["Content-Type"] == "application/x-protobuf"
            producer, seq = self.headers["x-rlinsight-producer"], int(self.headers["x-rlinsight-seq"])
            answer = collector.take(Request(self.path, producer, seq, body, time.monotonic()))
            if answer.hang_up:
                self.close_connection = True
                return
            kind = ExportTraceServiceResponse if self.path == "/v1/traces" else ExportLogsServiceResponse
            reply = kind()
            if answer.rejected and isinstance(reply, ExportTraceServiceResponse):
                reply.partial_success.rejected_spans = answer.rejected
            self.answer(answer.status, answer.headers, reply.SerializeToString())

        def spool(self, body: bytes) -> None:
            batches = wire.unpack(body)
            collector.spool_requests.append([batch.seq for batch in batches])
            if collector.whole or not collector.spools:
                whole = collector.whole.pop(0) if collector.spools else Answer(404)
                time.sleep(whole.after_s)
                self.answer(whole.status, whole.headers, b"")
                return
            assert self.headers["Content-Type"] == wire.SPOOL_TYPE
            producer, found, headers = self.headers["x-rlinsight-producer"], [], {}
            for batch in batches:
                request = Request(f"/v1/{batch.signal}", producer, batch.seq, batch.payload, time.monotonic())
                answer = collector.take(request)
                self.close_connection |= answer.hang_up
                found.append(wire.Outcome(batch.seq, answer.status, answer.rejected))
                headers |= answer.headers
            if not self.close_connection:
                self.answer(200, headers, wire.outcomes(found))

        def answer(self, status: int, headers: dict[str, str], payload: bytes) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
