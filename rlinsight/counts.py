"""A producer's counters, in a page of shared memory that outlives a killed process.

Emitting must not wait for a disk, and a plain object dies with its process, so the counters live in /dev/shm: what was
emitted but not yet on disk when a producer was killed stays a known number. Without /dev/shm it is unknown. The page
is removed at an orderly end; one that is still there belongs to a living or a killed producer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Self

from rlinsight import names

SHARED_MEMORY = Path("/dev/shm")


class Counts(ctypes.Structure):
    """Items since setup, cumulative.

    Each field has one writer: emit calls, under the queue's lock; the writer thread; the sender thread; or the one that
    collects metrics.
    """

    _fields_ = (
        ("emitted", ctypes.c_int64),
        ("dropped_queue", ctypes.c_int64),
        ("dropped_fault", ctypes.c_int64),
        ("overhead_ns", ctypes.c_int64),
        ("dropped_limit", ctypes.c_int64),  # from here: writer thread
        ("dropped_disk", ctypes.c_int64),
        ("written", ctypes.c_int64),  # fsynced
        ("written_seq", ctypes.c_int64),  # highest batch that ``written`` includes
        ("sent", ctypes.c_int64),  # from here: sender thread
        ("rejected", ctypes.c_int64),
        ("retried", ctypes.c_int64),
        ("labels_dropped", ctypes.c_int64),  # emit calls again
        ("overflowing", ctypes.c_int64),  # the thread that collects metrics
    )

    @classmethod
    def create(cls, producer: str) -> Self:
        """Counters at zero; private to the process where there is no shared memory."""
        try:
            file = os.open(_page(producer), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return cls()
        try:
            # Allocates the page now: a full /dev/shm must be an error here, not a SIGBUS in an emit call.
            os.posix_fallocate(file, 0, ctypes.sizeof(cls))
            return cls.from_buffer(mmap.mmap(file, ctypes.sizeof(cls)))
        except OSError:
            remove(producer)
            return cls()
        finally:
            os.close(file)

    @property
    def dropped(self) -> int:
        """Items that will never be delivered, for reasons the producer knows of."""
        return self.dropped_queue + self.dropped_limit + self.dropped_disk + self.dropped_fault

    def report(self) -> dict[str, int]:
        """The counters as attributes of a health event."""
        return {
            names.EMITTED: self.emitted,
            names.SENT: self.sent,
            names.REJECTED: self.rejected,
            names.RETRIED: self.retried,
            names.DROPPED_QUEUE: self.dropped_queue,
            names.DROPPED_LIMIT: self.dropped_limit,
            names.DROPPED_DISK: self.dropped_disk,
            names.DROPPED_FAULT: self.dropped_fault,
            names.OVERHEAD_NS: self.overhead_ns,
            names.LABELS_DROPPED: self.labels_dropped,
            names.METRICS_OVERFLOWING: self.overflowing,
        }


def of_killed(producer: str) -> Counts | None:
    """The counters of a producer that did not end in order; None if it did, or ran where this process cannot see."""
    try:
        page = _page(producer).read_bytes()
    except OSError:
        return None
    return Counts.from_buffer_copy(page) if len(page) >= ctypes.sizeof(Counts) else None


def correct(producer: str, counts: Counts) -> None:
    """Replace a killed producer's counters, for whoever delivers the rest of its spool."""
    _page(producer).write_bytes(bytes(counts))


def remove(producer: str) -> None:
    """Forget the counters."""
    _page(producer).unlink(missing_ok=True)


def _page(producer: str) -> Path:
    return SHARED_MEMORY / f"rlinsight-{producer}"
