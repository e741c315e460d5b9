"""What both ends of a delivery agree on beyond OTLP's messages: signals, the number of a batch, and partial success."""

from __future__ import annotations

from typing import Any, Literal, get_args

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

Signal = Literal["traces", "logs", "metrics"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
PRODUCER_HEADER = "x-rlinsight-producer"
SEQ_HEADER = "x-rlinsight-seq"

_RESPONSES: dict[Signal, tuple[Any, str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
}


def response(signal: Signal, rejected: int, problem: str | None) -> Message:
    """The answer to a stored request; with partial_success when items of it were rejected."""
    kind, field = _RESPONSES[signal]
    return kind(partial_success={field: rejected, "error_message": problem or ""}) if rejected else kind()


def partial_success(signal: Signal, answer: bytes) -> tuple[int, str]:
    """How many items of a stored request were rejected, and why; 0 for an answer in another form."""
    kind, field = _RESPONSES[signal]
    try:
        partial = kind.FromString(answer).partial_success
    except DecodeError:
        return 0, ""
    return getattr(partial, field), partial.error_message
