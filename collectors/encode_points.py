"""Rows of otel_metrics to OTLP metrics: the inverse of points.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from collectors.encode_values import from_json, pairs
from collectors.points import TEMPORALITY

Row = Mapping[str, Any]

_TEMPORALITY = {text: number for number, text in TEMPORALITY.items()}


def metric(stream: Row, points: list[Row]) -> Metric:
    """The metric of ``points``, rows of otel_metrics that agree in everything a stream has, as ``stream`` does."""
    message = Metric(
        name=stream["sent_name"] or stream["name"],
        description=stream["description"] or "",
        unit=stream["unit"] or "",
        metadata=pairs(from_json(stream["metadata"])),
    )
    data = getattr(message, stream["kind"])
    data.SetInParent()
    if stream["kind"] not in ("gauge", "summary"):
        data.aggregation_temporality = _TEMPORALITY.get(stream["temporality"], 0)
    if stream["kind"] == "sum":
        data.is_monotonic = bool(stream["is_monotonic"])
    for row in points:
        point = data.data_points.add(
            attributes=pairs(from_json(row["attributes"])),
            time_unix_nano=row["time_ns"] or 0,
            start_time_unix_nano=row["start_ns"] or 0,
            flags=row["flags"] or 0,
        )
        _FILL[stream["kind"]](point, row)
        if row["exemplars"]:
            for exemplar in from_json(row["exemplars"]):
                _exemplar(point.exemplars.add(), exemplar)
    return message


def _number(point: Any, row: Row) -> None:
    if row["value_int"] is not None:
        point.as_int = row["value_int"]
    elif row["value"] is not None:
        point.as_double = row["value"]


def _histogram(point: Any, row: Row) -> None:
    point.count = row["count"]
    point.explicit_bounds.extend(row["bounds"].tolist())
    point.bucket_counts.extend(row["bucket_counts"].tolist())
    _optional(point, row)


def _exponential(point: Any, row: Row) -> None:
    detail = from_json(row["detail"])
    point.count, point.scale, point.zero_count = row["count"], detail["scale"], detail["zero_count"]
    point.zero_threshold = float(detail.get("zero_threshold", 0))
    for side in ("positive", "negative"):
        buckets = getattr(point, side)
        buckets.offset = detail[side]["offset"]
        buckets.bucket_counts.extend(detail[side]["bucket_counts"])
    _optional(point, row)


def _summary(point: Any, row: Row) -> None:
    point.count, point.sum = row["count"], row["sum"]
    for item in from_json(row["detail"])["quantiles"]:
        point.quantile_values.add(quantile=float(item["quantile"]), value=float(item["value"]))


def _optional(point: Any, row: Row) -> None:
    for field in ("sum", "min", "max"):
        if row[field] is not None:
            setattr(point, field, row[field])


_FILL: Mapping[str, Any] = {
    "gauge": _number,
    "sum": _number,
    "histogram": _histogram,
    "exponential_histogram": _exponential,
    "summary": _summary,
}


def _exemplar(exemplar: Any, facts: dict[str, Any]) -> None:
    exemplar.time_unix_nano = facts["time_ns"]
    exemplar.trace_id, exemplar.span_id = bytes.fromhex(facts["trace_id"]), bytes.fromhex(facts["span_id"])
    exemplar.filtered_attributes.extend(pairs(facts["attributes"]))
    if isinstance(facts["value"], int):
        exemplar.as_int = facts["value"]
    elif facts["value"] is not None:
        exemplar.as_double = float(facts["value"])
