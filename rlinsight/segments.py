"""A producer's spool on disk: a first-in first-out queue of batches in fsynced segment files, safe against kill -9.

One folder per producer, locked by whoever owns it (the producer, or one deliverer after its death). A segment is a row
of records (wire.py), which are immutable and keep their sequence number for ever, so delivering one twice is harmless.
Does not know OTLP or HTTP.

When the folder reaches its byte cap new batches are refused, and those on disk stay: a run's history is then complete
up to a point, so its joins hold, while dropping the oldest would lose the run's start and every root. Age drops none
either: what is there has no other copy, and goes as soon as a collector takes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlinsight.wire import HEADER, Batch, read_record, record

SEGMENT_BYTES = 8 * 1024**2  # freed as a whole, so this is also what a killed producer may send again
LOCK = "lock"
OWNER = "owner"
DEAD_LETTERS = "dead-letters"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Lost:
    """Items of a write that did not reach the disk."""

    limit: int = 0  # over the byte cap
    disk: int = 0  # the write or the fsync failed


@dataclass(slots=True)
class _Segment:
    path: Path
    committed: int  # bytes that are fsynced; the reader goes no further


class Segments:
    """The queue. One thread writes; one thread peeks and acknowledges; every method may be called from both."""

    def __init__(self, path: Path, lock_fd: int, max_bytes: int) -> None:
        self.path = path
        self.producer = path.name
        self.torn_batches = self.torn_items = 0  # met while reading; only a killed producer leaves any
        self._lock_fd = lock_fd
        self._max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // 8)
        self._changed = threading.Condition()
        self._segments: deque[_Segment] = deque()
        self._offset = 0  # of the next record to deliver, in the oldest segment
        self._ends: deque[int] = deque()  # behind each record last peeked and not acknowledged
        self._pending = self._pending_bytes = 0  # batches on disk and not acknowledged
        self._used = 0
        self._seq = self._settled_seq = self._committed_seq = 0
        self._file = -1
        self._number = 0
        self._warned = False
        self._closed = False

    @classmethod
    def create(cls, root: Path, producer: str, max_bytes: int, owner: bytes) -> Self:
        """A new, empty folder ``root/producer``. ``owner`` describes the producer to a deliverer. Raises OSError."""
        # Born under a hidden name, so that no deliverer can lock it first and take it for a dead producer's.
        hidden, path = root / f".{producer}", root / producer
        hidden.mkdir(parents=True, mode=0o700)
        (hidden / OWNER).write_bytes(owner)
        (hidden / LOCK).touch(0o600)
        lock_fd = _lock(hidden)
        if lock_fd is None:
            raise OSError(f"{hidden} is locked by another process")
        hidden.rename(path)
        return cls(path, lock_fd, max_bytes)

    @classmethod
    def adopt(cls, path: Path) -> Self | None:
        """The folder of a dead producer; None while its producer lives or another process delivers it."""
        lock_fd = _lock(path)
        if lock_fd is None:
            return None
        self = cls(path, lock_fd, max_bytes=0)
        for segment in sorted(path.glob("*.seg")):
            self._segments.append(_Segment(segment, segment.stat().st_size))
        return self

    def write(self, batches: Sequence[Batch]) -> Lost:
        """Append and fsync batches; what does not fit or cannot be written is dropped and reported."""
        lost = Lost()
        written: list[Batch] = []  # since the last fsync
        room = self._max_bytes - self._used
        for batch in batches:
            size = HEADER.size + len(batch.payload)
            if size > room:
                lost.limit += batch.items
                continue
            try:
                if self._file < 0 or os.lseek(self._file, 0, os.SEEK_CUR) >= self._segment_bytes:
                    self._commit(written)
                    self._rotate()
                written.append(batch)
                self._seq += 1
                _write_all(self._file, record(batch, self._seq))
                room -= size
            except OSError as error:
                if not written or written[-1] is not batch:
                    written.append(batch)
                self._roll_back(written, lost, error)
                written.clear()
        try:
            self._commit(written)
        except OSError as error:
            self._roll_back(written, lost, error)
        return lost

    def _commit(self, batches: list[Batch]) -> None:
        """Make what was written since the last commit durable and visible to the reader."""
        if not batches:
            return
        os.fsync(self._file)
        with self._changed:
            segment, end = self._segments[-1], os.lseek(self._file, 0, os.SEEK_CUR)
            self._used += end - segment.committed
            self._pending_bytes += end - segment.committed
            segment.committed = end
            self._pending += len(batches)
            self._committed_seq = self._seq
            self._changed.notify_all()
        batches.clear()

    def _rotate(self) -> None:
        self._number += 1
        path = self.path / f"{self._number:08d}.seg"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._close_file()
        self._file = file
        with self._changed:
            self._segments.append(_Segment(path, 0))
        _fsync_folder(self.path)

    def _roll_back(self, batches: list[Batch], lost: Lost, error: OSError) -> None:
        """Forget a failed write. Its sequence numbers stay used, in case the disk kept some of it after all."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "telemetry is being dropped: %s cannot be written (%s); free some space there", self.path, error
            )
        lost.disk += sum(batch.items for batch in batches)
        if self._file < 0:
            return
        try:
            os.ftruncate(self._file, self._segments[-1].committed)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self._close_file()  # the next write starts a new segment

    @property
    def owner(self) -> bytes:
        """What ``create`` was told about the producer. Raises OSError."""
        return (self.path / OWNER).read_bytes()

    @property
    def pending(self) -> int:
        """Batches waiting for their acknowledgement."""
        return self._pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of these batches."""
        return self._pending_bytes

    @property
    def committed_seq(self) -> int:
        """Highest sequence number on disk."""
        return self._committed_seq

    def beyond(self, seq: int) -> tuple[int, int]:
        """Items of the whole records numbered above ``seq``, and the highest number among them."""
        items = 0
        for segment in self._segments:
            with segment.path.open("rb") as file:
                length = 1
                while length:
                    batch, length, _ = read_record(file)
                    if batch is not None and batch.seq > seq:
                        items, seq = items + batch.items, batch.seq
        return items, seq

    def peek(self, timeout_s: float) -> Batch | None:
        """The oldest batch that is not acknowledged; waits up to ``timeout_s`` seconds for one."""
        return next(iter(self.peek_many(timeout_s, 1, 0)), None)

    def peek_many(self, timeout_s: float, records: int, size: int) -> list[Batch]:
        """The oldest batches that are not acknowledged; waits up to ``timeout_s`` seconds for one.

        At most ``records``, and together ``size`` bytes unless it is a single one.
        """
        with self._changed:
            batches = self._read(records, size)
            if not batches and timeout_s > 0 and not self._closed:
                self._changed.wait(timeout_s)
                batches = self._read(records, size)
            return batches

    def ack(self, batch: Batch) -> None:
        """Forget the first of the batches last peeked; a later peek deletes its segment when nothing in it is left."""
        with self._changed:
            if self._closed:
                return
            end = self._ends.popleft()
            self._pending -= 1
            self._pending_bytes -= end - self._offset
            self._offset = end
            self._settled_seq = batch.seq
            self._changed.notify_all()

    def bury(self, batch: Batch) -> None:
        """Move the first of the batches last peeked to the dead-letter file, kept for a person to look at."""
        kept = record(batch, batch.seq)
        try:
            file = os.open(self.path / DEAD_LETTERS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, kept)
            finally:
                os.close(file)
            with self._changed:
                self._used += len(kept)
        except OSError as error:
            _log.warning("a refused telemetry batch could not be kept in %s: %s", self.path / DEAD_LETTERS, error)
        self.ack(batch)

    def wait_settled(self, seq: int, timeout_s: float) -> bool:
        """Whether every batch up to ``seq`` is acknowledged or buried within ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled_seq >= seq or self._closed, max(timeout_s, 0)) and (
                self._settled_seq >= seq
            )

    def close(self) -> None:
        """Let go of the folder: removed if nothing is left in it, else free for a deliverer."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._close_file()
            self._changed.notify_all()
            if not self._unread():
                for segment in self._segments:
                    segment.path.unlink(missing_ok=True)
                if not (self.path / DEAD_LETTERS).exists():
                    shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)

    def abandon(self) -> None:
        """In a forked child: a lock must end with its producer, not with the last child that inherited it."""
        self._closed = True
        os.close(self._lock_fd)

    def _unread(self) -> bool:
        offset = self._offset
        for segment in self._segments:
            if offset < segment.committed:
                return True
            offset = 0
        return False

    def _read(self, records: int, size: int) -> list[Batch]:
        """Records from the read position on, of one segment, up to a damaged one; those it begins with are skipped."""
        while self._segments and not self._closed:
            segment = self._segments[0]
            if self._offset >= segment.committed:
                if not self._free_read_segments():
                    return []
                continue
            batches: list[Batch] = []
            self._ends.clear()
            end = self._offset
            with segment.path.open("rb") as file:
                file.seek(end)
                batch, length, items = read_record(file)
                while batch is not None and not (batches and end + length - self._offset > size):
                    end += length
                    batches.append(batch)
                    self._ends.append(end)
                    if len(batches) == records or end >= segment.committed:
                        break
                    batch, length, _ = read_record(file)
            if batches:
                return batches
            self.torn_batches += 1
            self.torn_items += items
            self._offset = self._offset + length if length else segment.committed
        return []

    def _free_read_segments(self) -> bool:
        """Delete the oldest segment if it is read to its end and no longer written."""
        segment = self._segments[0]
        if self._offset < segment.committed or (self._file >= 0 and segment is self._segments[-1]):
            return False
        segment.path.unlink(missing_ok=True)
        self._used -= segment.committed
        self._segments.popleft()
        self._offset = 0
        return True

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _fsync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> int | None:
    """Descriptor holding the folder's lock, which ends with its process; None if the lock is taken or gone."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # Its holder may just have delivered and removed the folder: then there is nothing left in it to do twice.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
