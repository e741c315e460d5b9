"""What would take too much memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from collectors.payload import PayloadError
from rlinsight.wire import Signal

# What one request may become. DuckDB stores that much within 256 MiB: more than ingest has, less than it is given then.
MAX_SHARED_BYTES = 64 * 1024**2
MAX_ROW_BYTES = 64 * 1024**2
MAX_VALUE_BYTES = 32 * 1024**2
SMALL_BODY_BYTES = 4 * 1024**2  # cannot become as much: JSON makes six bytes of one at most


def check_request(signal: Signal, request: Any) -> int:
    """Bytes of what the items of a request share, once it stands in every row. Raises PayloadError 413 when too many.

    A few megabytes on the wire could be terabytes in the store: one large resource with many small spans.
    """
    shared = _shared_bytes(signal, request)
    if shared > MAX_SHARED_BYTES:
        raise PayloadError(
            413, f"resource and scope, repeated in every row, take {shared >> 20} MiB; send smaller batches"
        )
    return shared


def check_rows(rows: Mapping[str, Sequence[tuple]], body_bytes: int) -> None:
    """Raises PayloadError 413 when the rows of a body are more than the store takes in one transaction."""
    if body_bytes <= SMALL_BODY_BYTES:
        return
    sizes = [len(value) for table in rows.values() for row in table for value in row if isinstance(value, (str, bytes))]
    if sum(sizes) > MAX_ROW_BYTES or max(sizes, default=0) > MAX_VALUE_BYTES:
        raise PayloadError(413, f"the body takes {sum(sizes) >> 20} MiB in the store; send smaller batches")


def _shared_bytes(signal: Signal, request: Any) -> int:
    total = 0
    for resource_items in getattr(request, f"resource_{_KINDS[signal][0]}"):
        of_resource = resource_items.resource.ByteSize()
        for scope_items in getattr(resource_items, f"scope_{_KINDS[signal][0]}"):
            shared = of_resource + scope_items.scope.ByteSize()
            items = getattr(scope_items, _KINDS[signal][1])
            total += shared * len(items)
            if signal == "metrics":
                total += sum(_shared_by_points(metric, shared) for metric in items)
    return total


def _shared_by_points(metric: Metric, shared: int) -> int:
    kind = metric.WhichOneof("data")
    if kind is None:
        return 0
    of_stream = len(metric.name) + len(metric.description) + sum(entry.ByteSize() for entry in metric.metadata)
    return (shared + of_stream) * len(getattr(metric, kind).data_points)


_KINDS: dict[Signal, tuple[str, str]] = {
    "traces": ("spans", "spans"),
    "logs": ("logs", "log_records"),
    "metrics": ("metrics", "metrics"),
}
