from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics import AlwaysOnExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
    use_span,
)

from rlinsight import names, otlp, points
from rlinsight.otlp import FLOAT_ARRAYS, NO_SPAN, SCOPE, Encoder, Event

TRACE, SPAN = 0x0123456789ABCDEF0123456789ABCDEF, 0x0123456789ABCDEF


def _item_of_every_kind() -> list[list]:
    """Spans, records and points with everything that OpenTelemetry's own encoder sends, from two scopes."""
    resource = Resource({"service.name": "s", "n": 1}, "https://schema")
    scopes = InstrumentationScope("a", "1", "https://x", {"k": 1}), InstrumentationScope("b")
    values = {"s": "é", "i": -(2**63), "f": 0.5, "b": True, "y": b"\0", "l": ("x", "y"), "n": [1, None, 2.0], "e": ()}
    remote = SpanContext(TRACE, SPAN - 1, is_remote=True, trace_state=TraceState([("v", "1")]))
    here = SpanContext(TRACE, SPAN, is_remote=False, trace_state=TraceState([("v", "1"), ("w", "2")]))
    spans = [
        ReadableSpan(
            name, here, parent, resource, BoundedAttributes(attributes=values), kind=kind, start_time=5, end_time=7,
            events=[SpanEvent("e", BoundedAttributes(attributes={"k": 1}), 6)], instrumentation_scope=scope,
            links=[Link(SpanContext(TRACE, 9, is_remote=True), values)], status=Status(StatusCode.ERROR, "why"),
        )
        for name, parent, kind, scope in (
            ("one", None, SpanKind.INTERNAL, scopes[0]),
            ("two", remote, SpanKind.CONSUMER, scopes[1]),
            ("three", here, SpanKind.CLIENT, scopes[0]),
        )
    ]  # fmt: skip
    context = set_span_in_context(NonRecordingSpan(here))
    records = [
        ReadableLogRecord(LogRecord(**facts), resource, scope)
        for scope, facts in (
            (scopes[0], {"timestamp": 1, "attributes": values, "event_name": "e", "context": context}),
            (scopes[1], {"observed_timestamp": 2, "body": {"a": [1, {"b": None}]}, "context": NO_SPAN}),
            (None, {"body": "text", "severity_number": SeverityNumber.WARN, "severity_text": "W", "context": NO_SPAN}),
        )
    ]
    reader = InMemoryMetricReader()
    exponential = View(instrument_name="exponential", aggregation=ExponentialBucketHistogramAggregation())
    meters = MeterProvider([reader], resource, exemplar_filter=AlwaysOnExemplarFilter(), views=[exponential])
    for name in "ab":
        meter = meters.get_meter(name, "1", "https://x")
        with use_span(NonRecordingSpan(here)):
            for name, kind in (("n", int), ("x", float)):
                meter.create_counter(f"counter.{name}", "{x}", "a counter").add(kind(3), {"k": "v"})
                meter.create_up_down_counter(f"sum.{name}").add(kind(-3))
                meter.create_gauge(f"gauge.{name}").set(kind(7), {"k": name})
            for value in (-1.0, 0.0, 0.5, 1000.0):
                meter.create_histogram("explicit", "s").record(value, {"k": "v"})
                meter.create_histogram("exponential").record(value)
    data = reader.get_metrics_data()
    assert data is not None
    return [spans, records, list(points.split(data)), [data]]


def test_what_is_sent_is_what_opentelemetrys_own_encoder_would_send() -> None:
    """Every field of spans, records and all kinds of points, but for messages that are there and empty."""
    spans, records, measured, (data,) = _item_of_every_kind()
    encoder = Encoder(spans[0].resource)
    for items, twin in (
        (spans, encode_spans(spans)),
        (records, encode_logs(records)),
        (measured, encode_metrics(data)),
    ):
        assert _present(type(twin).FromString(encoder.encode(items))) == _present(twin)


def test_an_event_of_ours_is_sent_as_the_record_the_sdk_would_make_of_it() -> None:
    """In a span, in a remote one and in none; beside records of other libraries in one request."""
    here = SpanContext(TRACE, SPAN, is_remote=False, trace_flags=TraceFlags(1))
    remote = SpanContext(TRACE, SPAN - 1, is_remote=True)
    values = {"s": "é", "i": -(2**63), "f": 0.5, "b": True, "y": b"\0", "l": ["x", "y"], "n": np.float32(0.5), "e": []}
    resource = Resource({"service.name": "s"})
    encoder = Encoder(resource)
    events, records = [], []
    for index, context in enumerate((here, remote, INVALID_SPAN_CONTEXT)):
        facts = {"timestamp": index, "observed_timestamp": index, "event_name": "e"}
        inside = set_span_in_context(NonRecordingSpan(context))
        events.append(Event("e", index, context, encoder.plain(values)))
        records.append(
            ReadableLogRecord(LogRecord(**facts, context=inside, attributes=values | {"n": 0.5}), resource, SCOPE)
        )
    twin = encode_logs([*records, *records])
    assert _present(type(twin).FromString(encoder.encode([*events, *records]))) == _present(twin)


def test_what_is_changed_after_the_call_is_sent_as_it_was() -> None:
    """An event takes its lists and arrays with it."""
    pieces, array = ["a", "b"], bytearray(b"12")
    event = Encoder(Resource({})).record("e", 1, {"pieces": pieces, "array": array})  # type: ignore[dict-item]
    pieces.append("c")
    array[0] = 0
    assert event.attributes == {"pieces": ("a", "b"), "array": b"12"}


@pytest.mark.parametrize("wrap", [dict, lambda attributes: BoundedAttributes(attributes=attributes)])
def test_the_size_of_an_item_is_its_texts_and_a_constant_per_value(wrap: Callable[[dict], Any]) -> None:
    """Of our events, of records and of spans: 3 characters, 2 bytes, a number, and a list of 4 characters in two."""
    attributes = wrap({"t": "abc", "y": b"12", "n": 1.5, "l": ("ab", "cd")})
    expected = 5 * otlp.VALUE_BYTES + 3 + 2 + 4
    assert otlp.size(Event("e", 1, INVALID_SPAN_CONTEXT, dict(attributes))) == otlp.RECORD_BYTES + expected
    record = LogRecord(attributes=attributes, context=NO_SPAN, body="")
    assert otlp.size(ReadableLogRecord(record, Resource({}))) == otlp.RECORD_BYTES + expected + otlp.VALUE_BYTES
    assert otlp.size(ReadableSpan("s", attributes=attributes)) == otlp.SPAN_BYTES + expected


def _present(message: Any) -> Any:
    """A message as what is set in it."""
    fields = {}
    for field, value in message.ListFields():
        if field.message_type is None:
            fields[field.name] = value if not hasattr(value, "append") else list(value)
        elif field.name == "array_value" or hasattr(value, "append") or _present(value):
            fields[field.name] = list(map(_present, value)) if hasattr(value, "append") else _present(value)
    return fields


ODD = np.array([-0.123456789, 0.0, -0.0, np.nan, -np.inf, -17.000004, 3.000004], "<f4")


def _sent(decimals: int | None, attributes: dict) -> dict[str, bytes]:
    encoder = Encoder(Resource({}), token_decimals=decimals)
    payload = encoder.encode([encoder.record(names.ROLLOUT_TRAINED, 1, attributes)])
    (record,) = ExportLogsServiceRequest.FromString(payload).resource_logs[0].scope_logs[0].log_records
    return {pair.key: pair.value.bytes_value for pair in record.attributes}


@pytest.mark.parametrize("key", sorted(FLOAT_ARRAYS))
def test_floating_arrays_are_rounded_to_the_decimals_asked_for(key):
    """The float32 nearest to the rounded value is sent; NaN, infinities and signed zeros stay; None sends every bit."""
    rounded = np.frombuffer(_sent(5, {key: ODD.tobytes()})[key], "<f4")
    assert rounded.tobytes() == np.array([-0.12346, 0, -0.0, np.nan, -np.inf, -17.0, 3.0], "<f4").tobytes()
    assert _sent(None, {key: ODD.tobytes()})[key] == ODD.tobytes()


def test_rounding_leaves_everything_else_alone():
    """Ids, masks and an array that is cut off are not numbers to round."""
    attributes = {names.TOKEN_IDS: ODD.tobytes(), names.CLIPPED_ARRAY: b"\1\0", names.ENTROPY_ARRAY: b"12345"}
    assert _sent(5, attributes) == attributes


def test_equal_log_probs_stay_equal_and_unequal_ones_differ_by_the_rounding_at_most():
    """What two engines agree on bit for bit agrees after rounding too; no value moves by more than half a unit."""
    values = np.random.default_rng(0).gamma(0.5, 2, 10_000).astype("<f4") * np.float32(-1)
    one = _sent(5, {names.OLD_LOG_PROBS_ARRAY: values.tobytes(), names.ROLLOUT_LOG_PROBS: values.tobytes()})
    assert one[names.OLD_LOG_PROBS_ARRAY] == one[names.ROLLOUT_LOG_PROBS]
    moved = np.abs(np.frombuffer(one[names.ROLLOUT_LOG_PROBS], "<f4").astype(np.float64) - values)
    assert moved.max() < 0.5e-5 + 1e-6  # half a unit, and the step between float32 numbers near -16


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_encoding_leaves_the_free_memory_of_the_process_to_training() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(100_000) for _ in range(1000)]  # below what malloc takes from the system one by one
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for index, block in enumerate(blocks):
        if index % 10:  # the others keep the free ones from the end of the heap
            libc.free(block)
    process = psutil.Process()
    before = process.memory_info().rss
    # Of what a run sends most: more than the 10,000 arenas after which protobuf would call malloc_trim.
    attributes = {f"key.{index}": value for index, value in enumerate([1, 2.0, "text", b"bytes", True, ["a", "b"]] * 2)}
    event = Event("event", 1, SpanContext(1, 2, is_remote=False), attributes)
    span = ReadableSpan("span", SpanContext(1, 2, is_remote=False), attributes=attributes, instrumentation_scope=SCOPE)
    encoder = Encoder(Resource({}))
    for item in (event, span):
        encoder.encode([item] * 5000)
    kept = process.memory_info().rss - before
    for block in blocks[::10]:
        libc.free(block)
    assert kept > -20_000_000
