"""What services that know nothing of training send: traces, log records and metrics, as stock OTLP messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.synthetic import SECOND, Request

CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
PAID, BROKEN, BATCH = (bytes([n]) * 16 for n in (0xA1, 0xB2, 0xC3))
MARKUP = "<img src=x id=z>"


def pairs(values: dict[str, Any]) -> list[KeyValue]:
    def value(of: Any) -> AnyValue:
        if isinstance(of, bool | int | float):
            return AnyValue(int_value=of) if type(of) is int else AnyValue(double_value=of)
        return AnyValue(string_value=of)

    return [KeyValue(key=key, value=value(of)) for key, of in values.items()]


def span(trace: bytes, number: int, parent: int, name: str, start: int, ms: int, **more: Any) -> Span:
    """Span ``number`` of a trace under span ``parent`` (0: none), ``ms`` long."""
    made = Span(
        trace_id=trace, span_id=trace[:7] + bytes([number]), name=name, kind=more.get("kind", 1),
        parent_span_id=trace[:7] + bytes([parent]) if parent else b"", start_time_unix_nano=start,
        end_time_unix_nano=start + ms * SECOND // 1000, attributes=pairs(more.get("attributes", {})),
        status=more.get("status"),
    )  # fmt: skip
    return made


def traces(start: int) -> Iterator[Request]:
    """Three traces of a shop: one paid, one broken at its database, and a batch that links to both."""
    ms = SECOND // 1000
    failed = Status(code=Status.STATUS_CODE_ERROR, message=f"deadlock {MARKUP}")
    query = span(BROKEN, 3, 2, "SELECT orders", start + 2010 * ms, 90, kind=3, status=failed,
                 attributes={"db.system": "postgresql", "user.id": "user-42"})  # fmt: skip
    query.events.add(
        name="exception", time_unix_nano=start + 2095 * ms, attributes=pairs({"exception.type": "Deadlock"})
    )
    batch = span(BATCH, 1, 0, "settle", start + 5000 * ms, 30)
    for trace in (PAID, BROKEN):
        batch.links.add(trace_id=trace, span_id=trace[:7] + b"\x01", attributes=pairs({"reason": "settles"}))
    batch.links.add(trace_id=b"\xee" * 16, span_id=b"\xee" * 8)
    for seq, (service, spans) in enumerate({
        "shop": [
            span(PAID, 1, 0, "POST /pay", start, 400, kind=2, attributes={"http.route": "/pay"}),
            span(BROKEN, 1, 0, "POST /pay", start + 2000 * ms, 150, kind=2, attributes={"http.route": "/pay"}),
        ],
        "ledger": [
            span(PAID, 2, 1, "book", start + 50 * ms, 300), span(BROKEN, 2, 1, "book", start + 2005 * ms, 120), query,
            batch, batch,
        ],
    }.items()):  # fmt: skip
        message = ExportTraceServiceRequest()
        sent = message.resource_spans.add()
        sent.resource.attributes.extend(pairs({"service.name": service, "host.name": "web-1"}))
        sent.scope_spans.add(spans=spans).scope.name = "stock"
        yield Request("traces", message, "shop", seq)
    message = ExportLogsServiceRequest()
    records = message.resource_logs.add().scope_logs.add()
    record = records.log_records.add(time_unix_nano=start + 2096 * ms, severity_text="ERROR", trace_id=BROKEN)
    record.body.string_value, record.span_id = "the database said no", BROKEN[:7] + b"\x03"
    yield Request("logs", message, "shop-logs", 1)


def metrics(start: int, minutes: int = 5, resource: dict[str, Any] | None = None) -> Iterator[Request]:
    """A machine, a process and an engine, sampled every 5 s. The engine's counters begin anew half way through.

    The engine counts 200 tokens a second; its latencies lie between 0.1 and 0.5 s in the first half and between 0.5 and
    1 s in the second. Target ``gone`` never answers.
    """
    ticks = minutes * 12
    for i in range(ticks + 1):
        at = start + i * 5 * SECOND
        restart = ticks // 2
        alive = i if i <= restart else i - restart - 1  # ticks since the engine started
        began = start if i <= restart else start + (restart + 1) * 5 * SECOND
        message = ExportMetricsServiceRequest()
        host = _scope(message, {"service.name": "rlinsight.controller", "host.name": "node-0", **(resource or {})})
        cpu = host.metrics.add(name="system.cpu.utilization", unit="1", description="share of CPU time")
        for mode, share in (("user", 0.5 + 0.2 * (i % 12) / 12), ("system", 0.1)):
            cpu.gauge.data_points.add(time_unix_nano=at, as_double=share, attributes=pairs({"cpu.mode": mode}))
        host.metrics.add(name="process.memory.usage", unit="By").gauge.data_points.add(
            time_unix_nano=at, as_int=2 * 10**9 + i * 10**7
        )
        disk = host.metrics.add(name="system.disk.io", unit="By").sum
        disk.aggregation_temporality, disk.is_monotonic = CUMULATIVE, True
        disk.data_points.add(time_unix_nano=at, start_time_unix_nano=start, as_int=i * 5 * 10**6)
        engine = _scope(message, {"service.name": "engine", "url.full": "http://127.0.0.1:8000/metrics"}, scraped=True)
        _up(engine, at, 1)
        tokens = engine.metrics.add(name="vllm:generation_tokens_total").sum
        tokens.aggregation_temporality, tokens.is_monotonic = CUMULATIVE, True
        tokens.data_points.add(time_unix_nano=at, start_time_unix_nano=began, as_double=alive * 1000.0)
        _latency(engine.metrics.add(name="vllm:time_to_first_token_seconds", unit="s"), at, began, alive, i <= restart)
        _up(_scope(message, {"service.name": "gone", "url.full": "http://127.0.0.1:9/metrics"}, scraped=True), at, 0)
        yield Request("metrics", message, "metrics", i)
    message = ExportLogsServiceRequest()
    logs = message.resource_logs.add()
    logs.resource.attributes.extend(pairs({"service.name": "gone"}))
    record = logs.scope_logs.add().log_records.add(time_unix_nano=start, event_name="rlinsight.scrape.failed")
    record.attributes.extend(pairs({"rlinsight.reason": f"ConnectError {MARKUP}"}))
    yield Request("logs", message, "metrics-logs", 1)


def _scope(message: ExportMetricsServiceRequest, resource: dict[str, Any], scraped: bool = False) -> Any:
    sent = message.resource_metrics.add()
    sent.resource.attributes.extend(pairs(resource))
    scope = sent.scope_metrics.add()
    scope.scope.name = "rlinsight.scrape" if scraped else "rlinsight.system"
    return scope


def _up(scope: Any, at: int, value: int) -> None:
    scope.metrics.add(name="up", unit="1").gauge.data_points.add(time_unix_nano=at, as_double=value)


def _latency(metric: Metric, at: int, began: int, alive: int, early: bool) -> None:
    metric.histogram.aggregation_temporality = CUMULATIVE
    counts = [0, alive * 10, 0, 0] if early else [0, 0, alive * 10, 0]
    metric.histogram.data_points.add(
        time_unix_nano=at, start_time_unix_nano=began, count=alive * 10, sum=alive * 3.0, bucket_counts=counts,
        explicit_bounds=[0.1, 0.5, 1.0],
    )  # fmt: skip
