"""Raw rows back to the OTLP requests they came from: the inverse of decode.py, for replays and rebuilding the domain.

Pure but for ``select``, which says what to read. What a store keeps comes back whole; repeated attribute keys, unknown
enum numbers, whether an attribute was NaN or the text "NaN", and whether a scope repeated its resource's schema URL,
were never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import EntityRef, InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from collectors import encode_points
from collectors.decode import Columns
from collectors.encode_values import any_value, from_json, pairs
from collectors.projections import PROJECTIONS
from rlinsight.wire import Signal

Row = Mapping[str, Any]

TABLES: Mapping[Signal, str] = {"traces": "otel_spans", "logs": "otel_logs", "metrics": "otel_metrics"}
_RESOURCE = ("resource_attributes", "resource_detail")
_SCOPE = ("scope_name", "scope_version", "scope_detail", "schema_url")
_STREAM = ("name", "sent_name", "description", "metadata", "unit", "kind", "temporality", "is_monotonic")


class Lists:
    """The events whose arrays stand in a table of their own, and under which attribute each column was sent."""

    def __init__(self, columns: Columns) -> None:
        self.tables: dict[str, dict[str, str]] = {}  # table: {attribute: column}
        self.events: dict[str, str] = {}  # event: table
        for projection in PROJECTIONS:
            types = columns[projection.table]
            keys = {key: column for column, key in projection.columns.items() if types[column].endswith("[]")}
            if projection.kind == "event" and projection.name and keys:
                self.tables[projection.table] = keys
                self.events[projection.name] = projection.table


def select(signal: Signal, lists: Lists) -> str:
    """The statement that reads what requests are made of: raw rows, those of logs with their arrays."""
    table = TABLES[signal]
    if signal != "logs":
        return f"SELECT * FROM {table} r"
    found = ", ".join(f"{name}.item IS NOT NULL AS {name}" for name in lists.tables)
    arrays = ", ".join(
        f'{name}.{column} AS "{name}.{column}"' for name, keys in lists.tables.items() for column in keys.values()
    )
    joins = " ".join(
        f"LEFT JOIN {name} ON {name}.batch_id = r.batch_id AND {name}.item = r.item" for name in lists.tables
    )
    return f"SELECT r.*, {found}, {arrays} FROM {table} r {joins}"


def rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a record batch as dicts; lists of numbers as numpy arrays, never element by element."""
    columns = [_lists(column) if _is_numeric(column.type) else column.to_pylist() for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _is_numeric(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and not pa.types.is_string(kind.value_type)


def _lists(column: pa.ListArray) -> list[np.ndarray | None]:
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    valid = column.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]


# Requests ------------------------------------------------------------------------------------------------------------


def traces(spans: Iterable[Row]) -> ExportTraceServiceRequest:
    """A request with these rows of otel_spans, in their order."""
    request = ExportTraceServiceRequest()
    for first, of_resource in _groups(spans, _RESOURCE):
        resource_spans = request.resource_spans.add(resource=_resource(first), schema_url=_resource_schema(first))
        for first, of_scope in _groups(of_resource, _SCOPE):
            scope_spans = resource_spans.scope_spans.add(scope=_scope(first), schema_url=_scope_schema(first))
            scope_spans.spans.extend(map(_span, of_scope))
    return request


def logs(records: Iterable[Row], lists: Lists) -> ExportLogsServiceRequest:
    """A request with these rows of otel_logs, as ``select`` reads them with their arrays, in their order."""
    request = ExportLogsServiceRequest()
    for first, of_resource in _groups(records, _RESOURCE):
        resource_logs = request.resource_logs.add(resource=_resource(first), schema_url=_resource_schema(first))
        for first, of_scope in _groups(of_resource, _SCOPE):
            scope_logs = resource_logs.scope_logs.add(scope=_scope(first), schema_url=_scope_schema(first))
            scope_logs.log_records.extend(_record(row, lists) for row in of_scope)
    return request


def metrics(points: Iterable[Row]) -> ExportMetricsServiceRequest:
    """A request with these rows of otel_metrics, in their order."""
    request = ExportMetricsServiceRequest()
    for first, of_resource in _groups(points, _RESOURCE):
        resource_metrics = request.resource_metrics.add(resource=_resource(first), schema_url=_resource_schema(first))
        for first, of_scope in _groups(of_resource, _SCOPE):
            scope_metrics = resource_metrics.scope_metrics.add(scope=_scope(first), schema_url=_scope_schema(first))
            for first, of_stream in _groups(of_scope, _STREAM):
                scope_metrics.metrics.append(encode_points.metric(first, of_stream))
    return request


def _groups(items: Iterable[Row], columns: tuple[str, ...]) -> Iterator[tuple[Row, list[Row]]]:
    """Neighbours that agree in ``columns``, with the first of them."""
    for _, group in groupby(items, key=lambda row: [row[column] for column in columns]):
        together = list(group)
        yield together[0], together


def _resource(row: Row) -> Resource:
    detail = from_json(row["resource_detail"]) or {}
    return Resource(
        attributes=pairs(from_json(row["resource_attributes"])),
        dropped_attributes_count=detail.get("dropped_attributes_count", 0),
        entity_refs=[EntityRef(**ref) for ref in detail.get("entity_refs", ())],
    )


def _resource_schema(row: Row) -> str:
    return (from_json(row["resource_detail"]) or {}).get("schema_url", "")


def _scope_schema(row: Row) -> str:
    """The column has the resource's where the scope had none; where both were the same, one is enough."""
    url = row["schema_url"] or ""
    return "" if url == _resource_schema(row) else url


def _scope(row: Row) -> InstrumentationScope:
    detail = from_json(row["scope_detail"]) or {}
    return InstrumentationScope(
        name=row["scope_name"] or "",
        version=row["scope_version"] or "",
        attributes=pairs(detail.get("attributes")),
        dropped_attributes_count=detail.get("dropped_attributes_count", 0),
    )


# Items ---------------------------------------------------------------------------------------------------------------


def _span(row: Row) -> Span:
    return Span(
        trace_id=bytes.fromhex(row["trace_id"]),
        span_id=bytes.fromhex(row["span_id"]),
        parent_span_id=bytes.fromhex(row["parent_span_id"] or ""),
        trace_state=row["trace_state"] or "",
        flags=row["flags"] or 0,
        name=row["name"],
        kind=row["kind"] or 0,  # type: ignore[arg-type]
        start_time_unix_nano=row["start_ns"],
        end_time_unix_nano=row["end_ns"],
        attributes=pairs(from_json(row["span_attributes"])),
        dropped_attributes_count=row["dropped_attributes_count"] or 0,
        events=[_event(event) for event in from_json(row["events"]) or ()],
        dropped_events_count=row["dropped_events_count"] or 0,
        links=[_link(link) for link in from_json(row["links"]) or ()],
        dropped_links_count=row["dropped_links_count"] or 0,
        status=Status(code=row["status_code"] or 0, message=row["status_message"] or ""),  # type: ignore[arg-type]
    )


def _event(event: dict[str, Any]) -> Span.Event:
    return Span.Event(
        name=event["name"],
        time_unix_nano=event["time_ns"],
        attributes=pairs(event["attributes"]),
        dropped_attributes_count=event.get("dropped_attributes_count", 0),
    )


def _link(link: dict[str, Any]) -> Span.Link:
    return Span.Link(
        trace_id=bytes.fromhex(link["trace_id"]),
        span_id=bytes.fromhex(link["span_id"]),
        attributes=pairs(link["attributes"]),
        trace_state=link.get("trace_state", ""),
        flags=link.get("flags", 0),
        dropped_attributes_count=link.get("dropped_attributes_count", 0),
    )


def _record(row: Row, lists: Lists) -> LogRecord:
    body = from_json(row["body"]) if row["body_is_json"] else row["body"]
    return LogRecord(
        time_unix_nano=row["time_ns"] or 0,
        observed_time_unix_nano=row["observed_ns"] or 0,
        severity_number=row["severity_number"] or 0,  # type: ignore[arg-type]
        severity_text=row["severity_text"] or "",
        body=None if body is None else any_value(body),
        attributes=pairs(_with_arrays(row, from_json(row["log_attributes"]), lists)),
        dropped_attributes_count=row["dropped_attributes_count"] or 0,
        flags=row["flags"] or 0,
        trace_id=bytes.fromhex(row["trace_id"] or ""),
        span_id=bytes.fromhex(row["span_id"] or ""),
        event_name=row["event_name"] or "",
    )


def _with_arrays(row: Row, attributes: dict[str, Any], lists: Lists) -> dict[str, Any]:
    """The attributes with the arrays that were moved to a table; without those whose row is gone."""
    table = lists.events.get(row["event_name"])
    if table is None:
        return attributes
    whole = {}
    for key, value in attributes.items():
        column = lists.tables[table].get(key)
        if column is not None and isinstance(value, dict) and value.keys() <= {"bytes", "items"}:
            array = row[f"{table}.{column}"] if row[table] else None
            if array is None:
                continue
            if isinstance(array, np.ndarray):
                value = array.tolist() if "items" in value else _little_endian(array)
            else:
                value = array
        whole[key] = value
    return whole


def _little_endian(array: np.ndarray) -> bytes:
    if array.dtype == bool:
        return array.astype("u1").tobytes()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def is_incomplete(row: Row, lists: Lists) -> bool:
    """Whether a log row's arrays are gone, or stand in a row that is not tied to it (of schema version 1)."""
    table = lists.events.get(row["event_name"])
    if table is None or row[table] or row["run_id"] is None:
        return False
    attributes = from_json(row["log_attributes"])
    return any(isinstance(attributes.get(key), dict) and "base64" not in attributes[key] for key in lists.tables[table])
