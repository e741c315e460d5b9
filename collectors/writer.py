"""The one thread that writes the store: batches in, one transaction per group, futures resolved after its commit.

Owns the write connection and the ledger. Knows neither OTLP nor HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from collectors import arrow
from collectors.decode import Columns, Decoded
from collectors.memory import MemoryLimit
from collectors.transaction import transaction
from rlinsight.wire import Signal

logger = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 1024  # 16 spools at once
MAX_QUEUED_BYTES = 64 * 1024**2
_END = object()  # nothing comes after it
MAX_GROUP_BYTES = 16 * 1024**2  # of payload in one transaction: bounds its memory and the wait of its first batch
# Of resources and scopes in its rows. Usual batches reach the limit above first; many small spans under one large
# resource took 1.9 GB of memory for 2 MB of payload.
MAX_GROUP_SHARED_BYTES = 32 * 1024**2
# That producers which deliver by the clock share a transaction, which costs 10 ms where a batch costs 1. Their threads
# run when training leaves a processor free: deliveries of one turn were seen to come up to 0.3 s apart.
PATIENCE_S = 0.5


class Overloaded(Exception):
    """The queue is full; the sender should try again later."""


class StoreFailed(Exception):
    """The store cannot be written (disk full, I/O error); nothing of the batch is stored, sending it again may work."""


class BatchRefused(Exception):
    """The store cannot hold this batch; sending it again will not help."""


@dataclass(slots=True)
class Stats:
    """Running totals since the start, and how long the latest commits took; written by the writer's thread alone."""

    batches: dict[str, int] = field(default_factory=dict)  # stored, by signal
    items: dict[str, int] = field(default_factory=dict)  # with a raw row, by signal
    rejected: dict[str, int] = field(default_factory=dict)  # items, by signal
    duplicates: dict[str, int] = field(default_factory=dict)  # batches that were stored already, by signal
    bytes: int = 0  # of payload stored
    commits: int = 0
    commit_s: float = 0.0  # from BEGIN to COMMIT, all transactions together
    failures: int = 0  # transactions undone
    on_commit: Callable[[float], None] | None = None  # told the seconds of each

    def count(self, batch: Batch, stored: bool) -> None:
        """Add a batch that was committed, or found to be stored already."""
        signal = batch.signal
        if not stored:
            self.duplicates[signal] = self.duplicates.get(signal, 0) + 1
            return
        self.batches[signal] = self.batches.get(signal, 0) + 1
        self.items[signal] = self.items.get(signal, 0) + batch.decoded.stored
        self.rejected[signal] = self.rejected.get(signal, 0) + batch.decoded.rejected
        self.bytes += batch.size


def _promise() -> Future[Any]:
    """A future that a request which is given up cannot cancel: setting its result would end the writer."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True)
class Batch:
    """One OTLP request on its way to the store. ``done`` gives True when it was stored, False when it already was."""

    batch_id: str
    producer: str | None
    seq: int | None
    signal: Signal
    size: int  # payload bytes
    received_ns: int
    decoded: Decoded
    shared: int = 0  # bytes of resource and scope in all of its rows
    patient: bool = False  # whether it may wait for others
    done: Future[bool] = field(default_factory=_promise)


@dataclass(slots=True)
class _Task:
    """Work on the store that is no batch; runs between two groups."""

    work: Callable[[duckdb.DuckDBPyConnection], Any]
    done: Future[Any] = field(default_factory=_promise)

    def run(self, con: duckdb.DuckDBPyConnection) -> None:
        try:
            self.done.set_result(self.work(con))
        except BaseException as error:  # belongs to who asked for the work
            self.done.set_exception(error)


class Writer:
    """Takes batches from any thread.

    ``problem`` says why the latest group could not be written, None when it was; ``failure`` is set when the database
    is beyond use and the process should end.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, columns: Columns, memory: MemoryLimit | None = None) -> None:
        self.stats = Stats()
        self._con = con
        self._memory = memory
        self._columns = columns
        self._incoming: dict[str, _Incoming] = {}
        self._queue: queue.Queue[Batch | _Task | None] = queue.Queue()
        self._lock = threading.Lock()
        self._queued_batches = 0
        self._queued_bytes = 0
        self._closed = False
        self.problem: str | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def queued_batches(self) -> int:
        """Batches waiting for their commit."""
        return self._queued_batches

    def has_room(self) -> bool:
        """Whether a batch would be accepted now; cheap enough to ask before decoding one."""
        return not self._closed and self._queued_batches < MAX_QUEUED_BATCHES and self._queued_bytes < MAX_QUEUED_BYTES

    def submit(self, batch: Batch) -> Future[bool]:
        """Queue a batch; its future resolves after commit. Raises Overloaded instead of waiting."""
        with self._lock:
            if not self.has_room():
                raise Overloaded(f"{self._queued_batches} batches are waiting for the store")
            self._queued_batches += 1
            self._queued_bytes += batch.size
            self._queue.put(batch)
        return batch.done

    def submit_task(self, work: Callable[[duckdb.DuckDBPyConnection], Any]) -> Future[Any]:
        """Run ``work`` on the write connection between two groups; it begins and ends its own transactions.

        Ingest waits meanwhile: long work comes in pieces. Raises Overloaded when the writer is closing.
        """
        task = _Task(work)
        with self._lock:
            if self._closed:
                raise Overloaded("the collector is leaving")
            self._queue.put(task)
        return task.done

    def close(self) -> None:
        """Accept no more, write what is queued, then checkpoint. The connection stays open."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        if self.failure is None:
            try:
                self._con.execute("CHECKPOINT")
            except duckdb.Error as error:  # nothing is lost: the next start reads the write-ahead log
                logger.warning("the store's write-ahead log stays: %s", _first_line(error))

    def _run(self) -> None:
        while True:
            group, then = self._next_group()
            if group:
                self._store(group)
                with self._lock:
                    self._queued_batches -= len(group)
                    self._queued_bytes -= sum(batch.size for batch in group)
            if isinstance(then, _Task):
                then.run(self._con)
            elif then is _END:
                return

    def _next_group(self) -> tuple[list[Batch], Any]:
        """Wait for a batch and take along what else is queued, up to a size; and what is to be done after them.

        As long as all are patient it takes what comes for a moment, too.
        """
        group: list[Batch] = []
        size = shared = 0
        until = 0.0
        while size < MAX_GROUP_BYTES and shared < MAX_GROUP_SHARED_BYTES:
            try:
                entry = self._queue.get(timeout=max(until - time.monotonic(), 0.0) if group else None)
            except queue.Empty:
                break
            if not isinstance(entry, Batch):
                return group, entry or _END
            if not entry.patient:
                until = 0.0
            elif not group:
                until = time.monotonic() + PATIENCE_S
            group.append(entry)
            size += entry.size
            shared += entry.shared
        return group, None

    def _store(self, group: list[Batch]) -> None:
        """Commit a group; when its content or size is why that fails, batch by batch: one bad batch harms no other."""
        try:
            stored = self._with_room(group)
        except (duckdb.OperationalError, duckdb.InternalError, duckdb.FatalException) as error:
            if isinstance(error, duckdb.OutOfMemoryException) and len(group) > 1:
                for batch in group:
                    self._store([batch])
            else:
                self._give_up(group, error)
        except Exception as error:  # of the content: it may raise whatever Arrow or DuckDB raise
            if len(group) == 1:
                logger.exception("batch %s cannot be stored", group[0].batch_id)
                group[0].done.set_exception(BatchRefused(f"the store refused the batch: {error}"))
                return
            for batch in group:
                self._store([batch])
        else:
            self.problem = None
            for batch in group:
                is_new = batch.batch_id in stored
                stored.discard(batch.batch_id)
                self.stats.count(batch, is_new)
                batch.done.set_result(is_new)

    def _with_room(self, group: list[Batch]) -> set[str]:
        """The transaction; of a batch that takes more memory than ingest has, with as much as queries get."""
        try:
            return self._transaction(group)
        except duckdb.OutOfMemoryException:
            if self._memory is None or len(group) > 1:
                raise
            with self._memory.wide():
                return self._transaction(group)

    def _give_up(self, group: list[Batch], error: duckdb.Error) -> None:
        message = self.problem = _first_line(error)
        logger.error("the store cannot be written: %s", message)
        if isinstance(error, duckdb.FatalException | duckdb.InternalException):
            self.failure = message  # DuckDB refuses everything from here on
        for batch in group:
            batch.done.set_exception(StoreFailed(message))

    def _transaction(self, group: list[Batch]) -> set[str]:
        """Insert the batches not stored before, with their ledger rows, in one transaction. Returns their ids."""
        began = time.perf_counter()
        try:
            with transaction(self._con):
                stored = self._insert_new(group)
        except BaseException:  # counted and passed on
            self.stats.failures += 1
            self._incoming.clear()  # what was registered in the transaction is undone with it
            raise
        seconds = time.perf_counter() - began
        self.stats.commits += 1
        self.stats.commit_s += seconds
        if self.stats.on_commit:
            self.stats.on_commit(seconds)
        return stored

    def _insert_new(self, group: list[Batch]) -> set[str]:
        fresh = {batch.batch_id: batch for batch in reversed(group)}
        # IN uses the primary key's index: 2 ms at a million batches; list_contains reads them all, 220 ms.
        marks = ", ".join("?" * len(fresh))
        known = self._con.execute(
            f"SELECT batch_id FROM ingest_batches WHERE batch_id IN ({marks})", list(fresh)
        ).fetchall()
        for (batch_id,) in known:
            del fresh[batch_id]
        rows: dict[str, list[tuple]] = {}
        for batch in fresh.values():
            for table, more in batch.decoded.rows.items():
                rows.setdefault(table, []).extend(more)
        committed_ns = time.time_ns()
        rows["ingest_batches"] = [self._ledger_row(batch, committed_ns) for batch in fresh.values()]
        for table, more in rows.items():
            if more:
                self._insert(table, arrow.table(more, self._columns[table]))
        return set(fresh)

    def _ledger_row(self, batch: Batch, committed_ns: int) -> tuple[Any, ...]:
        facts: Mapping[str, Any] = {
            "batch_id": batch.batch_id,
            "producer": batch.producer,
            "seq": batch.seq,
            "signal": batch.signal,
            "items": batch.decoded.items,
            "rows": batch.decoded.stored,
            "rejected": batch.decoded.rejected,
            "bytes": batch.size,
            "received_ns": batch.received_ns,
            "committed_ns": committed_ns,
        }
        return tuple(facts[column] for column in self._columns["ingest_batches"])

    def _insert(self, table: str, rows: pa.Table) -> None:
        if table not in self._incoming:
            incoming = _Incoming(rows)
            self._con.register(f"incoming_{table}", incoming)
            self._con.execute(f"PREPARE insert_{table} AS INSERT INTO {table} SELECT * FROM incoming_{table}")
            self._incoming[table] = incoming
        incoming = self._incoming[table]
        incoming.rows = rows
        try:
            self._con.execute(f"EXECUTE insert_{table}")
        finally:
            incoming.rows = rows.schema.empty_table()


class _Incoming:
    """What DuckDB reads the rows of one table from, in a statement planned once: of an INSERT of few rows, registering
    them and planning take most of the time.
    """

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.rows.__arrow_c_stream__(requested_schema)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
