"""No field of the three signals is lost: every leaf of OTLP's messages stands in some column of the raw row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collectors.decode import Decoder
from rlinsight import schema

CON = duckdb.connect()
schema.apply(CON, Path(":memory:"))
DECODER = Decoder(schema.columns(CON))

REQUESTS: dict[str, Callable[[], Message]] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
METRIC_KINDS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")
VALUES = {"AnyValue", "KeyValue"}
ENUMS = {"aggregation_temporality": 2, "kind": 3, "code": 2, "severity_number": 9}
IDS = {"trace_id": 16, "span_id": 8, "parent_span_id": 8}


class Filler:
    """Fills a message with a different value in every field, and can leave one field out."""

    def __init__(self, kind: str, without: str | None = None) -> None:
        self.paths: list[str] = []
        self._kind, self._without = kind, without
        self._next = 1000

    def fill(self, message: Message, path: str = "") -> Message:
        for field in message.DESCRIPTOR.fields:
            name = f"{path}.{field.name}".lstrip(".")
            if field.name in METRIC_KINDS and field.name != self._kind:
                continue
            if field.containing_oneof and field.name == "as_int":
                continue  # filled by the twin of this test
            if field.message_type is None or field.message_type.name in VALUES:
                self.paths.append(name)
                self._next += 1  # also for the one left out, so that nothing else differs
                if name != self._without:
                    self._leaf(message, field)
            else:
                target = getattr(message, field.name)
                self.fill(target.add() if field.is_repeated else target, name)
        return message

    def _leaf(self, message: Any, field: FieldDescriptor) -> None:
        value = self._value(field)
        if field.message_type is not None and field.message_type.name == "KeyValue":
            getattr(message, field.name).add(key=f"key{value}").value.string_value = f"value{value}"
        elif field.message_type is not None:
            getattr(message, field.name).string_value = f"value{value}"
        elif field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)

    def _value(self, field: FieldDescriptor) -> Any:
        if field.name in ENUMS:
            return ENUMS[field.name]
        if field.name in IDS:
            return self._next.to_bytes(IDS[field.name], "big")
        if field.type == FieldDescriptor.TYPE_STRING:
            return f"text{self._next}"
        if field.type == FieldDescriptor.TYPE_BOOL:
            return True
        return float(self._next) if field.type == FieldDescriptor.TYPE_DOUBLE else self._next


def _rows(signal: str, request: Message) -> dict[str, list[tuple]]:
    decoded = getattr(DECODER, signal)(request, "batch", 1)
    return {table: rows for table, rows in decoded.rows.items() if table.startswith("otel_")}


def _cases() -> Iterator[tuple[str, str, str]]:
    for signal, kind in [("traces", ""), ("logs", ""), *(("metrics", kind) for kind in METRIC_KINDS)]:
        filler = Filler(kind)
        filler.fill(REQUESTS[signal]())
        for path in filler.paths:
            yield signal, kind, path


@pytest.mark.parametrize(("signal", "kind", "path"), list(_cases()))
def test_every_field_changes_the_raw_row(signal, kind, path):
    """Without one field, all others alike, the raw row is another one: some column holds the field."""
    whole, without = Filler(kind), Filler(kind, without=path)
    complete = _rows(signal, whole.fill(REQUESTS[signal]()))
    partial = _rows(signal, without.fill(REQUESTS[signal]()))
    assert complete != partial


@pytest.mark.parametrize(("signal", "kind"), sorted({(signal, kind) for signal, kind, _ in _cases()}))
def test_every_value_stands_in_the_raw_row(signal, kind):
    """Each number and text put into a request is found, as written, in the columns of its raw row."""
    filler = Filler(kind)
    request = filler.fill(REQUESTS[signal]())
    ((_, (row,)),) = _rows(signal, request).items()
    text = "\n".join(str(value) for value in row)
    missing = [path for path, value in _leaves(request) if value not in text]
    assert not missing


def _leaves(message: Message, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and printed value of every field that is set."""
    for field, value in message.ListFields():
        for item in value if field.is_repeated else [value]:
            name = f"{path}.{field.name}".lstrip(".")
            if isinstance(item, Message):
                yield from _leaves(item, name)
            elif isinstance(item, bytes):
                yield name, item.hex()
            elif field.name == "aggregation_temporality":
                yield name, "cumulative"
            else:
                yield name, str(item)


def test_integers_keep_every_digit():
    """A counter beyond 2**53 is stored exactly beside its floating value."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="bytes")
    metric.sum.data_points.add(as_int=2**53 + 1, time_unix_nano=5)
    (row,) = _rows("metrics", request)["otel_metrics"]
    assert 2**53 + 1 in row
