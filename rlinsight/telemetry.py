"""Spans, events and metrics of this process, linked across processes by W3C trace context. A no-op until ``setup``.

They go through the OpenTelemetry SDK, and so do those of every other library in the process that is instrumented with
it: all of them nest, carry lane and step, and are redacted and delivered alike.

Does not own the SDK's providers (providers.py), what is recorded (recorder.py) and measured (meters.py,
system_metrics.py), encoding and redaction (otlp.py), queueing (exporter.py), or disk and delivery (segments.py,
spool.py). Nothing here raises into the caller or waits for disk or network, except ``flush`` and ``shutdown``.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk._logs import LogRecordProcessor, ReadWriteLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import (
    Link,
    SpanContext,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rlinsight import names, providers, system_metrics
from rlinsight.exporter import Exporter
from rlinsight.meters import Meters
from rlinsight.otlp import NO_SPAN, Attributes, AttributeValue, Encoder, TextMode
from rlinsight.recorder import Recorder
from rlinsight.segments import Segments
from rlinsight.spool import Locate

Carrier = Mapping[str, str]

EXIT_TIMEOUT_S = 2.0  # at interpreter exit; what is left stays in the spool
LAST_METRICS_S = 2.0  # a collection at the end; more means that an instrument hangs

_log = logging.getLogger(__name__)
_w3c = TraceContextTextMapPropagator()
_sources: providers.Sources | None = None
_recorder: Recorder | None = None
_step: int | None = None


def setup(
    role: str,
    *,
    spool_dir: Path,
    run_id: str | None,
    attempt: int | None,
    endpoint: str | None,
    token: str | None = None,
    locate: Locate | None = None,
    rank: int = 0,
    world_size: int = 1,
    lane: str | None = None,
    text: TextMode = "full",
    token_arrays: bool = True,
    token_decimals: int | None = None,
    spool_bytes: int = 2 * 1024**3,
    metrics_interval_s: float = 5.0,
    system: bool = False,
    resource: Mapping[str, str] | None = None,
) -> None:
    """Start recording; a second call ends the first recording. Never raises.

    ``run_id`` and ``attempt`` are None for work that belongs to no run.
    ``endpoint`` is the collector's base URL (http://127.0.0.1:PORT); None only spools; ``token`` is what it
    asks for beyond loopback; ``locate`` tells where it is when it stops answering. An unusable ``spool_dir`` is a
    warning, and everything emitted is counted as dropped. Metrics of every library are collected each
    ``metrics_interval_s`` seconds; ``system`` adds those of this process and its machine. A forked child is silent
    until it calls ``setup`` itself.
    """
    global _recorder, _sources
    shutdown(EXIT_TIMEOUT_S)
    producer = f"{re.sub(r'[^A-Za-z0-9_.]', '_', role)}-{rank}-{secrets.token_hex(8)}"
    who = {
        names.SERVICE_NAME: f"rlinsight.{role}",
        names.SERVICE_INSTANCE_ID: producer,
        names.SYSTEM: "rlinsight",
        **({} if run_id is None else {names.RUN_ID: run_id}),
        **({} if attempt is None else {names.ATTEMPT: attempt}),
        names.WORKER_GROUP: role,
        names.RANK: rank,
        names.WORLD_SIZE: world_size,
        names.HOST_NAME: socket.gethostname(),
        names.PROCESS_ID: os.getpid(),
        **(resource or {}),
    }
    encoder = Encoder(Resource.create(who, names.SCHEMA_URL), text, token_arrays, token_decimals)
    try:
        processor = _Processor()
        sources = _sources = _sources or providers.install(processor, processor, encoder.resource)
    except Exception:  # a provider the environment asks for cannot be loaded, for one
        _log.warning("nothing is recorded: OpenTelemetry cannot be set up", exc_info=True)
        return
    try:
        owner = encoder.resource.to_json(indent=None).encode()
        segments = Segments.create(Path(spool_dir), producer, spool_bytes, owner)
    except OSError as error:
        _log.warning(
            "telemetry is dropped: spool directory %s is unusable (%s); set one that is writable", spool_dir, error
        )
        segments = None
    exporter = Exporter(producer, encoder, segments, endpoint, token, locate)
    if system:
        system_metrics.observe(sources.meters[0], run_id or producer)
    meters = Meters(sources.meters, exporter, metrics_interval_s)
    _recorder = Recorder(encoder, exporter, meters, sources, lane or f"{role}/{rank}")


def shutdown(timeout_s: float = 10.0) -> bool:
    """Stop recording: write everything to the spool and wait up to ``timeout_s`` seconds for its delivery.

    True if the collector stored everything this process emitted. What it has not acknowledged stays on disk, for
    ``spool.deliver_leftovers``.
    """
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is None:
        return True
    deadline = time.monotonic() + timeout_s
    recorder.meters.collect(min(timeout_s / 2, LAST_METRICS_S), last=True)
    system_metrics.stop()
    return recorder.exporter.close(max(deadline - time.monotonic(), 0))


def flush(timeout_s: float) -> bool:
    """Wait until what was emitted is on disk and, with an endpoint, acknowledged; False after ``timeout_s`` s."""
    recorder = _recorder
    if recorder is None:
        return True
    deadline = time.monotonic() + timeout_s
    collected = recorder.meters.collect(timeout_s)
    return recorder.exporter.flush(max(deadline - time.monotonic(), 0)) and collected


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
    error: BaseException | None = None,
) -> dict[str, str]:
    """Emit a span whose times (unix ns) are known after the fact; returns its carrier, empty when not recording.

    ``identity`` (of ``new_carrier``) gives the span exactly that trace and span id; without ``carrier`` it is a root.
    ``error`` marks it as failed.
    """
    recorder = _recorder
    if recorder is None:
        return {}
    began = time.perf_counter_ns()
    context = None
    try:
        parent = None if root or (identity and not carrier) else _span_context(_context(carrier))
        context = _span_context(_context(identity)) if identity else None
        context = context or providers.new_context(parent)
        recorder.span(name, context, parent, start_ns, end_ns, attributes or {}, _links(links), _step, error)
    except Exception:  # counted: an emit call never raises into training
        recorder.exporter.fault(name)
    recorder.exporter.spent(time.perf_counter_ns() - began)
    return _carrier_of(context)


def new_carrier(parent: Carrier | None = None) -> dict[str, str]:
    """Reserve the ids of a span, so children can be emitted first; empty when not recording.

    A root, or a child of ``parent``; ``record_span`` with ``identity`` emits it.
    """
    if _recorder is None:
        return {}
    return _carrier_of(providers.new_context(_span_context(_context(parent)) if parent else None))


def event(name: str, attributes: Attributes, *, carrier: Carrier | None = None, time_ns: int | None = None) -> None:
    """Emit an event inside the current span, or inside the span of ``carrier``. Byte values stay bytes on the wire."""
    recorder = _recorder
    if recorder is None:
        return
    began = time.perf_counter_ns()
    try:
        time_ns = time.time_ns() if time_ns is None else time_ns
        recorder.event(name, _context(carrier), time_ns, attributes, _step)
    except Exception:  # counted: an emit call never raises into training
        recorder.exporter.fault(name)
    recorder.exporter.spent(time.perf_counter_ns() - began)


def inject() -> dict[str, str]:
    """W3C carrier of the current span, to send along with a remote call; empty outside any span."""
    return _carrier_of(_span_context(None))


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
        self._span: sdk.Span | None = None
        self._token = None
        self._start_ns = self._began = 0

    def set(self, attributes: Attributes) -> None:
        """Add or replace attributes."""
        if self._span is None or self._recorder is None:
            self._attributes.update(attributes)
        else:
            self._span.set_attributes(self._recorder.encoder.plain(attributes))

    def carrier(self) -> dict[str, str]:
        """W3C carrier of this span; empty when not recording."""
        return {} if self._span is None else _carrier_of(self._span.get_span_context())

    def __enter__(self) -> Self:
        recorder = self._recorder
        if recorder is None:
            return self
        self._began = time.perf_counter_ns()
        self._start_ns = time.time_ns()
        try:
            span = recorder.tracer.start_span(
                self._name,
                NO_SPAN if self._root else _context(self._carrier),
                attributes=recorder.mark(recorder.encoder.plain(self._attributes), _step),
                links=_links(self._links),
                start_time=self._start_ns,
            )
            self._span = span = cast(sdk.Span, span)  # the sampler takes every one
            self._token = otel_context.attach(set_span_in_context(span))
            if self._announce:
                recorder.announce(span, _step)
        except Exception:  # counted: an emit call never raises into training
            recorder.exporter.fault(self._name)
        recorder.exporter.spent(time.perf_counter_ns() - self._began)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            otel_context.detach(self._token)
        recorder = self._recorder
        # A fork inside the block leaves this span to the parent process; a later setup leaves it to nobody.
        if recorder is None or recorder is not _recorder or self._span is None:
            return
        ended = time.perf_counter_ns()
        try:
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, recorder.encoder.describe(error)))
            # Elapsed time is monotonic: a wall clock set back must not give a negative duration.
            self._span.end(self._start_ns + ended - self._began)
        except Exception:  # counted: an emit call never raises into training
            recorder.exporter.fault(self._name)
        recorder.exporter.spent(time.perf_counter_ns() - ended)


class _Processor(SpanProcessor, LogRecordProcessor):
    """Hands what the providers produce to the recorder of the latest ``setup``; to nobody before and after it."""

    def on_start(self, span: sdk.Span, parent_context: Context | None = None) -> None:
        """Of any library, like the calls below; none of them may raise into it."""
        recorder = _recorder
        if recorder is not None:
            try:
                recorder.begin(span, _step)
            except Exception:  # counted: an emit call never raises into training
                recorder.exporter.fault(span.name)

    def on_end(self, span: ReadableSpan) -> None:
        """See ``on_start``."""
        recorder = _recorder
        if recorder is not None:
            try:
                recorder.end(span)
            except Exception:  # counted: an emit call never raises into training
                recorder.exporter.fault(span.name)

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """See ``on_start``."""
        recorder = _recorder
        if recorder is not None:
            try:
                recorder.log(log_record, _step)
            except Exception:  # counted: an emit call never raises into training
                recorder.exporter.fault(str(log_record.log_record.event_name))

    def shutdown(self) -> None:
        """Nothing: a library that shuts the global provider down does not end our recording."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """``flush``."""
        return flush(timeout_millis / 1000)


class _Attached:
    """Makes a remote span current."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._token = None

    def __enter__(self) -> None:
        remote = get_current_span(_context(self._carrier)) if self._carrier else None
        if remote is not None and remote.get_span_context().is_valid:
            self._token = otel_context.attach(set_span_in_context(remote))

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


def _context(carrier: Carrier | None) -> Context | None:
    """Where the span of ``carrier`` is current, or none if it is not W3C; None, the present context, without one."""
    return _remote(carrier.get("traceparent"), carrier.get("tracestate")) if carrier else None


@lru_cache(256)  # the items of a rollout come together, and name the same span
def _remote(traceparent: str | None, tracestate: str | None) -> Context:
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    return _w3c.extract({key: value for key, value in headers.items() if value is not None}, NO_SPAN)


def _span_context(context: Context | None) -> SpanContext | None:
    """The span that is current in ``context``, the present one if None."""
    current = get_current_span(context).get_span_context()
    return current if current.is_valid else None


def _links(carriers: Sequence[Carrier]) -> list[Link]:
    targets = [_span_context(_context(carrier)) for carrier in carriers if carrier]
    return [Link(target) for target in targets if target is not None]


def _carrier_of(context: SpanContext | None) -> dict[str, str]:
    if context is None:
        return {}
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    return carrier | {"tracestate": context.trace_state.to_header()} if context.trace_state else carrier


def _silence_forked_child() -> None:
    """Parent's threads do not exist here, and its spool and span ids are not ours."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.exporter.abandon()
        recorder.meters.abandon()
        system_metrics.stop()


def _at_exit() -> None:
    shutdown(EXIT_TIMEOUT_S)


os.register_at_fork(after_in_child=_silence_forked_child)
atexit.register(_at_exit)
