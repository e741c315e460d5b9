"""Request bodies to OTLP messages: content types, compression, size limits, JSON. Pure; errors carry an HTTP status."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rlinsight.wire import PROTOBUF, Signal

MAX_BODY_BYTES = 16 * 1024**2  # of a request, before and after decompression
MAX_MEMBERS = 64  # gzip allows several, one after the other; each costs a copy of the rest
JSON = "application/json"

_REQUESTS: dict[Signal, Any] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
_ID_KEYS = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})


class PayloadError(Exception):
    """A body that cannot be accepted; sending it again will not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def decompress(body: bytes, encoding: str) -> bytes:
    """The body without its content encoding. Raises PayloadError 400, 413 or 415; never inflates past the limit."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise PayloadError(415, f"content-encoding {encoding!r} is not supported; send gzip, deflate or identity")
    data, rest = bytearray(), body
    for _ in range(MAX_MEMBERS):
        inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # detects gzip and zlib headers
        try:
            data += inflater.decompress(rest, MAX_BODY_BYTES + 1 - len(data))
        except zlib.error as error:
            raise PayloadError(400, f"{encoding} body cannot be decompressed: {error}") from None
        if len(data) > MAX_BODY_BYTES:
            raise PayloadError(413, f"decompressed body is over {MAX_BODY_BYTES} bytes; send smaller batches")
        if not inflater.eof:
            raise PayloadError(400, f"{encoding} body is cut short")
        rest = inflater.unused_data
        if not rest:
            return bytes(data)
    raise PayloadError(400, f"{encoding} body has over {MAX_MEMBERS} members; compress it in one piece")


def parse(signal: Signal, body: bytes, content_type: str) -> Message:
    """The OTLP request in ``body``. Raises PayloadError 400 or 415."""
    request = _REQUESTS[signal]()
    if content_type == PROTOBUF:
        try:
            request.ParseFromString(body)
        except DecodeError as error:
            raise PayloadError(400, f"body is no OTLP {signal} request: {error}") from None
        return request
    if content_type != JSON:
        raise PayloadError(415, f"content-type {content_type!r} is not supported; send {PROTOBUF} or {JSON}")
    try:
        tree = json.loads(body, object_hook=_ids_to_base64)
        if not isinstance(tree, dict):
            raise ValueError("it is no JSON object")
        return json_format.ParseDict(tree, request, ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise PayloadError(400, f"body is no OTLP {signal} request: {str(error)[:200]}") from None


def _ids_to_base64(fields: dict[str, Any]) -> dict[str, Any]:
    """OTLP/JSON writes ids in hex, protobuf's JSON mapping expects base64."""
    for key in fields.keys() & _ID_KEYS:
        if isinstance(fields[key], str):
            try:
                fields[key] = base64.b64encode(binascii.unhexlify(fields[key])).decode()
            except binascii.Error:
                raise ValueError(f"{key} {fields[key]!r} is not hex") from None
    return fields
