"""What a store holds, sent again as OTLP over HTTP: to another collector, or to any OpenTelemetry backend.

Each request is one batch as it once came in, with the identity it had, so a replay that is repeated or cut off, or
meets a store that has some of it already, stores nothing twice there. Owns retries; the requests are built by
``collectors.encode``.
"""

from __future__ import annotations

import gzip
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from collectors import encode
from rlinsight import schema
from rlinsight.attach import connected
from rlinsight.errors import CollectorError, ConfigError, StoreError
from rlinsight.export import condition
from rlinsight.wire import PRODUCER_HEADER, SEQ_HEADER, SIGNALS, Signal, failure, partial_success

if TYPE_CHECKING:
    import duckdb

READ_ROWS = 5000
GIVE_UP_S = 300.0  # without one request answered
LONGEST_PAUSE_S = 10.0
PASSING = (408, 429, 500, 502, 503, 504)  # worth another attempt

ORDER: dict[Signal, str] = {
    "traces": "resource_attributes, scope_name, start_ns, span_id",
    "logs": "item, time_ns, span_id",
    "metrics": "resource_attributes, scope_name, name, attributes, time_ns",
}


@dataclass
class Replayed:
    """What was sent. ``incomplete`` log records went without token arrays that the store has lost."""

    requests: int = 0
    items: int = 0
    rejected: int = 0
    incomplete: int = 0
    problem: str = ""  # the endpoint's word about rejected items


def replay(
    store: Path,
    endpoint: str,
    run: str | None = None,
    headers: Mapping[str, str] | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    services: Sequence[str] = (),
) -> Replayed:
    """Send the spans, log records and metric points of a run, or of all, to the OTLP/HTTP ``endpoint`` (its base URL).

    With ``services`` what those sent outside of runs. ``report`` is told how many of how many items are done. Raises
    StoreError: no such run or service, a store of another version; ConfigError: a URL that is none; CollectorError:
    refused, or not answered for five minutes.
    """
    done = Replayed()
    with connected(store) as con, _client(endpoint, headers) as client:
        chosen = condition(con, run, services)
        columns = _columns(con, store)
        lists = encode.Lists(columns)
        where = f" WHERE {chosen}"
        total = sum(_count(con, f"{encode.TABLES[signal]}{where}") for signal in SIGNALS)
        for signal in SIGNALS:
            for rows in _batches(con, signal, lists, where):
                if signal == "logs":
                    message, lost = encode.logs(rows, lists), sum(encode.is_incomplete(row, lists) for row in rows)
                else:
                    message, lost = (encode.traces if signal == "traces" else encode.metrics)(rows), 0
                _send(client, signal, message.SerializeToString(), _identity(rows), done)
                done.requests += 1
                done.items += len(rows)
                done.incomplete += lost
                report(done.items, total)
    return done


def _columns(con: duckdb.DuckDBPyConnection, store: Path) -> dict[str, dict[str, str]]:
    """Types of the store's columns. Raises StoreError unless it is of this version."""
    rows = con.execute("FROM in_store('SELECT max(version) FROM schema_meta')").fetchall()
    if rows != [(schema.VERSION,)]:
        raise StoreError(f"{store} has an older schema; 'rlinsight collect --store {store}' brings it up to date")
    sql = "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal ORDER BY column_index"
    columns: dict[str, dict[str, str]] = {}
    for table, column, sql_type in con.execute("FROM in_store(?)", [sql]).fetchall():
        columns.setdefault(table, {})[column] = sql_type
    return columns


def _count(con: duckdb.DuckDBPyConnection, source: str) -> int:
    return con.execute("FROM in_store(?)", [f"SELECT count(*) FROM {source}"]).fetchall()[0][0]


def _batches(
    con: duckdb.DuckDBPyConnection, signal: Signal, lists: encode.Lists, where: str
) -> Iterator[list[dict[str, Any]]]:
    """The raw rows of a signal, those of one batch at a time, with the ledger's word about each."""
    reader = con.execute("FROM in_store(?)", [_statement(signal, lists, where)]).to_arrow_reader(READ_ROWS)
    rows = (row for batch in reader for row in encode.rows(batch))
    for _, batch in groupby(rows, key=itemgetter("batch_id")):
        yield list(batch)


def _statement(signal: Signal, lists: encode.Lists, where: str) -> str:
    """Rows in the same order each time: a foreign batch is known again by the hash of its content alone."""
    return (
        f"SELECT raw.*, b.producer, b.seq, b.rows AS batch_rows FROM ({encode.select(signal, lists)}) raw "
        f"LEFT JOIN ingest_batches b ON b.batch_id = raw.batch_id{where} ORDER BY raw.batch_id, {ORDER[signal]}"
    )


def _identity(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The headers that name the batch; none for a foreign one, or for a part: it must not stand for the whole."""
    first = rows[0]
    if first["producer"] is None or first["batch_rows"] != len(rows):
        return {}
    return {PRODUCER_HEADER: first["producer"], SEQ_HEADER: str(first["seq"])}


def _client(endpoint: str, headers: Mapping[str, str] | None) -> httpx.Client:
    url = httpx.URL(endpoint) if "://" in endpoint else None
    if url is None or url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{endpoint!r} is no OTLP/HTTP address; name its base URL, e.g. http://127.0.0.1:4318")
    fixed = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
    return httpx.Client(base_url=endpoint, headers={**(headers or {}), **fixed}, timeout=60)


def _send(client: httpx.Client, signal: Signal, body: bytes, identity: dict[str, str], done: Replayed) -> None:
    """Post until it is taken. Raises CollectorError when it is refused, or nobody answers for too long."""
    packed = gzip.compress(body, compresslevel=1)
    deadline, pause = time.monotonic() + GIVE_UP_S, 0.2
    while True:
        wait = pause
        try:
            answer = client.post(f"/v1/{signal}", content=packed, headers=identity)
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            if answer.is_success:
                _note_rejected(signal, answer.content, done)
                return
            reason = failure(answer.status_code, answer.headers.get("content-type"), answer.content)
            if answer.status_code not in PASSING:
                raise CollectorError(f"{client.base_url} refused {signal} after {done.items:,} items: {reason}")
            after = answer.headers.get("retry-after", "")
            wait = max(wait, float(after)) if after.isdigit() else wait
        if time.monotonic() + wait > deadline:
            raise CollectorError(
                f"{client.base_url} takes no {signal} ({reason}); {done.items:,} items were sent, and running it again "
                "sends none of them twice into a store"
            )
        time.sleep(wait * random.uniform(0.8, 1.2))
        pause = min(pause * 2, LONGEST_PAUSE_S)


def _note_rejected(signal: Signal, content: bytes, done: Replayed) -> None:
    rejected, problem = partial_success(signal, content)
    done.rejected += rejected
    done.problem = done.problem or problem
