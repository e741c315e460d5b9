"""The OpenTelemetry SDK of this process: a tracer, a logger and a meter provider, global, so any library uses them.

What environment variables could turn off or cut short is fixed here. Does not own what becomes of finished spans and
records (the processors of telemetry.py) nor what is measured (meters.py).
"""

from __future__ import annotations

import os
import random
import secrets
from dataclasses import dataclass

from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk._logs import LoggerProvider, LogRecordLimits, LogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider, TraceBasedExemplarFilter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext, TraceFlags, Tracer

from rlinsight.otlp import SCOPE

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where our own spans come from, and everybody's measurements."""

    tracer: Tracer
    meters: tuple[MeterProvider, ...]  # ours, and the program's own if it has made one global


class Ids(IdGenerator):
    """Ids from a generator of its own, seeded by the operating system in every process, forked ones too.

    The SDK's ids come from the global generator, which training seeds alike in every worker. Asking the operating
    system for each id costs up to 20 us, as much as the rest of a span.
    """

    def __init__(self) -> None:
        self._random = random.Random(secrets.randbits(128))
        os.register_at_fork(after_in_child=lambda: self._random.seed(secrets.randbits(128)))

    def generate_trace_id(self) -> int:
        """128 bits, not 0."""
        return self._random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """64 bits, not 0."""
        return self._random.getrandbits(64) or 1


IDS = Ids()


def new_context(parent: SpanContext | None) -> SpanContext:
    """Fresh ids, in the parent's trace if there is one."""
    trace_id = IDS.generate_trace_id() if parent is None else parent.trace_id
    return SpanContext(trace_id, IDS.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)


def install(spans: SpanProcessor, records: LogRecordProcessor, resource: Resource) -> Sources:
    """Create the providers, feed them to the processors and make them global; to be called once per process.

    Where the program has made an SDK provider global already, that one feeds the processors too.
    """
    tracers, loggers, meters = _tracer_provider(resource), _logger_provider(resource), _meter_provider(resource)
    tracers.add_span_processor(spans)
    loggers.add_log_record_processor(records)
    others, other_loggers = trace.get_tracer_provider(), _logs.get_logger_provider()
    if isinstance(others, TracerProvider):
        others.add_span_processor(spans)
    else:
        trace.set_tracer_provider(tracers)
    if isinstance(other_loggers, LoggerProvider):
        other_loggers.add_log_record_processor(records)
    else:
        _logs.set_logger_provider(loggers)
    other_meters = metrics.get_meter_provider()
    if not isinstance(other_meters, MeterProvider):
        metrics.set_meter_provider(meters)
    return Sources(
        tracers.get_tracer(SCOPE.name, SCOPE.version, SCOPE.schema_url),
        (meters, other_meters) if isinstance(other_meters, MeterProvider) else (meters,),
    )


class _MeterProvider(MeterProvider):
    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Nothing: a library that shuts the global provider down does not end our recording."""


def _meter_provider(resource: Resource) -> MeterProvider:
    provider = _MeterProvider(resource=resource, exemplar_filter=TraceBasedExemplarFilter(), shutdown_on_exit=False)
    provider._disabled = False  # as for the others
    return provider


def _tracer_provider(resource: Resource) -> TracerProvider:
    unlimited = SpanLimits(
        max_attributes=SpanLimits.UNSET,
        max_events=SpanLimits.UNSET,
        max_links=SpanLimits.UNSET,
        max_span_attributes=SpanLimits.UNSET,
        max_event_attributes=SpanLimits.UNSET,
        max_link_attributes=SpanLimits.UNSET,
        max_attribute_length=SpanLimits.UNSET,
        max_span_attribute_length=SpanLimits.UNSET,
    )
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, id_generator=IDS, span_limits=unlimited
    )
    provider._disabled = False  # OTEL_SDK_DISABLED has no argument that overrides it
    return provider


def _logger_provider(resource: Resource) -> LoggerProvider:
    unlimited = LogRecordLimits(
        max_attributes=LogRecordLimits.UNSET,
        max_attribute_length=LogRecordLimits.UNSET,
        max_log_record_attributes=LogRecordLimits.UNSET,
        max_log_record_attribute_length=LogRecordLimits.UNSET,
    )
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False, log_record_limits=unlimited)
    provider._disabled = False  # as above
    return provider
