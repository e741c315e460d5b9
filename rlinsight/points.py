"""Metric points: what the metrics SDK collects, one item each, and the request they make. Pure.

Does not own which attributes a series may have and when points are collected (meters.py), nor what may leave the
process (otlp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics.export import (
    DataPointT,
    ExponentialHistogram,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

OVERFLOW = "otel.metric.overflow"  # the OpenTelemetry specification's mark of the series that holds the rest


@dataclass(frozen=True, slots=True)
class Point:
    """One data point, with the metric it was collected in."""

    instrumentation_scope: InstrumentationScope
    metric: Metric
    point: DataPointT

    @property
    def overflows(self) -> bool:
        """Whether it holds what had too many attribute sets for a series each."""
        return OVERFLOW in (self.point.attributes or {})


def split(data: MetricsData) -> Iterator[Point]:
    """The points of one collection."""
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    yield Point(scope.scope, metric, point)


class Adder:
    """Fills the metrics of a request. ``fill`` adds those of some attributes that may leave to a message's."""

    def __init__(self, fill: Callable[[Any, Any], int]) -> None:
        self._fill = fill
        self._data: dict[int, Any] = {}  # where the points of a metric go, by its id; the points keep it alive

    def __call__(self, metrics: Any, item: Any) -> None:
        """Add a Point, to its metric if that is there. Raises on a bad one."""
        data = self._data.get(id(item.metric))
        if data is None:
            data = self._data[id(item.metric)] = _describe(metrics.add(), item.metric)
        point, message = item.point, data.data_points.add()
        self._fill(message.attributes, point.attributes)
        message.time_unix_nano = point.time_unix_nano
        message.start_time_unix_nano = point.start_time_unix_nano or 0
        if isinstance(point, NumberDataPoint):
            _set_number(message, point.value)
        elif isinstance(point, HistogramDataPoint):
            _set_totals(message, point)
            message.bucket_counts.extend(point.bucket_counts)
            message.explicit_bounds.extend(point.explicit_bounds)
        else:
            _set_totals(message, point)
            message.scale, message.zero_count, message.flags = point.scale, point.zero_count, point.flags
            for buckets, found in ((message.positive, point.positive), (message.negative, point.negative)):
                if found.bucket_counts:
                    buckets.offset = found.offset
                    buckets.bucket_counts.extend(found.bucket_counts)
        for sample in point.exemplars:
            exemplar = message.exemplars.add(time_unix_nano=sample.time_unix_nano)
            _set_number(exemplar, sample.value)
            self._fill(exemplar.filtered_attributes, sample.filtered_attributes)
            if sample.span_id is not None and sample.trace_id is not None:
                exemplar.span_id, exemplar.trace_id = sample.span_id.to_bytes(8), sample.trace_id.to_bytes(16)


def _describe(message: Any, metric: Metric) -> Any:
    """The metric's own facts; returns the part that holds its points."""
    message.name, message.description, message.unit = metric.name, metric.description or "", metric.unit or ""
    data = getattr(message, _KINDS[type(metric.data)])
    data.SetInParent()
    if not isinstance(metric.data, Gauge):
        data.aggregation_temporality = int(metric.data.aggregation_temporality)
    if isinstance(metric.data, Sum):
        data.is_monotonic = metric.data.is_monotonic
    return data


_KINDS = {Gauge: "gauge", Sum: "sum", Histogram: "histogram", ExponentialHistogram: "exponential_histogram"}


def _set_number(message: Any, value: float) -> None:
    if isinstance(value, int):
        message.as_int = value
    else:
        message.as_double = value


def _set_totals(message: Any, point: Any) -> None:
    message.count, message.sum, message.min, message.max = point.count, point.sum, point.min, point.max
