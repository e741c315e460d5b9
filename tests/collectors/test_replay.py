"""What a store holds can be sent to another one, which then holds the same."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from collectors import encode, replay
from collectors.database import Database
from collectors.replay import Replayed
from rlinsight import names, schema
from rlinsight.attach import connected
from rlinsight.errors import CollectorError, ConfigError, StoreError
from tests.collectors.live import collector
from tests.collectors.test_otlp_fields import METRIC_KINDS, REQUESTS, Filler
from tests.dashboards import foreign
from tests.synthetic import Request, Run, deliver, fill, requests

pytestmark = pytest.mark.slow

ONE, TWO = Run("one-1", steps=1, groups=2), Run("two-2", steps=1, groups=1, status=None)
PASSING = ("batch_id", "ingest_ns", "received_ns", "committed_ns", "created_ns", "bytes", "item")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of ours, a request of each kind with every field set, and foreign spans of two runs in one batch."""
    store = tmp_path_factory.mktemp("source") / "s.duckdb"
    fill(store, ONE, TWO)
    mixed = ExportTraceServiceRequest()
    for number, run in enumerate((ONE, TWO)):
        spans = mixed.resource_spans.add()
        spans.resource.attributes.add(key=names.RUN_ID).value.string_value = run.run_id
        span = spans.scope_spans.add().spans.add(name="GET /", start_time_unix_nano=5, end_time_unix_nano=9)
        span.trace_id, span.span_id = bytes(15) + b"1", bytes(7) + bytes([number + 1])
    with collector(store) as running:
        for number, (signal, kind) in enumerate(
            [("traces", ""), ("logs", ""), *(("metrics", k) for k in METRIC_KINDS)]
        ):
            request = Request(signal, Filler(kind).fill(REQUESTS[signal]()), "filler", number)
            assert running.post(request).is_success
        assert running.post(Request("traces", mixed, "mixed", 1)).is_success
        running.stop()
    return store


def _content(store: Path, run: str | None = None) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table of a store at rest, without what depends on when and how it came in."""
    content = {}
    where = "" if run is None else f" WHERE run_id = '{run}'"
    with duckdb.connect(str(store), read_only=True) as con:
        for table, columns in schema.columns(con).items():
            kept = ", ".join(column for column in columns if column not in PASSING)
            if run is None or "run_id" in columns:
                content[table] = con.execute(f"SELECT {kept} FROM {table}{where} ORDER BY ALL").fetchall()
    return content


def test_another_store_holds_the_same_afterwards(source, tmp_path):
    """Every table equal, the ledger with its producers too, although everything was sent twice."""
    target = tmp_path / "t.duckdb"
    with collector(target) as running:
        seen: list[tuple[int, int]] = []
        done = replay.replay(source, running.endpoint.http, report=lambda *progress: seen.append(progress))
        assert replay.replay(source, running.endpoint.http) == done
        running.stop()
    expected = _content(source)
    assert _content(target) == expected
    assert done.rejected == done.incomplete == 0
    assert seen[-1] == (done.items, sum(len(expected[f"otel_{kind}"]) for kind in ("spans", "logs", "metrics")))


def test_a_live_store_sends_one_run_alone(source, tmp_path):
    """One run of a store behind a collector, then the other: a batch that holds both does not lose the second."""
    target = tmp_path / "t.duckdb"
    with collector(source) as live, collector(target) as running:
        for run in (ONE.run_id, TWO.run_id):
            replay.replay(source, running.endpoint.http, run)
        live.stop()
        running.stop()
    for run in (ONE.run_id, TWO.run_id):
        assert _content(target, run) == _content(source, run)


def test_services_outside_of_runs_are_sent_alone(tmp_path):
    """What the shop sent arrives; the ledger's spans and the run stay behind."""
    store, target = tmp_path / "s.duckdb", tmp_path / "t.duckdb"
    deliver(store, [*requests(TWO), *foreign.traces(10**9)])
    with collector(target) as running:
        assert replay.replay(store, running.endpoint.http, services=["shop"]).items == 2
        running.stop()
    with duckdb.connect(str(target), read_only=True) as con:
        found = con.execute("SELECT service_name, run_id, name FROM otel_spans").fetchall()
    assert found == [("shop", None, "POST /pay")] * 2


@contextmanager
def _answering(*statuses: int) -> Iterator[tuple[str, list[int]]]:
    """A server that gives these statuses, then 200; its URL, and what it has answered."""
    script, given = list(statuses), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            given.append(script.pop(0) if script else 200)
            self.send_response(given[-1])
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", given
    finally:
        server.shutdown()
        server.server_close()


def test_an_endpoint_that_is_busy_is_asked_again(source):
    """503 and 429 are repeated until they pass; nothing is skipped."""
    with _answering(503, 429) as (url, given):
        done = replay.replay(source, url, TWO.run_id)
        assert given == [503, 429] + [200] * done.requests


def test_an_endpoint_that_refuses_ends_the_replay(source):
    """401 is told with the endpoint's status; silence is told after a time limit."""
    with _answering(200, 401) as (url, given), pytest.raises(CollectorError, match=r"refused traces after .* HTTP 401"):
        replay.replay(source, url)
    assert given == [200, 401]


def test_silence_is_told_after_a_while(source, monkeypatch):
    """Nobody listens: the error says what was sent and that it can be repeated."""
    monkeypatch.setattr(replay, "GIVE_UP_S", 0.5)
    with pytest.raises(CollectorError, match=r"takes no traces .*0 items were sent"):
        replay.replay(source, "http://127.0.0.1:1")


def test_bad_input_is_told(source, tmp_path):
    """An address that is none, an unknown run, no store."""
    for url in ("127.0.0.1:4318", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="base URL"):
            replay.replay(source, url)
    with pytest.raises(StoreError, match="no run 'nine'"):
        replay.replay(source, "http://127.0.0.1:1", "nine")
    with pytest.raises(StoreError, match="no store"):
        replay.replay(tmp_path / "none.duckdb", "http://127.0.0.1:1")


def test_refused_items_are_counted():
    """partial_success of the endpoint reaches the summary; an answer in another form is none."""
    done = Replayed()
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans, answer.partial_success.error_message = 3, "too long"
    replay._note_rejected("traces", answer.SerializeToString(), done)
    replay._note_rejected("traces", b"\xff not protobuf", done)
    assert (done.rejected, done.problem) == (3, "too long")


def test_a_foreign_batch_is_sent_in_the_same_words_each_time(tmp_path):
    """Nothing but the hash of its content says that it is known; a sort that is not total would give another."""
    store = tmp_path / "s.duckdb"
    with Database(store) as database:
        database.con.execute(
            "INSERT INTO otel_spans BY NAME SELECT 'b' AS batch_id, 1 AS ingest_ns, '{}' AS resource_attributes, "
            "'{}' AS span_attributes, 'n' AS name, 1 + i // 99 AS start_ns, 99999 AS end_ns, "
            "lpad(to_hex(i), 32, '0') AS trace_id, lpad(to_hex(i), 16, '0') AS span_id FROM range(1, 300_000) t(i)"
        )
        lists = encode.Lists(database.columns)
        statement = replay._statement("traces", lists, "")
    sent = set()
    for _ in range(3):
        with connected(store) as con:
            rows = con.execute("FROM in_store(?)", [statement]).to_arrow_table()
            sent.add(hash(tuple(rows["span_id"].to_pylist())))
    assert len(sent) == 1
