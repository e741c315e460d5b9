"""What one ``telemetry.setup`` records: spans and log records of every library here, marked and queued.

Does not own context and the public calls (telemetry.py), the SDK's providers (providers.py), encoding (otlp.py) or
queueing (exporter.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord, ReadWriteLogRecord
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, get_current_span

from rlinsight import names
from rlinsight.exporter import Exporter
from rlinsight.meters import Meters
from rlinsight.otlp import SCOPE, Attributes, Encoder, Event
from rlinsight.providers import Sources


class Recorder:
    """Identity, encoder, exporter and meters of one recording; ``step`` is the process's step when a call is made."""

    def __init__(self, encoder: Encoder, exporter: Exporter, meters: Meters, sources: Sources, lane: str) -> None:
        self.encoder = encoder
        self.exporter = exporter
        self.meters = meters
        self.tracer = sources.tracer
        self._lane = lane
        # Spans begun in this recording, by id. Weak: a library that never ends its spans would fill it.
        self._open: WeakValueDictionary[int, Span] = WeakValueDictionary()

    def begin(self, span: Span, step: int | None) -> None:
        """Give a span of any library that has just started its lane and step."""
        self._open[span.get_span_context().span_id] = span
        known = span.attributes or {}
        marks = {key: value for key, value in self.mark({}, step).items() if key not in known}
        if marks:
            span.set_attributes(marks)

    def end(self, span: ReadableSpan) -> None:
        """Queue a finished span; one that began before this recording belongs to another process or to nobody."""
        context = span.get_span_context()
        if context is not None and context.span_id in self._open:
            self._open.pop(context.span_id, None)
            self.exporter.put("traces", span)

    def span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        links: Sequence[Link],
        step: int | None,
        error: BaseException | None,
    ) -> None:
        """Queue a span known after the fact. The SDK's tracer takes no ids that were reserved earlier."""
        status = Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, self.encoder.describe(error))
        span = ReadableSpan(
            name, context, parent, self.encoder.resource,
            attributes=self.mark(self.encoder.plain(attributes), step),
            links=links,
            status=status,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=SCOPE,
        )  # fmt: skip
        self.exporter.put("traces", span)

    def event(self, name: str, context: Context | None, time_ns: int, attributes: Attributes, step: int | None) -> None:
        """Queue an event of ours inside the span of ``context``, the current one if None."""
        values = self.encoder.plain(attributes)
        if step is not None:
            values.setdefault(names.STEP_INDEX, step)
        self.exporter.put("logs", Event(name, time_ns, get_current_span(context).get_span_context(), values))

    def log(self, record: ReadWriteLogRecord, step: int | None) -> None:
        """Queue a log record of any library."""
        own = record.log_record
        if step is not None and isinstance(own.attributes, BoundedAttributes):
            own.attributes.setdefault(names.STEP_INDEX, step)
        self.exporter.put("logs", ReadableLogRecord(own, self.encoder.resource, record.instrumentation_scope))

    def announce(self, span: Span, step: int | None) -> None:
        """Say that a span has begun, with what is known of it so far."""
        start: dict[Any, Any] = {
            names.START_NAME: span.name,
            names.START_NS: span.start_time,
            names.START_PARENT: None if span.parent is None else f"{span.parent.span_id:016x}",
        }
        self.event(names.SPAN_START, None, span.start_time or 0, start | dict[Any, Any](span.attributes or {}), step)

    def mark(self, attributes: dict[str, Any], step: int | None) -> dict[str, Any]:
        """Add lane and step to a span's attributes, unless it states its own."""
        attributes.setdefault(names.LANE, self._lane)
        if step is not None:
            attributes.setdefault(names.STEP_INDEX, step)
        return attributes
