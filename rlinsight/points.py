"""Metric points: what the metrics SDK collects, one item each, and the request they make. Pure.

Does not own which attributes a series may have and when points are collected (meters.py), nor what may leave the
process (otlp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import DataPointT, Metric, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

OVERFLOW = "otel.metric.overflow"  # the OpenTelemetry specification's mark of the series that holds the rest

Clean = Callable[[Mapping[str, Any] | None], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Point:
    """One data point, with the metric it was collected in."""

    scope: InstrumentationScope
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


def encode(points: Sequence[Point], resource: Resource, clean: Clean) -> bytes:
    """A serialized ExportMetricsServiceRequest. ``clean`` says which attributes may leave. Raises on a bad point."""
    scopes: dict[int, tuple[InstrumentationScope, dict[int, tuple[Metric, list[DataPointT]]]]] = {}
    for item in points:
        _, metrics = scopes.setdefault(id(item.scope), (item.scope, {}))
        metrics.setdefault(id(item.metric), (item.metric, []))[1].append(_cleaned(item.point, clean))
    scope_metrics = [
        ScopeMetrics(scope, [_metric(metric, found) for metric, found in metrics.values()], scope.schema_url or "")
        for scope, metrics in scopes.values()
    ]
    request = MetricsData([ResourceMetrics(resource, scope_metrics, resource.schema_url)])
    return encode_metrics(request).SerializeToString()


def _metric(metric: Metric, points: list[DataPointT]) -> Metric:
    return replace(metric, data=replace(metric.data, data_points=points))


def _cleaned(point: Any, clean: Clean) -> Any:
    exemplars = [replace(sample, filtered_attributes=clean(sample.filtered_attributes)) for sample in point.exemplars]
    return replace(point, attributes=clean(point.attributes), exemplars=exemplars)
