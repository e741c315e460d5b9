"""From OpenTelemetry SDK objects to OTLP requests, with what may not leave the process taken out on the way.

Owns the text-capture modes and which values OTLP can hold. Messages are filled in place, a third of the time that the
OTLP exporter's common package takes; it also sends what it is given, and drops what it cannot encode without a count.
Does not own metric points (points.py), identity or context (telemetry.py), nor where requests go (exporter.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from opentelemetry.context import Context
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN, INVALID_SPAN_CONTEXT, SpanContext, Status, set_span_in_context

from rlinsight import __version__, names, points
from rlinsight.points import Point

TextMode = Literal["full", "redacted", "off"]
Scalar = str | bool | int | float | bytes
AttributeValue = Scalar | Sequence[str] | Sequence[int] | Sequence[float] | BaseException | None
Attributes = Mapping[Any, AttributeValue]  # keys are str; Mapping[str, ...] would refuse a dict keyed by names.Name
SCOPE = InstrumentationScope("rlinsight", __version__, names.SCHEMA_URL)
NO_SPAN: Context = set_span_in_context(INVALID_SPAN, Context())  # an empty one would stand for the current context

TEXT_KEYS = frozenset(
    {names.PROMPT_TEXT, names.RESPONSE_TEXT, names.ANSWER, names.COMPONENT_EXPLANATION}
    # What instrumented libraries put into their own spans and events (GenAI, exception and OpenInference conventions).
    | {"gen_ai.prompt", "gen_ai.completion", "gen_ai.input.messages", "gen_ai.output.messages"}
    | {"gen_ai.system_instructions", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"}
    | {"gen_ai.retrieval.query.text", "gen_ai.retrieval.documents"}
    | {"exception.message", "exception.stacktrace", "error.message", "code.stacktrace"}
    | {"input.value", "output.value", "llm.prompts", "llm.completions", "llm.function_call", "tool.parameters"}
    | {"llm.prompt_template.template", "llm.prompt_template.variables", "embedding.text", "reranker.query"}
    | {"message.content", "document.content", "tool_call.function.arguments", "metadata"}
    | {"traceloop.entity.input", "traceloop.entity.output", "mlflow.spanInputs", "mlflow.spanOutputs"}
)
TEXT_PREFIXES = (  # one attribute per message, document or value
    *("gen_ai.prompt.", "gen_ai.completion."),  # the older spelling
    *("llm.input_messages", "llm.output_messages", "llm.prompts.", "llm.completions."),
    *("retrieval.documents", "reranker.input_documents", "reranker.output_documents", "embedding.embeddings"),
)
TOKEN_KEYS = frozenset({names.PROMPT_TOKEN_IDS, names.TOKEN_IDS, names.TOKEN_PIECES})  # these decode to the text
FLOAT_ARRAYS = frozenset(
    {names.ROLLOUT_LOG_PROBS, names.OLD_LOG_PROBS_ARRAY, names.LOG_PROBS_ARRAY, names.REF_LOG_PROBS_ARRAY}
    | {names.ENTROPY_ARRAY, names.ADVANTAGES_ARRAY}
)
EXCEPTION_NAME = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)(?=:|$)")
PLAIN_TYPES = frozenset({str, bytes, bool, int, float})

SPAN_BYTES = 3000  # what a finished span without attributes takes in this process
POINT_BYTES = 1000  # a metric point
RECORD_BYTES = 600  # a log record
VALUE_BYTES = 100  # an attribute or an array element, apart from its text


class TypeName(str):
    """The type of an exception, which holds no captured text."""


@dataclass(slots=True, eq=False)
class Event:
    """An event of ours inside the span of ``context``. A record of the SDK says the same and takes longer to make."""

    name: str
    time_ns: int
    context: SpanContext
    attributes: dict[str, Any]  # of Encoder.plain
    instrumentation_scope: ClassVar[InstrumentationScope] = SCOPE


Item = ReadableSpan | ReadableLogRecord | Event | Point


class Encoder:
    """Turns spans, log records and metric points of any library into requests of one resource.

    ``text`` full keeps texts; redacted replaces each by its length and hash; off removes them. Both of the latter also
    remove token ids and pieces, which decode to the text, and cut exceptions to their type. ``token_arrays=False``
    removes every byte attribute and the pieces. ``token_decimals`` rounds the floating arrays of tokens, which is what
    lets a store pack them; None sends every bit. A value OTLP cannot hold is left out and counted in the message's
    dropped_attributes_count.
    """

    def __init__(
        self,
        resource: Resource,
        text: TextMode = "full",
        token_arrays: bool = True,
        token_decimals: int | None = None,
    ) -> None:
        self._text = text
        self._token_arrays = token_arrays
        self._token_decimals = token_decimals
        self._censoring = text != "full" or not token_arrays
        kept = {key: self._censor(key, value) for key, value in resource.attributes.items()}
        self.resource = Resource({key: value for key, value in kept.items() if value is not None}, resource.schema_url)
        self._resource = common_pb2.KeyValueList()
        self.fill(self._resource.values, resource.attributes)

    def plain(self, attributes: Attributes) -> dict[str, Any]:
        """A copy that nobody changes, of values OTLP holds; None marks what it cannot. An unknown (None) is left out.

        The SDK itself would turn an unfamiliar value, numpy scalars too, into its text, with a warning each.
        """
        return {
            key: value if type(value) in PLAIN_TYPES else self._plain(value)
            for key, value in attributes.items()
            if value is not None
        }

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str | bytes | bool | int | float):
            return value
        try:
            if isinstance(value, BaseException):
                return self.describe(value)
            if isinstance(value, bytearray | memoryview):
                return bytes(value)
            if isinstance(value, Sequence):
                if set(map(type, value)) <= PLAIN_TYPES:  # long lists of token texts, at a tenth of the time
                    return tuple(value)
                items = tuple(self._plain(item) for item in value)
                return None if None in items else items
            scalar = value.item()  # numpy and torch scalars; their arrays raise ValueError here
        except Exception:  # of a foreign object's own methods: counted as an attribute that was dropped
            return None
        return scalar if isinstance(scalar, bool | int | float | str) else None

    def describe(self, error: BaseException) -> str:
        """``Type: message``, or the type alone when texts are not captured: messages quote prompts."""
        name = TypeName(type(error).__name__)
        message = str(error) if self._text == "full" else ""
        return f"{name}: {message}" if message else name

    def record(self, name: str, time_ns: int, attributes: Attributes) -> Event:
        """An event outside any span."""
        return Event(name, time_ns, INVALID_SPAN_CONTEXT, self.plain(attributes))

    def encode(self, items: Sequence[Item]) -> bytes:
        """A serialized request holding ``items``, all of one signal. Raises if one of them cannot be encoded."""
        first = items[0]
        if isinstance(first, ReadableSpan):
            request, add = ExportTraceServiceRequest(), self._add_span
            sent = request.resource_spans.add()
            scopes, kind = sent.scope_spans, "spans"
        elif isinstance(first, Point):
            request, add = ExportMetricsServiceRequest(), points.Adder(self.fill)
            sent = request.resource_metrics.add()
            scopes, kind = sent.scope_metrics, "metrics"
        else:
            request, add = ExportLogsServiceRequest(), self._add_log
            sent = request.resource_logs.add()
            scopes, kind = sent.scope_logs, "log_records"
        sent.resource.attributes.extend(self._resource.values)
        sent.schema_url = self.resource.schema_url
        of_scope: dict[InstrumentationScope | None, Any] = {}
        for item in items:
            scope = item.instrumentation_scope
            if scope not in of_scope:
                of_scope[scope] = getattr(self._scope(scopes.add(), scope), kind)
            add(of_scope[scope], item)
        return request.SerializeToString()

    def _scope(self, message: Any, scope: InstrumentationScope | None) -> Any:
        if scope is not None:
            message.scope.name = scope.name
            message.scope.version = scope.version or ""
            self.fill(message.scope.attributes, scope.attributes)
            message.schema_url = scope.schema_url or ""
        return message

    def _add_span(self, spans: Any, span: Any) -> None:
        """Of ReadableSpan."""
        context, parent = span.get_span_context(), span.parent
        message = spans.add()
        message.CopyFrom(_SPAN)
        del message.attributes[:]
        message.trace_id, message.span_id = _ids(context)
        message.trace_state = _trace_state(context)
        if parent is not None:
            message.parent_span_id = _ids(parent)[1]
        message.name = _utf8(span.name or "")
        message.kind = span.kind.value + 1  # the API numbers them from 0, OTLP has UNSPECIFIED there
        message.start_time_unix_nano, message.end_time_unix_nano = span.start_time or 0, span.end_time or 0
        message.flags = _flags(parent)
        message.dropped_attributes_count = self.fill(message.attributes, span.attributes, span.dropped_attributes)
        for event in span.events:
            told = message.events.add(name=_utf8(event.name), time_unix_nano=event.timestamp)
            told.dropped_attributes_count = self.fill(told.attributes, event.attributes, event.dropped_attributes)
        message.dropped_events_count = span.dropped_events
        for link in span.links:
            trace_id, span_id = _ids(link.context)
            target = message.links.add(trace_id=trace_id, span_id=span_id, flags=_flags(link.context))
            target.trace_state = _trace_state(link.context)
            target.dropped_attributes_count = self.fill(target.attributes, link.attributes, link.dropped_attributes)
        message.dropped_links_count = span.dropped_links
        message.status.code = span.status.status_code.value
        message.status.message = self._description(span.status) or ""

    def _add_log(self, records: Any, item: Any) -> None:
        """Of Event or ReadableLogRecord."""
        if isinstance(item, Event):
            self._add_event(records.add(), item)
        else:
            self._add_record(records.add(), item)

    def _add_event(self, message: Any, event: Event) -> None:
        message.CopyFrom(_RECORD)
        del message.attributes[:]
        message.time_unix_nano = message.observed_time_unix_nano = event.time_ns
        if event.context.is_valid:
            message.trace_id, message.span_id = _ids(event.context)
        message.flags = int(event.context.trace_flags)
        message.event_name = _utf8(event.name)
        message.dropped_attributes_count = self.fill(message.attributes, self._rounded(event.attributes.copy()))

    def _add_record(self, message: Any, item: Any) -> None:
        record = item.log_record
        message.time_unix_nano, message.observed_time_unix_nano = record.timestamp or 0, record.observed_timestamp or 0
        if record.trace_id:
            message.trace_id = record.trace_id.to_bytes(16)
        if record.span_id:
            message.span_id = record.span_id.to_bytes(8)
        message.flags = int(record.trace_flags or 0)
        if record.severity_number is not None:
            message.severity_number = record.severity_number.value
        message.severity_text = _utf8(record.severity_text or "")
        message.event_name = _utf8(record.event_name or "")
        attributes: Any = record.attributes or {}
        attributes = self._rounded(attributes.copy())
        message.dropped_attributes_count = self.fill(message.attributes, attributes, item.dropped_attributes)
        # Whatever a library logs may quote what it works on.
        body = record.body if self._text == "full" or record.body is None else self._hide(record.body)
        if body is not None:
            _set(message.body, body)

    def fill(self, pairs: Any, attributes: Any, dropped: int = 0) -> int:
        """Add to a message what of ``attributes`` may leave; returns how many OTLP cannot hold, with those ``dropped``.

        ``attributes`` is a dict, the SDK's own kind, or None.
        """
        for key, value in (attributes.copy() if attributes else {}).items():
            if value is None:
                dropped += 1
                continue
            if self._censoring and (value := self._censor(key, value)) is None:
                continue
            pair = pairs.add()
            pair.CopyFrom(_PAIR)
            try:
                pair.key = _utf8(key)
                _set(pair.value, value)
            except (TypeError, ValueError):
                del pairs[-1]
                dropped += 1
        return dropped

    def _rounded(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Attributes with their floating arrays rounded; an array that is none goes as it is."""
        decimals = self._token_decimals
        if decimals is None or FLOAT_ARRAYS.isdisjoint(attributes):
            return attributes
        import numpy as np  # 0.1 s that only senders of arrays need

        arrays = {key: attributes[key] for key in FLOAT_ARRAYS & attributes.keys()}
        arrays = {key: value for key, value in arrays.items() if isinstance(value, bytes) and len(value) % 4 == 0}
        # All in one go: the calls cost more than the numbers. By way of float64: the nearest float32 to the decimal,
        # the same for equal inputs.
        rounded = np.frombuffer(b"".join(arrays.values()), "<f4").astype(np.float64).round(decimals).astype("<f4")
        data, start = rounded.tobytes(), 0
        for key, value in arrays.items():
            attributes[key] = data[start : start + len(value)]
            start += len(value)
        return attributes

    def _description(self, status: Status) -> str | None:
        if status.description is None:
            return None
        description = _utf8(status.description)
        return description if self._text == "full" else self._exception_type(description)

    def _censor(self, key: str, value: Any) -> Any:
        """The value as the mode allows it to leave; None removes it."""
        if not self._censoring:
            return value
        if key in TOKEN_KEYS:  # here only if texts or arrays are not captured
            return None
        if self._text != "full" and is_text(key):
            return self._hide(value)
        if isinstance(value, bytes):
            return value if self._token_arrays else None
        if self._text != "full" and key == names.REASON and isinstance(value, str):
            return self._exception_type(value)
        if isinstance(value, Mapping):
            inner = {name: self._censor(name, item) for name, item in value.items()}
            return {name: item for name, item in inner.items() if item is not None}
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            return [self._censor(key, item) for item in value]
        return value

    def _exception_type(self, reason: str) -> str | None:
        """``Type`` of ``Type: message``; any other text is hidden."""
        if isinstance(reason, TypeName):
            return reason
        kind = EXCEPTION_NAME.match(reason)
        return kind.group() if kind else self._hide(reason)

    def _hide(self, value: Any) -> str | None:
        if self._text == "off":
            return None
        text = value if isinstance(value, str) else repr(value)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return f"[redacted len={len(text)} sha256={digest[:12]}]"


def is_text(key: str) -> bool:
    """Whether attributes of this key hold text that the capture modes are about."""
    return key in TEXT_KEYS or key.startswith(TEXT_PREFIXES)


def name_of(item: Item) -> str:
    """What a person calls the item."""
    if isinstance(item, Point):
        return item.metric.name
    return str(item.log_record.event_name if isinstance(item, ReadableLogRecord) else item.name)


def size(item: Item) -> int:
    """About the bytes an item takes in memory; on the wire it takes fewer."""
    if isinstance(item, Event):
        return RECORD_BYTES + _size(item.attributes)
    if isinstance(item, ReadableSpan):
        events = sum(RECORD_BYTES + _size_of_all(event.attributes) for event in item.events)
        return SPAN_BYTES + RECORD_BYTES * len(item.links) + events + _size_of_all(item.attributes)
    if isinstance(item, Point):
        return POINT_BYTES + _size_of_all(item.point.attributes)
    return RECORD_BYTES + _size_of_all(item.log_record.attributes) + _size(item.log_record.body)


def _size_of_all(attributes: Any) -> int:
    """Of a dict, the SDK's own kind, whose plain copy is ten times as fast to read, or None."""
    return _size(attributes.copy()) if attributes else 0


def _size(value: Any) -> int:
    kind = type(value)
    if kind is str or kind is bytes:
        return VALUE_BYTES + len(value)
    if kind in PLAIN_TYPES:
        return VALUE_BYTES
    if isinstance(value, dict | Mapping):  # a dict is found at once
        return sum(map(_size, value.values()))
    if isinstance(value, str | bytes):
        return VALUE_BYTES + len(value)
    if isinstance(value, tuple | Sequence):
        if set(map(type, value)) == {str}:
            return VALUE_BYTES * len(value) + sum(map(len, value))
        return sum(map(_size, value))
    return VALUE_BYTES


# Messages whose parts are there already, to fill copies of. Protobuf makes an arena for each part that is read before
# it is set, and when 10,000 arenas are gone returns all free memory of the process to the system (malloc_trim, with the
# GIL held): several times a minute, and training, which needs that memory in each step, had to fault it in again.
_PAIR = common_pb2.KeyValue(value=common_pb2.AnyValue(string_value=""))
_SPAN = trace_pb2.Span(attributes=[_PAIR], status=trace_pb2.Status())
_RECORD = logs_pb2.LogRecord(attributes=[_PAIR])
_ARRAY = common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=[common_pb2.AnyValue()]))


def _set(message: Any, value: Any) -> None:
    """Give a protobuf AnyValue a value. Raises ValueError or TypeError when it cannot hold it."""
    if isinstance(value, str):
        message.string_value = _utf8(value)
    elif isinstance(value, float):
        message.double_value = value
    elif isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, int):
        message.int_value = value
    elif isinstance(value, bytes):
        message.bytes_value = value
    elif isinstance(value, Mapping):
        pairs = message.kvlist_value
        pairs.SetInParent()  # an empty one is not the same as none
        for key, item in value.items():
            pair = pairs.values.add()
            pair.CopyFrom(_PAIR)
            pair.key = _utf8(key)
            _set(pair.value, item)
    elif isinstance(value, Sequence):
        message.CopyFrom(_ARRAY)
        values = message.array_value.values
        del values[:]
        for item in value:
            _set(values.add(), item)
    elif value is None:
        message.Clear()
    else:
        raise ValueError(f"an attribute cannot hold {type(value).__name__}")


def _ids(context: SpanContext) -> tuple[bytes, bytes]:
    return context.trace_id.to_bytes(16), context.span_id.to_bytes(8)


def _trace_state(context: SpanContext) -> str:
    return ",".join(f"{key}={value}" for key, value in context.trace_state.items()) if context.trace_state else ""


def _flags(other: SpanContext | None) -> int:
    """Of a span with that parent, or of a link to that span: whether it is known to be in another process."""
    is_remote = trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK if other is not None and other.is_remote else 0
    return trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | is_remote


def _utf8(text: str) -> str:
    """Text without lone surrogates, which protobuf strings cannot hold. What is no text is left to protobuf."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")
