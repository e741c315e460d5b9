"""From OpenTelemetry SDK objects to OTLP requests, with what may not leave the process taken out on the way.

Owns the text-capture modes and which values OTLP can hold. The OTLP exporter's common package builds the messages, from
a copy of each item that is made here: the package sends what it is given, drops what it cannot encode with an error log
each and no count, and fails a whole request for one bad name. Does not own identity or context (telemetry.py) nor where
requests go (exporter.py).
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from opentelemetry._logs import LogRecord
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN, Link, Status, set_span_in_context

from rlinsight import __version__, names, points
from rlinsight.points import Point

TextMode = Literal["full", "redacted", "off"]
Scalar = str | bool | int | float | bytes
AttributeValue = Scalar | Sequence[str] | Sequence[int] | Sequence[float] | BaseException | None
Attributes = Mapping[Any, AttributeValue]  # keys are str; Mapping[str, ...] would refuse a dict keyed by names.Name
Item = ReadableSpan | ReadableLogRecord | Point

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
INT64 = range(-(2**63), 2**63)

SPAN_BYTES = 3000  # what a finished span without attributes takes in this process
POINT_BYTES = 1000  # a metric point
RECORD_BYTES = 600  # a log record
VALUE_BYTES = 100  # an attribute or an array element, apart from its text


class TypeName(str):
    """The type of an exception, which holds no captured text."""


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
        self.resource = _Resource(self._attributes(resource.attributes), resource.schema_url)

    def plain(self, attributes: Attributes) -> dict[str, Any]:
        """Attributes the SDK takes as they are; None marks what OTLP cannot hold. An unknown (None) is left out.

        The SDK itself would turn an unfamiliar value, numpy scalars too, into its text, with a warning each.
        """
        return {key: self._plain(value) for key, value in attributes.items() if value is not None}

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
                    return value
                items = [self._plain(item) for item in value]
                return None if None in items else items
            scalar = value.item()  # numpy and torch scalars; their arrays raise ValueError here
        except Exception:
            return None
        return scalar if isinstance(scalar, bool | int | float | str) else None

    def describe(self, error: BaseException) -> str:
        """``Type: message``, or the type alone when texts are not captured: messages quote prompts."""
        name = TypeName(type(error).__name__)
        message = str(error) if self._text == "full" else ""
        return f"{name}: {message}" if message else name

    def record(self, name: str, time_ns: int, attributes: Mapping[Any, Any]) -> ReadableLogRecord:
        """An event outside any span."""
        record = LogRecord(
            event_name=name, timestamp=time_ns, observed_timestamp=time_ns, context=NO_SPAN, attributes=attributes
        )
        return ReadableLogRecord(record, self.resource, SCOPE)

    def encode(self, items: Sequence[Item]) -> bytes:
        """A serialized request holding ``items``, all of one signal. Raises if one of them cannot be encoded."""
        spans = [self._span(item) for item in items if isinstance(item, ReadableSpan)]
        if spans:
            return encode_spans(spans).SerializeToString()
        measured = [item for item in items if isinstance(item, Point)]
        if measured:
            return points.encode(measured, self.resource, self._attributes)
        records = [self._record(item) for item in items if isinstance(item, ReadableLogRecord)]
        return encode_logs(records).SerializeToString()

    def _span(self, span: ReadableSpan) -> ReadableSpan:
        return ReadableSpan(
            name=_utf8(span.name),
            context=span.context,
            parent=span.parent,
            resource=self.resource,
            attributes=self._attributes(span.attributes, span.dropped_attributes),
            events=[
                Event(_utf8(event.name), self._attributes(event.attributes, event.dropped_attributes), event.timestamp)
                for event in span.events
            ],
            links=[
                Link(link.context, self._attributes(link.attributes, link.dropped_attributes)) for link in span.links
            ],
            kind=span.kind,
            status=self._status(span.status),
            start_time=span.start_time,
            end_time=span.end_time,
            instrumentation_scope=span.instrumentation_scope,
        )

    def _record(self, item: ReadableLogRecord) -> ReadableLogRecord:
        record = copy.copy(item.log_record)
        record.attributes = self._attributes(self._rounded(record.attributes or {}), item.dropped_attributes)
        if record.body is not None:
            # Whatever a library logs may quote what it works on.
            body = _sendable(record.body)
            record.body = body if self._text == "full" else self._hide(body)
        return ReadableLogRecord(record, self.resource, item.instrumentation_scope)

    def _rounded(self, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Attributes with their floating arrays rounded; an array that is none goes as it is."""
        decimals = self._token_decimals
        if decimals is None or FLOAT_ARRAYS.isdisjoint(attributes):
            return attributes
        import numpy as np  # 0.1 s that only senders of arrays need

        rounded = {}
        for key in FLOAT_ARRAYS & attributes.keys():
            value = attributes[key]
            if isinstance(value, bytes) and len(value) % 4 == 0:
                # By way of float64: the nearest float32 to the decimal, the same for equal inputs.
                rounded[key] = np.frombuffer(value, "<f4").astype(np.float64).round(decimals).astype("<f4").tobytes()
        return {**attributes, **rounded}

    def _status(self, status: Status) -> Status:
        if status.description is None:
            return status
        description = _utf8(status.description)
        return Status(status.status_code, description if self._text == "full" else self._exception_type(description))

    def _attributes(self, attributes: Mapping[str, Any] | None, dropped: int = 0) -> Mapping[str, Any]:
        """What may leave; ``dropped`` counts the values lost before."""
        kept: dict[str, Any] = {}
        for key, value in (attributes or {}).items():
            if value is None:
                dropped += 1
                continue
            if self._censoring and (value := self._censor(key, value)) is None:
                continue
            try:
                kept[_utf8(key)] = _sendable(value)
            except ValueError:
                dropped += 1
        if not dropped:
            return kept
        counted = BoundedAttributes(attributes=kept)
        counted.dropped = dropped
        return counted

    def _censor(self, key: str, value: Any) -> Any:
        """The value as the mode allows it to leave; None removes it."""
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


class _Resource(Resource):
    """The exporter's encoder groups items by resource; the SDK's own hash writes it out as JSON, for every item."""

    def __hash__(self) -> int:
        return id(self)


def name_of(item: Item) -> str:
    """What a person calls the item."""
    if isinstance(item, Point):
        return item.metric.name
    return str(item.name if isinstance(item, ReadableSpan) else item.log_record.event_name)


def size(item: Item) -> int:
    """About the bytes an item takes in memory; on the wire it takes fewer."""
    if isinstance(item, ReadableSpan):
        events = sum(RECORD_BYTES + _size(event.attributes) for event in item.events)
        return SPAN_BYTES + RECORD_BYTES * len(item.links) + events + _size(item.attributes)
    if isinstance(item, Point):
        return POINT_BYTES + _size(item.point.attributes)
    return RECORD_BYTES + _size(item.log_record.attributes) + _size(item.log_record.body)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return VALUE_BYTES + len(value)
    if type(value) in PLAIN_TYPES:
        return VALUE_BYTES
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, Sequence):
        if set(map(type, value)) == {str}:
            return VALUE_BYTES * len(value) + sum(map(len, value))
        return sum(map(_size, value))
    return VALUE_BYTES


def _sendable(value: Any) -> Any:
    """The value as protobuf can hold it. Raises ValueError when it cannot."""
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, int) and value not in INT64:
        raise ValueError(f"{value} has more than 64 bits")
    if value is None or isinstance(value, bytes | int | float):
        return value
    if isinstance(value, Mapping):
        return {_utf8(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return tuple(map(_sendable, value))
    raise ValueError(f"an attribute cannot hold {type(value).__name__}")


def _utf8(text: str) -> str:
    """Text without lone surrogates, which protobuf strings cannot hold. What is no text is left to protobuf."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")
