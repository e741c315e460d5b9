from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectors.database import Database
from collectors.decode import Decoder
from collectors.payload import PROTOBUF, PayloadError, parse
from collectors.writer import MAX_QUEUED_BATCHES, Batch, BatchRefused, Overloaded, Writer
from rlinsight import schema
from tests.synthetic import Request, Run, batch, requests

SMALL = list(requests(Run(steps=1, groups=2, group_size=2, start_ns=1_700_000_000 * 10**9)))


def _write(con: duckdb.DuckDBPyConnection, sent: Sequence[Request]) -> list[bool]:
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    futures = [writer.submit(batch(decoder, request)) for request in sent]
    writer.start()
    writer.close()
    return [future.result(10) for future in futures]


def _memory() -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    schema.apply(con, Path(":memory:"))
    return con


def _content(con: duckdb.DuckDBPyConnection) -> dict[str, list]:
    """Every table without arrival times, in an order of its own."""
    content = {}
    for table, columns in schema.columns(con).items():
        kept = [name for name in columns if name not in ("ingest_ns", "received_ns", "committed_ns", "created_ns")]
        content[table] = con.execute(f"SELECT {', '.join(kept)} FROM {table} ORDER BY ALL").fetchall()
    return content


def test_a_batch_sent_again_is_acknowledged_and_not_stored_twice(tmp_path):
    """Duplicates inside one group, in a later group and after a restart change nothing; their futures say False."""
    path = tmp_path / "s.duckdb"
    for expected in ([True, False], [False, False]):
        with Database(path) as database:
            assert _write(database.con, [SMALL[0], SMALL[0]]) == expected
            assert database.con.execute("SELECT count(*), sum(rows) FROM ingest_batches").fetchone() == (
                1,
                database.con.execute("SELECT count(*) FROM otel_spans").fetchone()[0],
            )


REFERENCE = _memory()
_write(REFERENCE, SMALL)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_order_and_duplicates_do_not_matter(data):
    """Batches in any order, some of them several times, in groups of any size, converge to identical tables."""
    sent = data.draw(st.permutations(SMALL + data.draw(st.lists(st.sampled_from(SMALL), max_size=5))))
    cut = data.draw(st.integers(0, len(sent)))
    con = _memory()
    _write(con, sent[:cut])
    _write(con, sent[cut:])
    assert _content(con) == _content(REFERENCE)
    for view in ("rollouts", "train_metrics", "groups", "v_linkage"):
        order = f"SELECT * FROM {view} ORDER BY ALL"
        assert con.execute(order).fetchall() == REFERENCE.execute(order).fetchall()


def test_a_batch_the_store_cannot_hold_harms_no_other():
    """One batch that breaks the insert is refused; the others of its group are stored."""
    con = _memory()
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    batches = [batch(decoder, request) for request in SMALL]
    batches[1].decoded.rows["otel_logs"][0] = ("no", "such", "row")
    futures = [writer.submit(item) for item in batches]
    writer.start()
    writer.close()
    with pytest.raises(BatchRefused):
        futures[1].result(10)
    assert all(future.result(10) for i, future in enumerate(futures) if i != 1)
    assert con.execute("SELECT count(*) FROM ingest_batches").fetchone() == (len(SMALL) - 1,)


def test_a_full_queue_refuses_instead_of_growing():
    """Beyond its bound the queue raises Overloaded; nothing accepted is lost."""
    con = _memory()
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    tiny = next(request for request in SMALL if request.signal == "metrics")
    accepted = []
    for seq in range(MAX_QUEUED_BATCHES):
        accepted.append(writer.submit(batch(decoder, Request("metrics", tiny.message, "p", seq))))
    assert not writer.has_room()
    with pytest.raises(Overloaded):
        writer.submit(batch(decoder, Request("metrics", tiny.message, "p", -1)))
    writer.start()
    writer.close()
    assert all(future.result(10) for future in accepted)
    with pytest.raises(Overloaded):
        writer.submit(batch(decoder, tiny))


FUZZED = _memory()
PAYLOADS = [(request.signal, request.message.SerializeToString()) for request in SMALL]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_payloads_are_refused_or_stored(data):
    """Whatever bytes arrive, they are malformed (400) or the store holds their rows; no batch is beyond it."""
    signal, payload = data.draw(st.sampled_from(PAYLOADS))
    mutant = bytearray(payload)
    for position, piece in data.draw(
        st.lists(st.tuples(st.integers(0, len(payload)), st.binary(min_size=1, max_size=9)), min_size=1, max_size=8)
    ):
        mutant[position : position + len(piece)] = piece
    columns = schema.columns(FUZZED)
    try:
        request = parse(signal, bytes(mutant), PROTOBUF)
    except PayloadError:
        return
    decoded = getattr(Decoder(columns), signal)(request, "b", 1)
    item = Batch(f"{signal}/{hash(bytes(mutant))}", None, None, signal, len(mutant), 1, decoded)
    writer = Writer(FUZZED, columns)
    writer.submit(item)
    writer.start()
    writer.close()
    assert item.done.exception(10) is None


def test_a_task_runs_between_groups_and_its_error_is_its_own():
    """Work handed to the writer sees what was queued before it, not what comes after; when it fails, ingest goes on."""
    con = _memory()
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    count = "SELECT count(*) FROM ingest_batches"
    first = writer.submit(batch(decoder, SMALL[0]))
    seen = writer.submit_task(lambda con: con.execute(count).fetchone()[0])
    broken = writer.submit_task(lambda con: con.execute("SELECT nothing"))
    second = writer.submit(batch(decoder, SMALL[1]))
    writer.start()
    writer.close()
    assert (first.result(10), seen.result(10), second.result(10)) == (True, 1, True)
    with pytest.raises(duckdb.BinderException):
        broken.result(10)
    with pytest.raises(Overloaded):
        writer.submit_task(lambda con: None)


def test_stats_tell_new_batches_from_known_ones():
    """What was stored is counted by signal, a batch sent again as a duplicate and in nothing else."""
    con = _memory()
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    for _ in range(2):
        writer.submit(batch(decoder, SMALL[0]))
    writer.start()
    writer.close()
    signal, rows = con.execute("SELECT signal, rows FROM ingest_batches").fetchone()
    stats = writer.stats
    assert (stats.batches, stats.items, stats.duplicates) == ({signal: 1}, {signal: rows}, {signal: 1})
    assert (stats.commits, stats.failures) == (1, 0)


def test_a_request_that_is_given_up_does_not_end_the_writer():
    """Cancelling a batch's future, as a server does with a request it gives up, changes nothing: all is stored."""
    con = _memory()
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    futures = [writer.submit(batch(decoder, request)) for request in SMALL[:2]]
    assert not futures[0].cancel()
    writer.start()
    writer.close()
    assert [future.result(10) for future in futures] == [True, True]
