from __future__ import annotations

import base64
import gzip
import json
import zlib
from pathlib import Path

import duckdb
import numpy as np
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from collectors import arrow
from collectors.decode import Decoded, Decoder
from collectors.payload import JSON, MAX_BODY_BYTES, PROTOBUF, PayloadError, decompress, parse
from collectors.projections import PROJECTIONS
from collectors.values import BadValue, coercion, to_json
from rlinsight import names, schema
from tests.synthetic import Run, requests

CON = duckdb.connect()
schema.apply(CON, Path(":memory:"))
COLUMNS = schema.columns(CON)
DECODER = Decoder(COLUMNS)
RICH = Run(
    steps=8,
    failed_rollouts=1,
    replicas=2,
    serving=True,
    ppo=True,
    faults=("stale_engine", "sync_failed", "rollout_error", "request_error", "tool_error", "dropped_group"),
)


def _attributes(values: dict) -> list[KeyValue]:
    def wrap(value):
        if isinstance(value, list):
            return AnyValue(array_value=ArrayValue(values=[wrap(item) for item in value]))
        kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value", bytes: "bytes_value"}
        return AnyValue(**{kinds[type(value)]: value})

    return [KeyValue(key=key, value=wrap(value)) for key, value in values.items()]


def _event(name: str, attributes: dict, resource: dict | None = None, **record) -> Decoded:
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    logs.resource.attributes.extend(_attributes({names.RUN_ID: "r"} if resource is None else resource))
    logs.scope_logs.add().log_records.add(
        event_name=name, time_unix_nano=5, attributes=_attributes(attributes), **record
    )
    return DECODER.logs(request, "b", 7)


def _span(name: str, attributes: dict, **fields) -> Decoded:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add()
    spans.resource.attributes.extend(_attributes({names.RUN_ID: "r"}))
    facts = {
        "trace_id": b"t" * 16,
        "span_id": b"s" * 8,
        "start_time_unix_nano": 1,
        "end_time_unix_nano": 2,
        "attributes": _attributes(attributes),
    }
    spans.scope_spans.add().spans.add(name=name, **(facts | fields))
    return DECODER.traces(request, "b", 7)


def _only(decoded: Decoded, table: str) -> dict:
    (row,) = decoded.rows[table]
    return dict(zip(COLUMNS[table], row, strict=True))


def test_every_domain_column_is_filled_by_some_item_of_a_run():
    """No column of a domain table stays NULL over a whole synthetic run: each is reached by a projection or a fact."""
    filled: dict[str, set[str]] = {}
    for request in requests(RICH):
        decoded = getattr(DECODER, request.signal)(request.message, "b", 1)
        assert decoded.rejected == 0, decoded.problem
        for table, rows in decoded.rows.items():
            for row in rows:
                filled.setdefault(table, set()).update(
                    column for column, value in zip(COLUMNS[table], row, strict=True) if value is not None
                )
    domain = {projection.table for projection in PROJECTIONS}
    empty = {f"{table}.{column}" for table in domain for column in COLUMNS[table] if column not in filled[table]}
    assert not empty


def test_token_arrays_arrive_bit_for_bit():
    """Bytes attributes become list columns with the same bits, NaN and negative zero included."""
    floats = np.array([0.1, -0.0, np.nan, np.inf, 1e-42], "<f4")
    decoded = _event(
        names.ROLLOUT_TRAINED,
        {
            names.ROLLOUT_ID: "x",
            names.TURN_INDEX: 0,
            names.OLD_LOG_PROBS_ARRAY: floats.tobytes(),
            names.LOSS_MASK: bytes([1, 0, 1, 1, 0]),
        },
    )
    table = arrow.table(decoded.rows["rollout_training"], COLUMNS["rollout_training"])
    assert table["old_log_probs"].combine_chunks().values.to_numpy().tobytes() == floats.tobytes()
    assert table["loss_mask"][0].as_py() == [True, False, True, True, False]
    assert table["entropy"][0].as_py() is None
    raw = json.loads(_only(decoded, "otel_logs")["log_attributes"])
    assert raw[names.OLD_LOG_PROBS_ARRAY] == {"bytes": 20}


def test_arrays_of_numbers_fill_list_columns_too():
    """A sender without byte attributes may send arrays; values that do not fit are refused, never cut."""
    assert coercion("INTEGER[]")([1, 2]) == np.array([1, 2], "<i4").tobytes()
    assert coercion("FLOAT[]")([0.5, 1]) == np.array([0.5, 1], "<f4").tobytes()
    for bad in ([1.5], [2**40], ["a"], [[1]], "text"):
        with pytest.raises(BadValue):
            coercion("INTEGER[]")(bad)


@pytest.mark.parametrize(
    ("name", "attributes", "table"),
    [
        (names.ROLLOUT_TRAINED, {names.OLD_LOG_PROBS_ARRAY: b"12345"}, "rollout_training"),
        (names.ROLLOUT_TRAINED, {names.LOSS_MASK: b"123", names.ENTROPY_ARRAY: b"12345678"}, "rollout_training"),
        (names.ROLLOUT_SCORED, {names.REWARD_VALUE: "high"}, "rollout_scores"),
        (names.ROLLOUT_SCORED, {names.STEP_INDEX: "third"}, "rollout_scores"),
        (names.RUN_START, {names.CONFIG: "{not json"}, "run_starts"),
        (names.STEP_METRIC, {names.METRIC_VALUE: True}, "step_metrics"),
        (names.GROUP, {names.GROUP_SIZE: 2**40}, "group_prompts"),
        (names.TURN_CONTENT, {names.TOKEN_PIECES: [1, 2]}, "token_runs"),
        (names.TURN_CONTENT, {names.TOKEN_PIECES: ["a"], names.TOKEN_IDS: b"12345678"}, "token_runs"),
    ],
)
def test_a_value_that_does_not_fit_costs_the_domain_row_only(name, attributes, table):
    """The raw row is kept, no domain row is made, and the item is counted as rejected with its attribute named."""
    decoded = _event(name, attributes)
    assert decoded.rejected == 1
    assert decoded.problem
    assert len(decoded.rows["otel_logs"]) == 1
    assert table not in decoded.rows


def test_numbers_as_text_are_numbers():
    """Resource attributes from the environment are always text; rank, attempt and step still become integers."""
    decoded = _event(
        names.STEP_METRIC,
        {names.STEP_INDEX: "3", names.METRIC_NAME: "m", names.METRIC_VALUE: 1},
        {names.RUN_ID: "r", names.RANK: "2", names.ATTEMPT: "4"},
    )
    row = _only(decoded, "otel_logs")
    assert (row["rank"], row["attempt"], row["step"]) == (2, 4, 3)
    assert _only(decoded, "step_metrics")["value"] == 1.0


def test_items_of_no_run_stay_raw():
    """A foreign sender's rl.loop span without rl.run.id is stored, but makes no domain row."""
    decoded = _event(names.STEP_METRIC, {names.METRIC_NAME: "m"}, {})
    assert set(decoded.rows) == {"otel_logs"}
    assert decoded.rejected == 0


def test_a_check_of_a_model_is_of_no_run():
    """Its table has no run_id, so its event becomes a row without one; the model is the sender's."""
    decoded = _event(names.MODEL_CHECK, {names.CHECK_ID: "c", names.CHECK_PARITY: 1}, {names.MODEL: "tiny"})
    row = _only(decoded, "model_checks")
    assert (row["check_id"], row["model"], row["parity"], row["part"]) == ("c", "tiny", 1.0, None)


def test_one_span_can_be_a_row_of_two_tables():
    """A weight sync that is also a phase of the step fills both tables."""
    decoded = _span(names.WEIGHT_SYNC, {names.PHASE: "sync", names.ENGINE: "native", names.STEP_INDEX: 1})
    assert set(decoded.rows) == {"otel_spans", "phases", "weight_syncs"}


def test_a_turn_is_recognised_with_its_model_in_the_name():
    """GenAI names the span "chat {model}"; the list of finish reasons becomes its text."""
    decoded = _span("chat some/model", {names.ROLLOUT_ID: "x", names.FINISH_REASONS: ["stop"]})
    assert _only(decoded, "turns")["finish_reason"] == "stop"
    assert "turns" not in _span("chatter", {}).rows


@pytest.mark.parametrize(
    "fields",
    [
        {"trace_id": b""},
        {"span_id": b"short"},
        {"start_time_unix_nano": 0},
        {"end_time_unix_nano": 2**63},
    ],
)
def test_a_span_without_ids_or_times_is_rejected_whole(fields):
    """Spans that cannot be placed are counted, not stored."""
    decoded = _span("x", {}, **fields)
    assert (decoded.rejected, decoded.rows) == (1, {})


def test_ids_are_lower_case_hex_and_unset_is_null():
    """Ids read as OTLP tools print them; a root has no parent; empty texts are NULL."""
    row = _only(_span("x", {}, trace_id=b"\xab" * 16, span_id=b"\xcd" * 8), "otel_spans")
    assert row["trace_id"] == "ab" * 16
    assert row["span_id"] == "cd" * 8
    assert row["parent_span_id"] is None
    assert row["status_message"] is None


def test_any_value_becomes_valid_json():
    """NaN, infinity, bytes, nesting and control characters never make the store refuse a raw row."""
    nested = AnyValue(kvlist_value=KeyValueList(values=_attributes({"a": [1, float("nan")], "b": b"xy"})))
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(body=nested)
    record.attributes.extend(_attributes({"inf": float("inf"), "control": 'a\x00b"\n', "empty": []}))
    row = _only(DECODER.logs(request, "b", 1), "otel_logs")
    assert json.loads(row["body"]) == {"a": [1, "nan"], "b": {"base64": "eHk="}}
    kept = json.loads(row["log_attributes"])
    assert kept == {"inf": "inf", "control": 'a\x00b"\n', "empty": []}
    assert CON.execute("SELECT ?::JSON ->> '$.control'", [row["log_attributes"]]).fetchone() == ('a\x00b"\n',)
    assert to_json({"é": "ü"}) == '{"é":"ü"}'


def test_metric_points_of_every_kind_become_rows():
    """Gauge, sum, histogram, exponential histogram and summary points all land with their numbers."""
    points = {
        "gauge": {"gauge": {"dataPoints": [{"timeUnixNano": "5", "asInt": "3"}]}},
        "sum": {"sum": {"aggregationTemporality": 2, "isMonotonic": True, "dataPoints": [{"asDouble": 1.5}]}},
        "histogram": {
            "histogram": {
                "aggregationTemporality": 1,
                "dataPoints": [{"count": "3", "sum": 6.0, "explicitBounds": [1, 2], "bucketCounts": ["1", "1", "1"]}],
            }
        },
        "exponential_histogram": {"exponentialHistogram": {"dataPoints": [{"count": "1", "scale": 2}]}},
        "summary": {"summary": {"dataPoints": [{"count": "2", "sum": 3, "quantileValues": [{"quantile": 0.5}]}]}},
    }
    metrics = [{"name": name, "unit": "1", **data} for name, data in points.items()]
    body = json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}).encode()
    decoded = DECODER.metrics(parse("metrics", body, JSON), "b", 1)
    rows = [dict(zip(COLUMNS["otel_metrics"], row, strict=True)) for row in decoded.rows["otel_metrics"]]
    by_kind = {row["kind"]: row for row in rows}
    assert set(by_kind) == set(points)
    assert by_kind["gauge"]["value"] == 3.0
    assert (by_kind["sum"]["temporality"], by_kind["sum"]["is_monotonic"]) == ("cumulative", True)
    assert by_kind["histogram"]["bucket_counts"] == [1, 1, 1]
    assert by_kind["histogram"]["min"] is None
    assert json.loads(by_kind["exponential_histogram"]["detail"])["scale"] == 2
    assert arrow.table(decoded.rows["otel_metrics"], COLUMNS["otel_metrics"]).num_rows == 5


def test_json_and_protobuf_decode_to_the_same_rows():
    """OTLP/JSON with hex ids, camel case and base64 bytes means what protobuf means."""
    span = {
        "traceId": "AB" * 16,
        "spanId": "cd" * 8,
        "name": "rl.loop",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": 2,
        "attributes": [{"key": "k", "value": {"bytesValue": base64.b64encode(b"xyz").decode()}}],
        "links": [{"traceId": "01" * 16, "spanId": "02" * 8}],
        "somethingNew": 1,
    }
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    request = parse("traces", body, JSON)
    again = parse("traces", request.SerializeToString(), PROTOBUF)
    rows = DECODER.traces(request, "b", 1).rows
    assert rows == DECODER.traces(again, "b", 1).rows
    row = dict(zip(COLUMNS["otel_spans"], rows["otel_spans"][0], strict=True))
    assert row["trace_id"] == "ab" * 16
    assert json.loads(row["links"])[0]["span_id"] == "02" * 8


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\xff\xff\xff", PROTOBUF),
        (b'{"resourceSpans": 3}', JSON),
        (b"{", JSON),
        (b"[]", JSON),
        (b"null", JSON),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xyz"}]}]}]}', JSON),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"\\ud800"}]}]}]}', JSON),
        (b"[" * 100_000, JSON),
        (b"\xff", JSON),
    ],
)
def test_malformed_bodies_are_refused_as_400(body, content_type):
    """Whatever is wrong with a body, the answer is 400 with a reason, not a crash."""
    with pytest.raises(PayloadError) as caught:
        parse("traces", body, content_type)
    assert caught.value.status == 400


def test_a_decompression_bomb_is_cut_at_the_limit():
    """A small gzip body that inflates past the limit is 413; a torn or wrong one 400; an unknown encoding 415."""
    bomb = gzip.compress(b"\0" * (MAX_BODY_BYTES + 1))
    assert len(bomb) < 100_000
    cases = [(bomb, "gzip", 413), (bomb[:50], "gzip", 400), (b"no gzip", "gzip", 400), (b"", "gzip", 400)]
    for body, encoding, status in [*cases, (b"x", "br", 415)]:
        with pytest.raises(PayloadError) as caught:
            decompress(body, encoding)
        assert caught.value.status == status, (encoding, status)
    assert decompress(gzip.compress(b"data"), "gzip") == decompress(zlib.compress(b"data"), "deflate") == b"data"
