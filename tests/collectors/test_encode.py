"""Raw rows become the requests they came from again; decoding those gives the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from collectors import arrow, encode
from collectors.decode import Decoded, Decoder
from collectors.encode_values import from_json, pairs
from collectors.values import attributes, to_json
from rlinsight import names, schema
from tests.collectors.test_otlp_fields import METRIC_KINDS, REQUESTS, Filler
from tests.synthetic import Run, requests


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    schema.apply(connection, Path(":memory:"))
    return connection


def _store(con: duckdb.DuckDBPyConnection, decoded: Decoded) -> None:
    columns = schema.columns(con)
    for table, rows in decoded.rows.items():
        con.register("incoming", arrow.table(rows, columns[table]))
        con.execute(f"INSERT INTO {table} SELECT * FROM incoming")


def _encoded(con: duckdb.DuckDBPyConnection, signal: Any, batch_id: str = "batch") -> Message:
    lists = encode.Lists(schema.columns(con))
    order = "r.item" if signal == "logs" else "r.rowid"
    sql = f"{encode.select(signal, lists)} WHERE r.batch_id = ? ORDER BY {order}"
    rows = [row for batch in con.execute(sql, [batch_id]).to_arrow_reader(7) for row in encode.rows(batch)]
    if signal == "logs":
        assert not any(encode.is_incomplete(row, lists) for row in rows)
        return encode.logs(rows, lists)
    return encode.traces(rows) if signal == "traces" else encode.metrics(rows)


def _spelled_out(request: Any) -> Message:
    """The request with empty resources and scopes written out, as encoding does."""
    for of_resource in (item for _, items in request.ListFields() for item in items):
        of_resource.resource.SetInParent()
        for field, of_scope in of_resource.ListFields():
            for scope in of_scope if field.name.startswith("scope_") else ():
                scope.scope.SetInParent()
    return request


@pytest.mark.parametrize(
    ("signal", "kind"), [("traces", ""), ("logs", ""), *(("metrics", kind) for kind in METRIC_KINDS)]
)
def test_a_request_with_every_field_set_comes_back_whole(con, signal, kind):
    """Every field of the three signals' messages, with the value it had."""
    request = Filler(kind).fill(REQUESTS[signal]())
    _store(con, getattr(Decoder(schema.columns(con)), signal)(request, "batch", 1))
    assert _encoded(con, signal) == request


def test_the_requests_of_a_run_come_back_whole(con):
    """Spans, events with their token arrays to the bit, and metrics, each request of a synthetic run."""
    decoder = Decoder(schema.columns(con))
    sent = list(requests(Run(steps=2, groups=2)))
    for number, request in enumerate(sent):
        _store(con, getattr(decoder, request.signal)(request.message, str(number), 1))
    for number, request in enumerate(sent):
        assert _encoded(con, request.signal, str(number)) == _spelled_out(request.message)
    assert len(sent) > 5


def test_an_integer_point_and_an_empty_one_stay_what_they_are(con):
    """as_int beyond 2**53, no value at all, and a sum that is not monotonic."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="bytes")
    metric.sum.data_points.add(as_int=2**53 + 1, time_unix_nano=5)
    metric.sum.data_points.add(time_unix_nano=6)
    _store(con, Decoder(schema.columns(con)).metrics(request, "batch", 1))
    assert _encoded(con, "metrics") == _spelled_out(request)


def test_arrays_sent_as_lists_come_back_as_lists(con):
    """A sender without byte attributes gets its own spelling back, and texts stay texts."""
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    logs.resource.attributes.add(key=names.RUN_ID).value.string_value = "r"
    record = logs.scope_logs.add().log_records.add(event_name=names.TURN_CONTENT, time_unix_nano=5)
    for key, field, values in (
        (names.TOKEN_IDS, "int_value", [1, 2]),
        (names.TOKEN_PIECES, "string_value", ["a", "b"]),
        (names.ROLLOUT_LOG_PROBS, "double_value", [-0.5, -1.25]),
    ):
        array = record.attributes.add(key=key).value.array_value
        for value in values:
            setattr(array.values.add(), field, value)
    _store(con, Decoder(schema.columns(con)).logs(request, "batch", 1))
    assert _encoded(con, "logs") == _spelled_out(request)


def test_a_record_whose_arrays_are_gone_is_told(con):
    """Without its token row a record comes back without the arrays, and counts as incomplete."""
    request = next(
        request
        for request in requests(Run(steps=1))
        if request.producer.startswith("policy") and request.signal == "logs" and request.message.resource_logs
    )
    _store(con, Decoder(schema.columns(con)).logs(request.message, "batch", 1))
    con.execute("DELETE FROM token_runs WHERE item = (SELECT min(item) FROM token_runs)")
    lists = encode.Lists(schema.columns(con))
    reader = con.execute(encode.select("logs", lists)).to_arrow_reader()
    rows = [row for batch in reader for row in encode.rows(batch)]
    assert sum(encode.is_incomplete(row, lists) for row in rows) == 1
    assert encode.logs(rows, lists)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON_LIKE, max_size=4))
def test_any_attributes_stand_in_the_raw_row_as_before(values):
    """What a replay sends is stored as what was first sent, whatever the values."""
    text = to_json(values)
    assert to_json(attributes(pairs(from_json(text)))) == text
