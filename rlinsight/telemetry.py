"""Spans and events of this process, linked across processes by W3C trace context. A no-op until ``setup``.

Context lives in the OpenTelemetry API, so any library instrumented with it nests under our spans. Spans are encoded
here rather than by the SDK: its ids come from the global random generator, which training seeds alike in every worker
(equal trace ids), its environment variables can silence a run, and rollouts need ids reserved before they end.

Does not own encoding and redaction (otlp.py), queueing (exporter.py), or disk and delivery (segments.py, spool.py).
Nothing here raises into the caller or waits for disk or network, except ``flush`` and ``shutdown``.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rlinsight import names
from rlinsight.exporter import Exporter
from rlinsight.otlp import Attributes, AttributeValue, Encoder, TextMode
from rlinsight.segments import Segments

Carrier = Mapping[str, str]

EXIT_TIMEOUT_S = 2.0  # at interpreter exit; what is left stays in the spool

_log = logging.getLogger(__name__)
_w3c = TraceContextTextMapPropagator()
_sampled = TraceFlags(TraceFlags.SAMPLED)
_recorder: Recorder | None = None
_step: int | None = None


def setup(
    role: str,
    *,
    spool_dir: Path,
    run_id: str,
    attempt: int,
    endpoint: str | None,
    rank: int = 0,
    world_size: int = 1,
    lane: str | None = None,
    text: TextMode = "full",
    token_arrays: bool = True,
    spool_bytes: int = 2 * 1024**3,
    resource: Mapping[str, str] | None = None,
) -> None:
    """Start recording; a second call ends the first recording. Never raises.

    ``endpoint`` is the collector's base URL (http://127.0.0.1:PORT); None only spools. An unusable ``spool_dir`` is a
    warning, and everything emitted is counted as dropped. A forked child is silent until it calls ``setup`` itself.
    """
    global _recorder
    shutdown(EXIT_TIMEOUT_S)
    producer = f"{re.sub(r'[^A-Za-z0-9_.]', '_', role)}-{rank}-{secrets.token_hex(8)}"
    encoder = Encoder(text, token_arrays)
    who = encoder.resource(
        {
            names.SERVICE_NAME: f"rlinsight.{role}",
            names.SERVICE_INSTANCE_ID: producer,
            names.SYSTEM: "rlinsight",
            names.RUN_ID: run_id,
            names.ATTEMPT: attempt,
            names.WORKER_GROUP: role,
            names.RANK: rank,
            names.WORLD_SIZE: world_size,
            **(resource or {}),
        }
    )
    try:
        segments = Segments.create(Path(spool_dir), producer, spool_bytes, who.SerializeToString())
    except OSError as error:
        _log.warning(
            "telemetry is dropped: spool directory %s is unusable (%s); set one that is writable", spool_dir, error
        )
        segments = None
    _recorder = Recorder(encoder, Exporter(producer, encoder, who, segments, endpoint), lane or f"{role}/{rank}")


def shutdown(timeout_s: float = 10.0) -> bool:
    """Stop recording: write everything to the spool and wait up to ``timeout_s`` seconds for its delivery.

    True if the collector stored everything this process emitted. What it has not acknowledged stays on disk, for
    ``spool.deliver_leftovers``.
    """
    global _recorder
    recorder, _recorder = _recorder, None
    return recorder is None or recorder.exporter.close(timeout_s)


def flush(timeout_s: float) -> bool:
    """Wait until what was emitted is on disk and, with an endpoint, acknowledged; False after ``timeout_s`` s."""
    recorder = _recorder
    return recorder is None or recorder.exporter.flush(timeout_s)


def is_enabled() -> bool:
    """Whether ``setup`` was called in this process."""
    return _recorder is not None


def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    announce: bool = False,
    root: bool = False,
    carrier: Carrier | None = None,
    links: Sequence[Carrier] = (),
) -> Span:
    """Context manager around work; an exception marks the span as failed and goes on.

    ``announce`` also emits its start at once, so a hang is visible. ``root`` starts a new trace; ``carrier`` is a
    parent in another process. The span is exported when the block ends.
    """
    return Span(_recorder, name, attributes or {}, announce, root, carrier, links)


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
    *,
    root: bool = False,
    carrier: Carrier | None = None,
    links: Sequence[Carrier] = (),
    identity: Carrier | None = None,
) -> dict[str, str]:
    """Emit a span whose times (unix ns) are known after the fact; returns its carrier, empty when not recording.

    ``identity`` (of ``new_carrier``) gives the span exactly that trace and span id; without ``carrier`` it is a root.
    """
    recorder = _recorder
    if recorder is None:
        return {}
    began = time.perf_counter_ns()
    context = None
    try:
        parent = None if root or (identity and not carrier) else _parent(carrier)
        context = _span_context(identity) or recorder.new_context(parent)
        recorder.emit_span(name, context, parent, start_ns, end_ns, attributes or {}, links, None)
    except Exception:
        recorder.fault(name)
    recorder.exporter.spent(time.perf_counter_ns() - began)
    return _carrier_of(context)


def new_carrier() -> dict[str, str]:
    """Reserve the ids of a new root span, so children can be emitted first; empty when not recording."""
    return {} if _recorder is None else _carrier_of(_recorder.new_context(None))


def event(name: str, attributes: Attributes, *, carrier: Carrier | None = None, time_ns: int | None = None) -> None:
    """Emit an event inside the current span, or inside the span of ``carrier``. Byte values stay bytes on the wire."""
    recorder = _recorder
    if recorder is None:
        return
    began = time.perf_counter_ns()
    try:
        recorder.emit_event(name, _parent(carrier), time.time_ns() if time_ns is None else time_ns, attributes)
    except Exception:
        recorder.fault(name)
    recorder.exporter.spent(time.perf_counter_ns() - began)


def inject() -> dict[str, str]:
    """W3C carrier of the current span, to send along with a remote call; empty outside any span."""
    return _carrier_of(_parent(None))


def attach(carrier: Carrier) -> _Attached:
    """Context manager: spans and events inside are children of the span of ``carrier``."""
    return _Attached(carrier)


def step_context(step: int | None) -> _StepContext:
    """Give every span and event of this process the step, from now on; as a context manager, until the block ends."""
    return _StepContext(step)


class Span:
    """A span being recorded. Entered once."""

    def __init__(
        self,
        recorder: Recorder | None,
        name: str,
        attributes: Attributes,
        announce: bool,
        root: bool,
        carrier: Carrier | None,
        links: Sequence[Carrier],
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._attributes: dict[str, AttributeValue] = dict(attributes)
        self._announce, self._root, self._carrier, self._links = announce, root, carrier, links
        self._context: SpanContext | None = None
        self._parent: SpanContext | None = None
        self._token = None
        self._start_ns = self._began = 0

    def set(self, attributes: Attributes) -> None:
        """Add or replace attributes."""
        self._attributes.update(attributes)

    def carrier(self) -> dict[str, str]:
        """W3C carrier of this span; empty when not recording."""
        return _carrier_of(self._context)

    def __enter__(self) -> Self:
        recorder = self._recorder
        if recorder is None:
            return self
        self._began = time.perf_counter_ns()
        self._start_ns = time.time_ns()
        try:
            self._parent = None if self._root else _parent(self._carrier)
            self._context = recorder.new_context(self._parent)
            self._token = otel_context.attach(set_span_in_context(NonRecordingSpan(self._context)))
            if _step is not None:
                self._attributes.setdefault(names.STEP_INDEX, _step)
            if self._announce:
                recorder.announce(self._name, self._context, self._parent, self._start_ns, self._attributes)
        except Exception:
            recorder.fault(self._name)
        recorder.exporter.spent(time.perf_counter_ns() - self._began)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            otel_context.detach(self._token)
        recorder = self._recorder
        # A fork inside the block leaves this span to the parent process; a later setup leaves it to nobody.
        if recorder is None or recorder is not _recorder or self._context is None:
            return
        ended = time.perf_counter_ns()
        try:
            # Elapsed time is monotonic: a wall clock set back must not give a negative duration.
            end_ns = self._start_ns + ended - self._began
            recorder.emit_span(
                self._name, self._context, self._parent, self._start_ns, end_ns, self._attributes, self._links, error
            )
        except Exception:
            recorder.fault(self._name)
        recorder.exporter.spent(time.perf_counter_ns() - ended)


class Recorder:
    """What one ``setup`` created: identity, encoder, exporter."""

    def __init__(self, encoder: Encoder, exporter: Exporter, lane: str) -> None:
        self._encoder = encoder
        self.exporter = exporter
        self._lane = lane
        self._random = random.Random(secrets.randbits(128))  # never the generator that training seeds and reads

    def new_context(self, parent: SpanContext | None) -> SpanContext:
        """Fresh ids, in the parent's trace if there is one."""
        trace_id = parent.trace_id if parent is not None else self._random.getrandbits(128) or 1
        return SpanContext(trace_id, self._random.getrandbits(64) or 1, is_remote=False, trace_flags=_sampled)

    def emit_span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        links: Sequence[Carrier],
        error: BaseException | None,
    ) -> None:
        """Encode and queue a finished span."""
        linked = [target for target in map(_span_context, links) if target is not None]
        complete = {names.LANE: self._lane, **attributes}
        if _step is not None:
            complete.setdefault(names.STEP_INDEX, _step)
        self.exporter.put(
            "traces", self._encoder.span(name, context, parent, start_ns, end_ns, complete, linked, error)
        )

    def emit_event(self, name: str, context: SpanContext | None, time_ns: int, attributes: Attributes) -> None:
        """Encode and queue an event."""
        if _step is not None and names.STEP_INDEX not in attributes:
            attributes = {names.STEP_INDEX: _step, **attributes}
        self.exporter.put("logs", self._encoder.event(name, context, time_ns, attributes))

    def announce(
        self, name: str, context: SpanContext, parent: SpanContext | None, start_ns: int, attributes: Attributes
    ) -> None:
        """Say that a span has begun, with what is known of it so far."""
        start: dict[str, AttributeValue] = {
            names.START_NAME: name,
            names.START_NS: start_ns,
            names.START_PARENT: None if parent is None else f"{parent.span_id:016x}",
            names.LANE: self._lane,
        }
        self.emit_event(names.SPAN_START, context, start_ns, start | dict(attributes))

    def fault(self, name: str) -> None:
        """Count an item that could not be built; the first one is logged with its traceback."""
        if self.exporter.fault():
            _log.warning("telemetry item %r could not be built and is dropped", name, exc_info=True)


class _Attached:
    """Makes a remote span current."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._token = None

    def __enter__(self) -> None:
        context = _span_context(self._carrier)
        if context is not None:
            self._token = otel_context.attach(set_span_in_context(NonRecordingSpan(context)))

    def __exit__(self, *error: object) -> Literal[False]:
        if self._token is not None:
            otel_context.detach(self._token)
        return False


class _StepContext:
    """Sets the process's step when built; puts the previous one back when a block ends."""

    def __init__(self, step: int | None) -> None:
        global _step
        self._previous = _step
        _step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> Literal[False]:
        global _step
        _step = self._previous
        return False


def _parent(carrier: Carrier | None) -> SpanContext | None:
    """The span of ``carrier``, else the current one."""
    if carrier:
        return _span_context(carrier)
    context = get_current_span().get_span_context()
    return context if context.is_valid else None


def _span_context(carrier: Carrier | None) -> SpanContext | None:
    """What a carrier points at; None when it is empty or not W3C."""
    if not carrier:
        return None
    context = get_current_span(_w3c.extract(carrier, Context())).get_span_context()
    return context if context.is_valid else None


def _carrier_of(context: SpanContext | None) -> dict[str, str]:
    carrier: dict[str, str] = {}
    if context is not None:
        _w3c.inject(carrier, set_span_in_context(NonRecordingSpan(context), Context()))
    return carrier


def _silence_forked_child() -> None:
    """Parent's threads do not exist here, and its spool and span ids are not ours."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.exporter.abandon()


def _at_exit() -> None:
    shutdown(EXIT_TIMEOUT_S)


os.register_at_fork(after_in_child=_silence_forked_child)
atexit.register(_at_exit)
