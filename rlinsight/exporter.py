"""From an emit call to the spool: a bounded queue, a thread that encodes and writes, one that delivers, the counts.

It writes often, so that a killed process loses little, and delivers seldom, since a transaction of the store costs the
same however little it holds: every DELIVER_S by the wall clock, when the other processes of the machine do it too and
their batches share one, and at once when somebody waits in ``flush`` or much has come together. Nothing waits longer to
be seen in a store that is up.

``put`` takes no lock another thread holds for longer than a list append, encodes nothing and does no I/O. Does not own
messages (otlp.py), files (segments.py) or delivery (spool.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rlinsight import counts, names
from rlinsight.counts import Counts
from rlinsight.otlp import Encoder, Item, name_of, size
from rlinsight.priority import yield_processors
from rlinsight.segments import Segments
from rlinsight.spool import Locate, Sender
from rlinsight.wire import DELIVER_S, SIGNALS, Batch, Signal

BATCH_ITEMS = 512
BATCH_BYTES = 4 * 1024**2  # a quarter of what the collector accepts in one request
BATCH_S = DELIVER_S / 2  # between two writes: what a kill -9 may cost
BACKLOG_BYTES = 2 * 1024**2  # of batches on disk that do not wait for that
ITEM_BYTES = 15 * 1024**2  # a larger item could not be sent at all
QUEUE_ITEMS = 100_000
QUEUE_BYTES = 128 * 1024**2
HEALTH_S = 2 * DELIVER_S  # between two reports, made when a delivery is due
LAST_WORD_S = 0.5  # for the final report, to disk and then to the collector, when the time to deliver is used up

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Queued:
    signal: Signal
    item: Item
    size: int  # bytes in memory, about


class Exporter:
    """One producer. Without ``segments`` everything is dropped, counted; without ``endpoint`` it is only spooled."""

    def __init__(
        self,
        producer: str,
        encoder: Encoder,
        segments: Segments | None,
        endpoint: str | None,
        token: str | None = None,
        locate: Locate | None = None,
    ) -> None:
        self.counts = Counts.create(producer) if segments is not None else Counts()
        self._producer = producer
        self._encoder = encoder
        self._segments = segments
        self._sender = Sender(segments, endpoint, token, self.counts, locate) if segments and endpoint else None
        # Reentrant: a signal handler may emit while its thread is inside an emit call.
        self._lock = threading.RLock()
        self._items: list[_Queued] = []
        self._bytes = 0
        self._sealed = False  # the last report is made: what comes now is after the end, and counts nowhere
        # Reentrant too. An event asks for a flush, None says that a batch is full.
        self._wake: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._due = threading.Event()  # the sender's turn
        self._closing, self._stop = threading.Event(), threading.Event()  # of the writer, then of the sender
        self._writer = threading.Thread(target=self._write_loop, name="rlinsight-telemetry-writer", daemon=True)
        self._courier = threading.Thread(target=self._deliver, name="rlinsight-telemetry-sender", daemon=True)
        self._writer.start()
        self._courier.start()

    def put(self, signal: Signal, item: Item) -> None:
        """Queue a span, a log record or a metric point; dropped and counted when the queue is full."""
        queued = _Queued(signal, item, size(item))
        with self._lock:
            if self._sealed:
                return
            self.counts.emitted += 1
            if len(self._items) >= QUEUE_ITEMS or self._bytes + queued.size > QUEUE_BYTES:
                self.counts.dropped_queue += 1
                return
            self._items.append(queued)
            self._bytes += queued.size
            full = len(self._items) % BATCH_ITEMS == 0
        if full:
            self._wake.put(None)

    def spent(self, nanoseconds: int) -> None:
        """Add to the measured time inside emit calls."""
        with self._lock:
            self.counts.overhead_ns += nanoseconds

    def label_dropped(self) -> None:
        """Count an attribute of a measurement that is no label."""
        with self._lock:
            self.counts.labels_dropped += 1

    def fault(self, name: str, *, emitted: int = 1) -> None:
        """Count an item that could not be built; the first one is logged with its traceback.

        ``emitted=0`` if ``put`` has counted it already. To be called while its exception is handled.
        """
        with self._lock:
            if self._sealed and emitted:
                return
            self.counts.emitted += emitted
            self.counts.dropped_fault += 1
            first = self.counts.dropped_fault == 1
        if first:
            _log.warning("telemetry item %r could not be built and is dropped", name, exc_info=True)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is on disk and, with a sender, settled by the collector."""
        deadline = time.monotonic() + timeout_s
        written = threading.Event()
        self._wake.put(written)
        if not written.wait(timeout_s):
            return False
        if self._segments is None or self._sender is None:
            return self._segments is not None
        return self._segments.wait_settled(self._segments.committed_seq, deadline - time.monotonic())

    def close(self, timeout_s: float) -> bool:
        """Flush, report the final counts, stop. True if the collector has everything that was ever emitted."""
        deadline = time.monotonic() + timeout_s
        self.flush(timeout_s)
        self._closing.set()
        self._wake.put(None)
        self._writer.join(max(deadline - time.monotonic(), LAST_WORD_S))
        if self._segments is not None and self._sender is not None:
            self._segments.wait_settled(self._segments.committed_seq, max(deadline - time.monotonic(), LAST_WORD_S))
        self._stop.set()
        self._due.set()
        if self._segments is None or self._writer.is_alive():
            return False  # a disk that hangs keeps its files: closing them under a write could hit another file
        counts.remove(self._producer)
        delivered = self._segments.pending == 0 and self.counts.sent == self.counts.emitted
        self._segments.close()
        return delivered

    def abandon(self) -> None:
        """In a forked child, where neither thread exists: let go of the files."""
        if self._segments is not None:
            self._segments.abandon()

    def _write_loop(self) -> None:
        yield_processors()
        health, turn = (time.time() // seconds for seconds in (HEALTH_S, DELIVER_S))
        while not self._closing.is_set():
            flushes = self._wait()
            before, health = health, time.time() // HEALTH_S
            if health != before:
                self._report_health()
            self._drain()
            for written in flushes:
                written.set()
            backlog = self._segments.pending_bytes if self._segments is not None else 0
            before, turn = turn, time.time() // DELIVER_S
            if backlog and (flushes or backlog >= BACKLOG_BYTES or turn != before):
                self._due.set()
        self._drain(last=True)
        self._due.set()

    def _wait(self) -> list[threading.Event]:
        """Sleep until a batch is due; returns the flushes that wait for it."""
        flushes = []
        try:
            signal = self._wake.get(timeout=BATCH_S - time.time() % BATCH_S)
            while True:
                if signal is not None:
                    flushes.append(signal)
                signal = self._wake.get_nowait()
        except queue.Empty:
            return flushes

    def _drain(self, last: bool = False) -> None:
        with self._lock:
            if last:
                self._report_health()
            items, self._items = self._items, []
            self._bytes = 0
            self._sealed = last
        if not items:
            return
        if self._segments is None:
            self.counts.dropped_disk += len(items)
            return
        known = self.counts.dropped_limit + self.counts.dropped_fault
        try:
            encoded = [batch for signal in SIGNALS for batch in self._encode(items, signal)]
            lost = self._segments.write(encoded)
        except Exception:  # out of memory, most likely; this thread must live on
            _log.warning("%d telemetry items lost", len(items), exc_info=True)
            counted = self.counts.dropped_limit + self.counts.dropped_fault - known
            self.counts.dropped_disk += len(items) - counted
            return
        self.counts.dropped_limit += lost.limit
        self.counts.dropped_disk += lost.disk
        self.counts.written += sum(batch.items for batch in encoded) - lost.disk - lost.limit
        self.counts.written_seq = self._segments.committed_seq

    def _encode(self, queued: list[_Queued], signal: Signal) -> Iterator[Batch]:
        """Requests of one signal, each within the limits of a batch."""
        items: list[Item] = []
        length = 0
        for entry in queued:
            if entry.signal != signal:
                continue
            if items and (len(items) >= BATCH_ITEMS or length + entry.size > BATCH_BYTES):
                yield from self._requests(signal, items)
                items, length = [], 0
            items.append(entry.item)
            length += entry.size
        if items:
            yield from self._requests(signal, items)

    def _requests(self, signal: Signal, items: list[Item]) -> Iterator[Batch]:
        """The items as one request, or as more when one that cannot be encoded or sent would cost the others."""
        try:
            payload = self._encoder.encode(items)
        except Exception:  # of what a library put into its span: whichever item it is, the others go
            if len(items) == 1:
                self.fault(name_of(items[0]), emitted=0)
                return
        else:
            if len(payload) <= ITEM_BYTES:
                yield Batch(signal, len(items), payload)
                return
            if len(items) == 1:
                self.counts.dropped_limit += 1
                return
        half = len(items) // 2
        yield from self._requests(signal, items[:half])
        yield from self._requests(signal, items[half:])

    def _deliver(self) -> None:
        if self._sender is None:
            return
        yield_processors()
        try:
            self._sender.run(self._stop, due=self._due)
        except OSError as error:
            _log.warning("telemetry is no longer delivered, only spooled: the spool cannot be read (%s)", error)
        finally:
            self._sender.close()

    def _report_health(self) -> None:
        """Emit the counts; ``emitted`` includes this report."""
        attributes = {
            names.PRODUCER: self._producer,
            **self.counts.report(),
            names.EMITTED: self.counts.emitted + 1,
            names.QUEUE_LENGTH: self._segments.pending if self._segments is not None else 0,
        }
        self.put("logs", self._encoder.record(names.PRODUCER_HEALTH, time.time_ns(), attributes))
