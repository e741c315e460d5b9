"""OTLP messages: attributes, spans, events and requests, with the text-capture modes applied while encoding.

Owns what may leave the process. Does not own identity or context (telemetry.py) nor where messages go (exporter.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from opentelemetry.trace import SpanContext

from rlinsight import __version__, names

TextMode = Literal["full", "redacted", "off"]
Signal = Literal["traces", "logs", "metrics"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
Scalar = str | bool | int | float | bytes
AttributeValue = Scalar | Sequence[str] | Sequence[int] | Sequence[float] | BaseException | None
Attributes = Mapping[Any, AttributeValue]  # keys are str; Mapping[str, ...] would refuse a dict keyed by names.Name

TEXT_KEYS = frozenset({names.PROMPT_TEXT, names.RESPONSE_TEXT, names.ANSWER, names.COMPONENT_EXPLANATION})
TOKEN_KEYS = frozenset({names.PROMPT_TOKEN_IDS, names.TOKEN_IDS, names.TOKEN_PIECES})  # these decode to the text
EXCEPTION_NAME = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)(?=:|$)")

FLAG_SAMPLED = 1
FLAG_PARENT_KNOWN = 0x100  # the next bit says whether the parent lives in another process
FLAG_PARENT_REMOTE = 0x200

_SCOPE = InstrumentationScope(name="rlinsight", version=__version__)


class Encoder:
    """Turns names and Python values into OTLP messages.

    ``text`` full keeps texts; redacted replaces each by its length and hash; off removes them. Both of the latter also
    remove token ids and pieces, which decode to the text, and cut exceptions to their type. ``token_arrays=False``
    removes every byte attribute and the pieces. A value OTLP cannot hold is left out and counted in the message's
    dropped_attributes_count.
    """

    def __init__(self, text: TextMode = "full", token_arrays: bool = True) -> None:
        self._text = text
        self._token_arrays = token_arrays
        self._censoring = text != "full" or not token_arrays

    def span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        links: Sequence[SpanContext] = (),
        error: BaseException | None = None,
    ) -> Span:
        """A finished span; ``error`` sets its status."""
        span = Span(
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
            trace_id=context.trace_id.to_bytes(16, "big"),
            span_id=context.span_id.to_bytes(8, "big"),
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
            flags=FLAG_SAMPLED | FLAG_PARENT_KNOWN,
        )
        if parent is not None:
            span.parent_span_id = parent.span_id.to_bytes(8, "big")
            if parent.is_remote:
                span.flags |= FLAG_PARENT_REMOTE
        for link in links:
            span.links.add(trace_id=link.trace_id.to_bytes(16, "big"), span_id=link.span_id.to_bytes(8, "big"))
        if error is not None:
            span.status.code = Status.STATUS_CODE_ERROR
            span.status.message = _utf8(self.describe(error))
        span.dropped_attributes_count = self._fill(span.attributes, attributes)
        return span

    def event(self, name: str, context: SpanContext | None, time_ns: int, attributes: Attributes) -> LogRecord:
        """A log record with an event name, inside the span of ``context``."""
        record = LogRecord(event_name=name, time_unix_nano=time_ns, observed_time_unix_nano=time_ns)
        if context is not None:
            record.trace_id = context.trace_id.to_bytes(16, "big")
            record.span_id = context.span_id.to_bytes(8, "big")
            record.flags = FLAG_SAMPLED
        record.dropped_attributes_count = self._fill(record.attributes, attributes)
        return record

    def resource(self, attributes: Attributes) -> Resource:
        """Who emits."""
        resource = Resource()
        resource.dropped_attributes_count = self._fill(resource.attributes, attributes)
        return resource

    def describe(self, error: BaseException) -> str:
        """``Type: message``, or the type alone when texts are not captured: messages quote prompts."""
        name = type(error).__name__
        message = str(error) if self._text == "full" else ""
        return f"{name}: {message}" if message else name

    def _fill(self, target: Any, attributes: Attributes) -> int:
        """Append to a repeated KeyValue; returns how many could not be encoded. None is unknown, so it is left out."""
        dropped = 0
        for key, value in attributes.items():
            if value is not None and self._censoring:
                value = self._censor(key, value)
            if value is None:
                continue
            pair = target.add()
            try:
                pair.key = key
                _assign(pair.value, self.describe(value) if isinstance(value, BaseException) else value)
            except (TypeError, ValueError, AttributeError):
                del target[-1]
                dropped += 1
        return dropped

    def _censor(self, key: str, value: AttributeValue) -> AttributeValue:
        """The value as the mode allows it to leave; None removes it."""
        if key in TOKEN_KEYS:  # here only if texts or arrays are not captured
            return None
        if isinstance(value, bytes | bytearray | memoryview):
            return value if self._token_arrays else None
        if self._text == "full":
            return value
        if key == names.REASON and isinstance(value, str):
            kind = EXCEPTION_NAME.match(value)
            return kind.group() if kind else self._hide(value)
        return self._hide(value) if key in TEXT_KEYS else value

    def _hide(self, value: AttributeValue) -> str | None:
        if self._text == "off":
            return None
        text = value if isinstance(value, str) else repr(value)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return f"[redacted len={len(text)} sha256={digest[:12]}]"


def _assign(target: AnyValue, value: Any) -> None:
    """Set the one field of ``target`` that fits ``value``. Raises TypeError or ValueError for what OTLP cannot hold."""
    if isinstance(value, str):
        try:
            target.string_value = value
        except UnicodeEncodeError:
            target.string_value = _utf8(value)
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, bytes | bytearray | memoryview):
        target.bytes_value = bytes(value)
    elif isinstance(value, Sequence):
        target.array_value.SetInParent()
        for item in value:
            _assign(target.array_value.values.add(), item)
    else:  # numpy and torch scalars; their arrays raise ValueError here
        scalar = value.item()
        if not isinstance(scalar, bool | int | float | str):
            raise TypeError(f"an attribute cannot hold {type(value).__name__}")
        _assign(target, scalar)


def _utf8(text: str) -> str:
    """Text without lone surrogates, which protobuf strings cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def request(signal: Signal, resource: Resource, items: Sequence[Message]) -> bytes:
    """One serialized export request holding ``items`` (spans or log records) of one resource."""
    if signal == "traces":
        spans = ScopeSpans(scope=_SCOPE, spans=items, schema_url=names.SCHEMA_URL)  # pyright: ignore[reportArgumentType]
        body = ResourceSpans(resource=resource, scope_spans=[spans], schema_url=names.SCHEMA_URL)
        return ExportTraceServiceRequest(resource_spans=[body]).SerializeToString()
    logs = ScopeLogs(scope=_SCOPE, log_records=items, schema_url=names.SCHEMA_URL)  # pyright: ignore[reportArgumentType]
    body = ResourceLogs(resource=resource, scope_logs=[logs], schema_url=names.SCHEMA_URL)
    return ExportLogsServiceRequest(resource_logs=[body]).SerializeToString()
