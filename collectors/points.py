"""The numbers of one OTLP metric point: gauge, sum, histogram, exponential histogram, summary. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from collectors.values import attributes, to_json

TEMPORALITY: dict[int, str] = {
    AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA: "delta",
    AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE: "cumulative",
}


def exemplar_facts(exemplar: Any) -> dict[str, Any]:
    """The sampled measurement behind a point, with the span it came from."""
    which = exemplar.WhichOneof("value")
    return {
        "time_ns": exemplar.time_unix_nano,
        "value": getattr(exemplar, which) if which else None,
        "trace_id": exemplar.trace_id.hex(),
        "span_id": exemplar.span_id.hex(),
        "attributes": attributes(exemplar.filtered_attributes),
    }


_NO_POINT: dict[str, Any] = dict.fromkeys(
    ("value", "value_int", "count", "sum", "min", "max", "bounds", "bucket_counts", "detail")
)


def _number_point(point: Any) -> dict[str, Any]:
    which = point.WhichOneof("value")
    if not which:
        return _NO_POINT
    value = getattr(point, which)
    return {**_NO_POINT, "value": float(value), "value_int": value if which == "as_int" else None}


def _histogram_point(point: Any) -> dict[str, Any]:
    facts = {
        **_NO_POINT,
        "count": point.count,
        "bounds": list(point.explicit_bounds),
        "bucket_counts": list(point.bucket_counts),
    }
    return facts | _optional(point, "sum", "min", "max")


def _exponential_point(point: Any) -> dict[str, Any]:
    detail = {
        "scale": point.scale,
        "zero_count": point.zero_count,
        "zero_threshold": point.zero_threshold,
        "positive": {"offset": point.positive.offset, "bucket_counts": list(point.positive.bucket_counts)},
        "negative": {"offset": point.negative.offset, "bucket_counts": list(point.negative.bucket_counts)},
    }
    return {**_NO_POINT, "count": point.count, "detail": to_json(detail)} | _optional(point, "sum", "min", "max")


def _summary_point(point: Any) -> dict[str, Any]:
    quantiles = [{"quantile": item.quantile, "value": item.value} for item in point.quantile_values]
    return {**_NO_POINT, "count": point.count, "sum": point.sum, "detail": to_json({"quantiles": quantiles})}


def _optional(point: Any, *fields: str) -> dict[str, Any]:
    return {name: getattr(point, name) if point.HasField(name) else None for name in fields}


POINT_FACTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gauge": _number_point,
    "sum": _number_point,
    "histogram": _histogram_point,
    "exponential_histogram": _exponential_point,
    "summary": _summary_point,
}
