"""Spans and events of serving, tools and validation become rows, also under the names others give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from collectors.decode import Decoded, Decoder
from rlinsight import names, schema

CON = duckdb.connect()
schema.apply(CON, Path(":memory:"))
COLUMNS = schema.columns(CON)


def _span(name: str, attributes: dict[str, Any]) -> Decoded:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add()
    spans.resource.attributes.append(KeyValue(key=names.RUN_ID, value=AnyValue(string_value="r")))
    span = spans.scope_spans.add().spans.add(name=name, trace_id=b"t" * 16, span_id=b"s" * 8, parent_span_id=b"p" * 8)
    span.start_time_unix_nano, span.end_time_unix_nano = 1, 2
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    for key, value in attributes.items():
        span.attributes.append(KeyValue(key=key, value=AnyValue(**{kinds[type(value)]: value})))
    return Decoder(COLUMNS).traces(request, "b", 7)


def _row(decoded: Decoded, table: str) -> dict[str, Any]:
    ((row),) = decoded.rows[table]
    return dict(zip(COLUMNS[table], row, strict=True))


def test_vllms_own_span_is_a_serving_request():
    """Its attribute names fill the same columns as ours; what it does not send is NULL."""
    sent = {
        "gen_ai.request.id": "req-1",
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_in_model_prefill": 0.125,
        "gen_ai.latency.time_in_model_decode": 1.5,
    }
    row = _row(_span("llm_request", sent), "serving_requests")
    known = {key: row[key] for key in ("request_id", "prompt_tokens", "output_tokens", "max_tokens", "parent_span_id")}
    assert known == {
        "request_id": "req-1",
        "prompt_tokens": 7,
        "output_tokens": 5,
        "max_tokens": 16,
        "parent_span_id": (b"p" * 8).hex(),
    }
    assert [row[key] for key in ("queue_s", "ttft_s", "e2e_s", "prefill_s", "decode_s")] == [0.25, 0.5, 2.0, 0.125, 1.5]
    assert row["num_preemptions"] is row["aborted"] is row["finish_reason"] is None


@pytest.mark.parametrize(("value", "stored"), [(True, True), (False, False), (1, True), (0, False)])
def test_a_flag_is_true_or_false(value, stored):
    """Booleans, and the 0 and 1 of senders without them."""
    assert _row(_span(names.ENGINE_REQUEST, {names.ABORTED: value}), "serving_requests")["aborted"] is stored


@pytest.mark.parametrize("value", ["yes", 2, 0.5])
def test_what_is_no_flag_is_rejected(value):
    """The raw row stays, the domain row does not come about, and the problem names the attribute."""
    decoded = _span(names.ENGINE_REQUEST, {names.ABORTED: value})
    assert decoded.rejected == 1
    assert "rlinsight.request.aborted" in (decoded.problem or "")
    assert set(decoded.rows) == {"otel_spans"}


def test_a_tool_span_is_named_after_its_tool():
    """execute_tool {tool}: the first word decides the table."""
    row = _row(_span("execute_tool calculator", {names.TOOL_NAME: "calculator"}), "tool_calls")
    assert (row["tool"], row["error_type"]) == ("calculator", None)
