"""Delivery under faults: what is acknowledged is stored once, what is lost is counted, nothing blocks the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.rpc.status_pb2 import Status

from collectors.server import start_process
from rlinsight import counts, exporter, launch, names, segments, spool, store, telemetry
from rlinsight.counts import Counts
from rlinsight.errors import CollectorError, SpoolError
from rlinsight.segments import Segments
from rlinsight.wire import HEADER, PROTOBUF, Batch, failure
from tests.collectors import live
from tests.scripted_collector import Answer, Collector, attributes, running

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    telemetry.shutdown(0.1)


def start(spool_dir: Path, endpoint: str | None, **settings) -> None:
    telemetry.setup("controller", spool_dir=spool_dir, run_id="run-1", attempt=1, endpoint=endpoint, **settings)


def emit(first: int, last: int) -> None:
    for index in range(first, last):
        telemetry.event("e", {"index": index})


def indices(collector: Collector) -> list[int]:
    return sorted(attributes(event.attributes)["index"] for event in collector.events("e"))


def health(collector: Collector) -> dict:
    """The newest health report."""
    reports = sorted(collector.events(names.PRODUCER_HEALTH), key=lambda report: report.time_unix_nano)
    return attributes(reports[-1].attributes)


def test_busy_collector_is_given_the_time_it_asks_for(tmp_path: Path) -> None:
    """503 with Retry-After is tried again after that time, and then stored once."""
    script = [Answer(503, {"Retry-After": "1"}), Answer(429)]
    with running(Collector(script)) as collector:
        start(tmp_path, collector.url)
        emit(0, 10)
        assert telemetry.shutdown(60)
        first, second, third = collector.requests[:3]
        assert second.at - first.at >= 1.0
        assert third.at - second.at < 1.0
        assert first.seq == second.seq == third.seq
        assert indices(collector) == list(range(10))
        assert health(collector)[names.RETRIED] == 1


def test_a_time_without_end_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Retry-After beyond all bounds neither ends delivery nor stops it: another collector may be there by then."""
    monkeypatch.setattr(spool, "MAX_RETRY_AFTER_S", 0.05)
    with running(
        Collector([Answer(503, {"Retry-After": seconds}) for seconds in ("inf", "86400", "nan")])
    ) as collector:
        start(tmp_path, collector.url)
        emit(0, 10)
        assert telemetry.shutdown(60)
        assert indices(collector) == list(range(10))


def test_a_lost_answer_is_not_a_duplicate(tmp_path: Path) -> None:
    """A batch stored but never acknowledged comes again under the same number, so the ledger knows it."""
    with running(Collector([Answer(hang_up=True)])) as collector:
        start(tmp_path, collector.url)
        emit(0, 10)
        assert telemetry.shutdown(60)
        assert collector.duplicates == 1
        assert indices(collector) == list(range(10))


@pytest.mark.parametrize(
    ("content_type", "answer", "told"),
    [
        (PROTOBUF, Status(code=3, message="too old").SerializeToString(), "HTTP 400 too old"),
        (PROTOBUF, b"too old", "HTTP 400 too old"),
        ("text/plain", b"too old", "HTTP 400 too old"),
        (None, b"", "HTTP 400"),
    ],
)
def test_a_receivers_reason_is_read(content_type: str | None, answer: bytes, told: str) -> None:
    """OTLP's errors are protobuf; proxies and others answer in text, whatever they call it."""
    assert failure(400, content_type, answer) == told


@pytest.mark.parametrize("status", [400, 413])
def test_a_refused_batch_is_kept_aside_and_the_rest_goes_on(status: int, tmp_path: Path) -> None:
    """A refused batch lands in the dead-letter file, is counted as rejected, and is not sent again."""
    with running(Collector([Answer(status)])) as collector:
        start(tmp_path, collector.url)
        emit(0, 10)
        assert telemetry.flush(60)
        emit(10, 20)
        assert not telemetry.shutdown(5)
        assert indices(collector) == list(range(10, 20))
        assert health(collector)[names.REJECTED] == 10
        (letters,) = tmp_path.glob(f"*/{segments.DEAD_LETTERS}")
        refused = collector.requests[0]
        assert refused.body in letters.read_bytes()
        before = len(collector.requests)
        spool.deliver_leftovers(tmp_path, collector.url)
        assert len(collector.requests) == before


def test_a_poisonous_batch_blocks_nothing_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that makes the collector fail every time is put aside after a bounded number of attempts."""
    monkeypatch.setattr(spool, "BACKOFF_S", (0.001, 0.002))
    with running(Collector([Answer(500)] * spool.MAX_SERVER_ERRORS)) as collector:
        start(tmp_path, collector.url)
        emit(0, 3)
        assert telemetry.flush(60)
        emit(3, 6)
        telemetry.shutdown(5)
        assert indices(collector) == [3, 4, 5]


def test_partial_success_is_counted(tmp_path: Path) -> None:
    """Items the collector left out of a stored batch count as rejected, not as sent."""
    with running(Collector([Answer(rejected=2)])) as collector:
        start(tmp_path, collector.url)
        for _ in range(5):
            with telemetry.span("s"):
                pass
        assert not telemetry.shutdown(5)
        assert (health(collector)[names.REJECTED], health(collector)[names.SENT]) == (2, 3)


def write(path: Path, count: int, size: int = 10) -> Segments:
    """A living producer's folder with ``count`` batches of two items, numbered from 1."""
    folder = Segments.create(path, "p", 2**30, b"{}")
    assert folder.write([Batch("logs", 2, bytes(size)) for _ in range(count)]).disk == 0
    return folder


def deliver(folder: Segments, collector: Collector) -> Counts:
    """Deliver all of a folder to a collector; returns what became of the items."""
    counted = Counts()
    sender = spool.Sender(folder, collector.url, None, counted)
    sender.run(threading.Event(), until_empty=True)
    sender.close()
    return counted


def test_what_waits_goes_in_one_request_and_each_record_has_its_own_fate(tmp_path: Path) -> None:
    """Stored, partly stored and refused in one answer: the refused one is put aside, nothing is sent again."""
    script = [Answer(), Answer(rejected=1), Answer(400), Answer()]
    with running(Collector(script, spools=True)) as collector:
        folder = write(tmp_path, 4)
        counted = deliver(folder, collector)
        assert collector.spool_requests == [[1, 2, 3, 4]]
        assert (counted.sent, counted.rejected, counted.retried) == (5, 3, 0)
        assert {seq for _, seq in collector.stored} == {1, 2, 4}
        assert (folder.path / segments.DEAD_LETTERS).exists()
        assert folder.pending == folder.pending_bytes == 0
        folder.close()


def test_records_behind_one_that_has_to_wait_are_settled_after_it(tmp_path: Path) -> None:
    """503 for the second of three: the first is settled, the others come again after the time asked for."""
    script = [Answer(), Answer(503, {"Retry-After": "0.3"}), Answer()]
    with running(Collector(script, spools=True)) as collector:
        folder = write(tmp_path, 3)
        counted = deliver(folder, collector)
        assert collector.spool_requests == [[1, 2, 3], [2, 3]]
        assert [request.seq for request in collector.requests] == [1, 2, 3, 2, 3]
        assert collector.requests[3].at - collector.requests[2].at >= 0.3
        assert (counted.sent, counted.retried, collector.duplicates) == (6, 1, 1)
        folder.close()


def test_a_poisonous_record_is_put_aside_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails each time, first alone in its fate and then with the whole request, costs no other record."""
    monkeypatch.setattr(spool, "BACKOFF_S", (0.001, 0.002))
    script = [Answer(500), Answer()] * spool.MAX_SERVER_ERRORS
    with running(Collector(script, spools=True)) as collector:
        counted = deliver(folder := write(tmp_path / "record", 2), collector)
        assert (counted.sent, counted.rejected) == (2, 2)
        folder.close()
    whole = [Answer(500)]
    with running(Collector([Answer(500)] * spool.MAX_SERVER_ERRORS, spools=True, whole=whole)) as collector:
        counted = deliver(folder := write(tmp_path / "request", 3), collector)
        assert (counted.sent, counted.rejected) == (4, 2)
        assert collector.spool_requests == [[1, 2, 3]]  # from then on one by one
        assert [request.seq for request in collector.requests[-2:]] == [2, 3]
        folder.close()


@pytest.mark.parametrize("status", [404, 405, 415, 501])
def test_a_stock_receiver_is_asked_once(status: int, tmp_path: Path) -> None:
    """One that does not know spools gets the requests it does know, and is not asked again at that address."""
    with running(Collector(spools=True, whole=[Answer(status)])) as collector:
        folder = write(tmp_path, 5)
        assert deliver(folder, collector).sent == 10
        assert collector.spool_requests == [[1, 2, 3, 4, 5]]
        assert [request.seq for request in collector.requests] == [1, 2, 3, 4, 5]
        folder.close()


def test_a_receiver_that_says_yes_to_everything_is_not_taken_for_ours(tmp_path: Path) -> None:
    """200 without the outcomes of these records stores nothing as far as the sender knows."""
    with running(Collector(spools=True, whole=[Answer(200)])) as collector:
        folder = write(tmp_path, 3)
        assert deliver(folder, collector).sent == 6
        assert len(collector.stored) == 3
        folder.close()


@pytest.mark.parametrize(("whole", "retried"), [(Answer(503), 1), (Answer(413), 0), (Answer(403), 0)])
def test_a_whole_request_that_fails_costs_nothing(whole: Answer, retried: int, tmp_path: Path) -> None:
    """Busy: all of it comes again. Refused, or denied as a gateway does that does not know it: one by one."""
    with running(Collector(spools=True, whole=[whole])) as collector:
        folder = write(tmp_path, 3)
        counted = deliver(folder, collector)
        assert (counted.sent, counted.rejected, counted.retried) == (6, 0, retried)
        assert collector.spool_requests == [[1, 2, 3]] * (1 + retried)
        folder.close()


def test_records_that_take_too_long_together_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line on which a whole request takes longer than an answer is waited for still delivers, record by record."""
    monkeypatch.setattr(spool, "POST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(spool, "BACKOFF_S", (0.001, 0.002))
    with running(Collector(spools=True, whole=[Answer(after_s=0.3)] * 9)) as collector:
        folder = write(tmp_path, 3)
        assert deliver(folder, collector).sent == 6
        assert collector.spool_requests == [[1, 2, 3]]
        folder.close()


def test_a_lost_answer_to_several_records_duplicates_none(tmp_path: Path) -> None:
    """Stored but never acknowledged, they come again under their numbers."""
    with running(Collector([Answer(), Answer(hang_up=True)], spools=True)) as collector:
        folder = write(tmp_path, 2)
        assert deliver(folder, collector).sent == 4
        assert (len(collector.stored), collector.duplicates) == (2, 2)
        folder.close()


def test_requests_of_several_records_are_bounded(tmp_path: Path) -> None:
    """In records, and in bytes unless it is a single one."""
    with running(Collector(spools=True)) as collector:
        deliver(folder := write(tmp_path / "many", spool.SPOOL_RECORDS + 3), collector)
        folder.close()
        assert list(map(len, collector.spool_requests)) == [spool.SPOOL_RECORDS, 3]
    with running(Collector(spools=True)) as collector:
        deliver(folder := write(tmp_path / "large", 5, spool.REQUEST_BYTES * 2 // 5), collector)
        assert list(map(len, collector.spool_requests)) == [2, 2, 1]
        folder.close()


def test_processes_deliver_by_the_clock_and_at_once_when_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is emitted waits on disk for the next multiple of the interval; flush and a backlog do not."""
    monkeypatch.setattr(exporter, "DELIVER_S", 10**6)
    monkeypatch.setattr(exporter, "BATCH_S", 0.02)
    monkeypatch.setattr(exporter, "BACKLOG_BYTES", 100_000)
    with running(Collector(spools=True)) as collector:
        start(tmp_path, collector.url)
        emit(0, 5)
        time.sleep(0.3)
        assert (indices(collector), len(list(tmp_path.rglob("*.seg")))) == ([], 1)
        assert telemetry.flush(60)
        assert indices(collector) == list(range(5))
        telemetry.event("e", {"index": 5, "blob": b"x" * 200_000})
        deadline = time.monotonic() + 5
        while len(indices(collector)) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert indices(collector) == list(range(6))
        monkeypatch.setattr(exporter, "DELIVER_S", 0.1)
        emit(6, 8)
        while len(indices(collector)) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert indices(collector) == list(range(8))


def test_an_idle_connection_that_was_closed_is_not_an_outage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A keep-alive connection the server has closed is reopened without a retry or a warning."""
    with running(Collector(), idle_timeout_s=1.0) as collector:
        start(tmp_path, collector.url)
        emit(0, 1)
        assert telemetry.flush(60)
        time.sleep(2.0)
        emit(1, 2)
        assert telemetry.shutdown(60)
        assert indices(collector) == [0, 1]
        assert health(collector)[names.RETRIED] == 0
    assert caplog.text == ""


def test_no_collector_all_run_long_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the collector down the spool holds everything; deliver_leftovers sends it, each item once, and tidies up."""
    start(tmp_path, "http://127.0.0.1:9")
    emit(0, 2000)
    assert not telemetry.shutdown(0.5)
    assert caplog.text.count("collector unavailable") == 1
    with running(Collector()) as collector:
        done = spool.deliver_leftovers(tmp_path, collector.url)
        assert indices(collector) == list(range(2000))
        assert done.sent == len(collector.events()) == health(collector)[names.EMITTED]
        assert (done.batches, done.remaining, done.lost) == (len(collector.requests), 0, 0)
    assert list(tmp_path.iterdir()) == []
    assert spool.deliver_leftovers(tmp_path, "http://127.0.0.1:9") == spool.Delivered()
    assert spool.deliver_leftovers(tmp_path / "missing", "http://127.0.0.1:9") == spool.Delivered()


def test_without_an_endpoint_flush_means_on_disk(tmp_path: Path) -> None:
    """Spool only: flush says that everything is durable, shutdown that it is not delivered."""
    start(tmp_path, None)
    emit(0, 5)
    assert telemetry.flush(60)
    assert not telemetry.shutdown(5)
    with running(Collector()) as collector:
        spool.deliver_leftovers(tmp_path, collector.url)
        assert indices(collector) == list(range(5))


PRODUCER = """
import sys, time
from pathlib import Path
from rlinsight import telemetry
telemetry.setup("controller", spool_dir=Path(sys.argv[1]), run_id="run-1", attempt=1, endpoint=sys.argv[2] or None)
index = 0
while True:
    telemetry.event("e", {"index": index})
    index += 1
    if index % 100 == 0:
        print(index, flush=True)
        time.sleep(0.002)
"""


def producer(spool_dir: Path, endpoint: str = "", code: str = PRODUCER) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(spool_dir), endpoint], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("connected", [False, True])
def test_kill_9_loses_at_most_the_unsynced_and_counts_it(connected: bool, tmp_path: Path) -> None:
    """After kill -9, stored plus reported lost equals emitted, what is stored is a gapless prefix, nothing doubles."""
    with running(Collector()) as collector:
        process = producer(tmp_path, collector.url if connected else "")
        assert process.stdout is not None
        while int(process.stdout.readline()) < 5000:
            pass
        assert spool.deliver_leftovers(tmp_path, collector.url) == spool.Delivered(in_use=1)
        process.send_signal(signal.SIGKILL)
        emitted = max([int(line) for line in process.stdout], default=5000)
        process.wait()
        done = spool.deliver_leftovers(tmp_path, collector.url)
        stored = indices(collector)
        report = health(collector)
        assert stored == list(range(len(stored)))
        assert report[names.DROPPED_CRASH] == done.lost
        assert done.torn_batches <= 1
        assert report[names.EMITTED] >= emitted
        assert len(collector.events()) - 1 + done.lost == report[names.EMITTED]  # the report came after the death
        assert 0 < done.lost < 5000
        assert list(tmp_path.iterdir()) == []
        assert counts.of_killed(report[names.PRODUCER]) is None


def test_killed_between_writing_and_counting_is_no_loss(tmp_path: Path) -> None:
    """Batches on disk at kill -9 that were not counted yet are delivered, and not called lost."""
    with running(Collector()) as collector:
        process = producer(tmp_path)
        assert process.stdout is not None
        while int(process.stdout.readline()) < 5000:
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        (folder,) = tmp_path.iterdir()
        left, page = Segments.adopt(folder), counts.of_killed(folder.name)
        assert left is not None
        assert page is not None
        on_disk, last = left.beyond(0)
        page.written_seq = last - 3  # as if killed while the last three batches were being synced
        page.written = on_disk - left.beyond(page.written_seq)[0]
        left.abandon()
        counts.correct(folder.name, page)
        done = spool.deliver_leftovers(tmp_path, collector.url)
        assert len(collector.events()) - 1 + done.lost == health(collector)[names.EMITTED]


@pytest.mark.slow
def test_the_real_collector_stores_each_item_once_through_two_kills(tmp_path: Path) -> None:
    """kill -9 of the collector, then of the producer: in the store, items plus the reported loss equal the emitted."""
    path = tmp_path / "store.duckdb"
    first = start_process(path, os.getpid())
    process = producer(tmp_path / "spool", first.http)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 10_000:
        pass
    time.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    second = start_process(path, os.getpid())
    try:
        done = spool.deliver_leftovers(tmp_path / "spool", second.http)
        assert (done.remaining, done.rejected) == (0, 0)
        rows = store.query(
            "SELECT count(*) AS n, count(DISTINCT json_extract(log_attributes, '$.index')) AS different FROM otel_logs "
            "WHERE event_name = 'e'",
            store=path,
        ).to_pylist()[0]
        assert rows["n"] == rows["different"] > 1000
        report = store.query("SELECT * FROM producer_health ORDER BY time_ns DESC LIMIT 1", store=path).to_pylist()[0]
        periodic = store.query("SELECT count(*) - 1 AS n FROM producer_health", store=path).to_pylist()[0]["n"]
        assert report["dropped_crash"] == done.lost > 0
        assert rows["n"] + periodic + report["dropped_crash"] == report["emitted"]
        assert report["sent"] == rows["n"] + periodic
        assert (report["run_id"], report["service_name"]) == ("run-1", "rlinsight.controller")
    finally:
        os.kill(second.pid, signal.SIGTERM)


def test_a_collector_others_can_reach_gets_its_token(tmp_path: Path) -> None:
    """Beyond loopback producers and deliverers carry the token; delivering with a wrong one is one clear error."""
    path = tmp_path / "s.duckdb"
    start(tmp_path / "spool", None)
    emit(0, 3)
    telemetry.shutdown(5)
    with live.collector(path, "--listen", "0.0.0.0") as running:
        endpoint, token = running.endpoint.http, running.endpoint.token
        start(tmp_path / "spool", endpoint, token=token)
        emit(3, 5)
        assert telemetry.shutdown(20)
        with pytest.raises(CollectorError, match="wants its token"):
            spool.deliver_leftovers(tmp_path / "spool", endpoint, "wrong")
        assert spool.deliver_leftovers(tmp_path / "spool", endpoint, token).remaining == 0
        rows = store.query("SELECT count(*) AS n FROM otel_logs WHERE event_name = 'e'", store=path)
        assert rows.to_pylist() == [{"n": 5}]
    assert spool.producers(tmp_path / "spool") == []


def test_two_deliverers_share_no_folder(tmp_path: Path) -> None:
    """Deliverers racing over the same leftovers send every batch once."""
    for first in range(0, 600, 100):
        start(tmp_path, None)
        emit(first, first + 100)
        telemetry.shutdown(1)
    code = "import sys; from rlinsight import spool; spool.deliver_leftovers(sys.argv[1], sys.argv[2])"
    with running(Collector()) as collector:
        racers = [producer(tmp_path, collector.url, code) for _ in range(3)]
        assert [racer.wait() for racer in racers] == [0, 0, 0]
        assert indices(collector) == list(range(600))
        assert collector.duplicates == 0
    assert list(tmp_path.iterdir()) == []


def fill(path: Path, count: int = 5) -> Path:
    """A dead producer's folder with ``count`` batches of two items in one segment; returns the segment."""
    folder = Segments.create(path, "dead", 1024**2, b"")
    lost = folder.write([Batch("logs", 2, b"payload %d" % index) for index in range(count)])
    assert (lost.limit, lost.disk) == (0, 0)
    folder.close()
    (segment,) = path.glob("dead/*.seg")
    return segment


def read_all(path: Path) -> tuple[list[bytes], Segments]:
    folder = Segments.adopt(path / "dead")
    assert folder is not None
    payloads = []
    while (batch := folder.peek(0)) is not None:
        payloads.append(batch.payload)
        folder.ack(batch)
    return payloads, folder


@pytest.mark.parametrize("cut", [1, 5, 9, 12, HEADER.size + 8])
def test_a_torn_last_record_is_left_out_and_counted(cut: int, tmp_path: Path) -> None:
    """Whatever a kill cuts off the last record, all before it are read."""
    segment = fill(tmp_path)
    os.truncate(segment, segment.stat().st_size - cut)
    payloads, folder = read_all(tmp_path)
    assert payloads == [b"payload %d" % index for index in range(4)]
    assert folder.torn_batches == 1
    assert folder.torn_items == (2 if cut <= 9 else 0)
    folder.close()


def test_a_flipped_bit_costs_one_record(tmp_path: Path) -> None:
    """A record whose checksum is wrong is left out; those behind it are read."""
    segment = fill(tmp_path)
    data = bytearray(segment.read_bytes())
    data[2 * (HEADER.size + 9) + HEADER.size] ^= 1
    segment.write_bytes(data)
    payloads, folder = read_all(tmp_path)
    assert payloads == [b"payload 0", b"payload 1", b"payload 3", b"payload 4"]
    assert (folder.torn_batches, folder.torn_items) == (1, 2)
    folder.close()


def test_segments_are_freed_while_the_producer_runs(tmp_path: Path) -> None:
    """Acknowledged segments leave the disk, so a long run's spool stays small and its cap is never met."""
    folder = Segments.create(tmp_path, "alive", 1024**2, b"")
    for _ in range(100):
        lost = folder.write([Batch("logs", 1, b"x" * 50_000)])
        assert (lost.limit, lost.disk) == (0, 0)
        batch = folder.peek(0)
        assert batch is not None
        folder.ack(batch)
        assert sum(path.stat().st_size for path in folder.path.iterdir()) < 300_000
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_byte_cap_keeps_the_oldest_and_counts_the_rest(tmp_path: Path) -> None:
    """At spool_bytes new items are dropped, those on disk stay; once delivered there is room again."""
    start(tmp_path, None, spool_bytes=1024**2)
    for index in range(40):
        telemetry.event("e", {"index": index, "blob": b"x" * 50_000})
        telemetry.flush(5)
    recorder = telemetry._recorder
    assert recorder is not None
    dropped = recorder.exporter.counts.dropped_limit
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 1024**2
    telemetry.shutdown(1)
    with running(Collector()) as collector:
        spool.deliver_leftovers(tmp_path, collector.url)
        assert indices(collector) == list(range(40 - dropped))
        assert 15 < dropped < 25


def test_requests_stay_below_the_collectors_limit(tmp_path: Path) -> None:
    """Large items are spread over requests of a few MiB; one that no request could hold is dropped and counted."""
    with running(Collector()) as collector:
        start(tmp_path, collector.url)
        for index in range(20):
            telemetry.event("e", {"index": index, "blob": b"x" * 1024**2})
        telemetry.event("e", {"index": 99, "blob": b"x" * 17 * 1024**2})
        assert not telemetry.shutdown(10)
        assert max(len(request.body) for request in collector.requests) < 5 * 1024**2
        assert indices(collector) == list(range(20))
        assert health(collector)[names.DROPPED_LIMIT] == 1


FULL_DISK = """
import os, resource, sys
from pathlib import Path
from rlinsight import telemetry
telemetry.setup("controller", spool_dir=Path(sys.argv[1]), run_id="run-1", attempt=1, endpoint=None)
limit = int(sys.argv[2] or 0)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for index in range(60):
    telemetry.event("e", {"index": index, "blob": b"x" * 50_000})
    telemetry.flush(5)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(Path(sys.argv[1]) / "filler").unlink(missing_ok=True)
for index in range(60, 63):
    telemetry.event("e", {"index": index})
telemetry.flush(5)
counts = telemetry._recorder.exporter.counts
print(counts.dropped_disk, counts.written, counts.emitted)
telemetry.shutdown(1)
"""


def check_full_disk(path: Path, limit: str) -> None:
    process = producer(path, limit, FULL_DISK)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    dropped, written, emitted = map(int, out.split())
    assert dropped + written == emitted == 63
    assert dropped > 30
    with running(Collector()) as collector:
        spool.deliver_leftovers(path, collector.url)
        assert len(indices(collector)) == written
        assert indices(collector)[-3:] == [60, 61, 62]
        assert health(collector)[names.DROPPED_DISK] == dropped


def test_a_write_that_fails_is_counted_and_undone(tmp_path: Path) -> None:
    """A write cut short by a file-size limit drops its batch only; the record before and those after are intact."""
    check_full_disk(tmp_path, "120000")


def test_a_full_disk_drops_and_recovers(tmp_path: Path) -> None:
    """With no space left items are dropped and counted; when space returns, recording goes on."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        (tmp_path / "filler").write_bytes(b"x" * 700_000)
        check_full_disk(tmp_path, "")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_locked_is_one_clear_error(tmp_path: Path) -> None:
    """A spool the user may not write gives a SpoolError that says what to do."""
    fill(tmp_path)
    (tmp_path / "dead" / segments.LOCK).unlink()
    (tmp_path / "dead" / segments.LOCK).mkdir()
    with pytest.raises(SpoolError, match="copy it to a writable directory"):
        spool.deliver_leftovers(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(SpoolError, match="copy it to a readable directory"):
        spool.deliver_leftovers(tmp_path / "dead" / segments.OWNER, "http://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.slow
def test_ingest_finds_the_spool_or_says_that_there_is_none(tmp_path: Path) -> None:
    """A run's folder stands for its spool; a wrong folder is an error; what a living process still fills is named."""
    store = tmp_path / "s.duckdb"
    run = tmp_path / "run"
    start(run / "spool", None)
    emit(0, 5)
    telemetry.flush(5)
    assert "1 producers still in use" in launch.ingest(run, store)
    telemetry.shutdown(5)
    (run / "spool" / "notes").mkdir()
    with pytest.raises(SpoolError, match="holds no undelivered telemetry"):
        launch.ingest(tmp_path, tmp_path / "none.duckdb")
    assert not (tmp_path / "none.duckdb").exists()
    assert " items delivered to " in launch.ingest(run, store)
    with pytest.raises(SpoolError, match="holds no undelivered telemetry"):
        launch.ingest(run / "spool", store)
