"""When the write-ahead log goes into the database file: once it is large, and only while the disk has room for it.

DuckDB's own checkpoint inside a COMMIT cannot be undone: on a full disk it invalidates the database, and the collector
would have to end. A commit that finds no room is rolled back and leaves everything usable.
"""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

from collectors.writer import Overloaded, Writer

# Each checkpoint packs the open row groups again: at DuckDB's default of 16 MB a span costs 11 us to insert, at this 7.
# What the log holds is in memory too, and counts against DuckDB's limit there (memory.py).
WAL_BYTES = 48 * 1024**2
ROOM = 2  # times the log: the file grows by less, since the log is not compressed

logger = logging.getLogger(__name__)


class Checkpoints:
    """Asks the writer for a checkpoint when one is due. Used by one thread."""

    def __init__(self, store: Path, writer: Writer) -> None:
        self._store, self._writer = store, writer
        self._wal = store.with_name(f"{store.name}.wal")
        self._running: Future[Any] | None = None
        self._warned = False

    def look(self) -> None:
        """Start one if it is due. Call this a few times a second."""
        if self._running is not None and not self._running.done():
            return
        try:
            size = self._wal.stat().st_size
            if size < WAL_BYTES:
                return
            free = shutil.disk_usage(self._store.parent).free
        except OSError:
            return
        if free < ROOM * size:
            if not self._warned:
                logger.warning("%d MiB are free: the write-ahead log stays until there is room for it", free >> 20)
            self._warned = True
            return
        self._warned = False
        with suppress(Overloaded):
            self._running = self._writer.submit_task(_checkpoint)


def _checkpoint(con: duckdb.DuckDBPyConnection) -> None:
    try:
        con.execute("CHECKPOINT")
    except duckdb.Error as error:  # nothing is lost; the next look tries again
        logger.warning("the write-ahead log stays: %s", str(error).splitlines()[0])
