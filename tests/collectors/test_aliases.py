"""Other spellings fill the columns of the known ones, and what was sent stays readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint

from collectors import aliases
from collectors.decode import Decoded, Decoder
from rlinsight import names, schema

CON = duckdb.connect()
schema.apply(CON, Path(":memory:"))
COLUMNS = schema.columns(CON)
DECODER = Decoder(COLUMNS)

ATTRIBUTES = {  # sent as: known as, the column of serving_requests, a value
    "gen_ai.usage.prompt_tokens": (names.INPUT_TOKENS, "prompt_tokens", 7),
    "gen_ai.usage.completion_tokens": (names.OUTPUT_TOKENS, "output_tokens", 7),
    "gen_ai.request.id": (names.REQUEST_ID, "request_id", "q"),
    "llm.token_count.prompt": (names.INPUT_TOKENS, "prompt_tokens", 7),
    "llm.token_count.completion": (names.OUTPUT_TOKENS, "output_tokens", 7),
}
METRICS = {
    "ray_vllm_num_requests_running": "vllm:num_requests_running",
    "ray_vllm:num_requests_running": "vllm:num_requests_running",
    "vllm:num_requests_running": "vllm:num_requests_running",
    "my_ray_vllm_requests": "my_ray_vllm_requests",
}


def _row(decoded: Decoded, table: str) -> dict[str, Any]:
    ((row),) = decoded.rows[table]
    return dict(zip(COLUMNS[table], row, strict=True))


def _request(sent: dict[str, Any]) -> Decoded:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key=names.RUN_ID).value.string_value = "run"
    span = resource_spans.scope_spans.add().spans.add(
        trace_id=b"t" * 16, span_id=b"s" * 8, name=names.ENGINE_REQUEST, start_time_unix_nano=1, end_time_unix_nano=2
    )
    for key, value in sent.items():
        kind = "string_value" if isinstance(value, str) else "int_value"
        setattr(span.attributes.add(key=key).value, kind, value)
    return DECODER.traces(request, "b", 7)


def test_every_other_spelling_is_tested():
    """The table has these and no more."""
    assert dict(aliases.ATTRIBUTES) == {sent: known for sent, (known, _, _) in ATTRIBUTES.items()}


@pytest.mark.parametrize("sent", ATTRIBUTES)
def test_an_attribute_fills_the_column_of_its_known_spelling(sent):
    """The raw row has it as it was sent; beside the known one it counts for nothing."""
    known, column, value = ATTRIBUTES[sent]
    alone = _request({sent: value})
    assert _row(alone, "serving_requests")[column] == value
    assert json.loads(_row(alone, "otel_spans")["span_attributes"]) == {sent: value}
    other = value * 2
    for both in ({sent: value, known: other}, {known: other, sent: value}):
        assert _row(_request(both), "serving_requests")[column] == other


@pytest.mark.parametrize("sent", METRICS)
def test_a_metric_has_its_known_name_and_keeps_the_one_sent(sent):
    """A prefix in the middle is none; a name without another spelling is not kept twice."""
    request = ExportMetricsServiceRequest()
    point = NumberDataPoint(time_unix_nano=1, as_double=2.0)
    metric = Metric(name=sent, gauge=Gauge(data_points=[point]))
    request.resource_metrics.add().scope_metrics.add().metrics.append(metric)
    row = _row(DECODER.metrics(request, "b", 7), "otel_metrics")
    known = METRICS[sent]
    assert (row["name"], row["sent_name"]) == (known, sent if sent != known else None)
