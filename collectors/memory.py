"""How much memory DuckDB may use: little while it only takes in data, much while queries run.

Its caches, and a checkpoint's, grow to whatever the limit is and stay there; ingest is no faster for it. A lower limit
makes DuckDB let go of cached blocks at once, and it has no other statement for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from rlinsight.memory import query_bytes

INGEST_BYTES = 160 * 1024**2


class MemoryLimit:
    """The limit of one database: wide until the first ``narrow``, for whoever has the store to itself, as a rebuild.

    ``available`` is the machine's or control group's memory. Every method may be called from any thread.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, available: int) -> None:
        self._con = con.cursor()
        self._lock = threading.RLock()
        self._closed = False
        self._users = 1
        self._lent_until = 0.0  # time.monotonic()
        self._timer: threading.Timer | None = None  # one, for all that was lent
        self._query_bytes = query_bytes(available)
        self._ingest_bytes = min(INGEST_BYTES, self._query_bytes)
        self._set(self._query_bytes)

    @contextmanager
    def wide(self) -> Iterator[None]:
        """Much memory for the block."""
        self.widen()
        try:
            yield
        finally:
            self.narrow()

    def widen(self) -> None:
        """Somebody needs much memory from here on."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._set(self._query_bytes)

    def narrow(self) -> None:
        """Somebody needs it no more. Where a query through Quack still holds more than ingest gets, the limit stays."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            try:
                self._set(self._ingest_bytes)
            except duckdb.OutOfMemoryException:  # the limit is set all the same
                self._set(self._query_bytes)

    def lend(self, seconds: float) -> None:
        """Somebody needs much memory from here on and will not tell when no more: for so long, at least."""
        with self._lock:
            self._lent_until = time.monotonic() + seconds
            if self._timer is None and not self._closed:
                self.widen()
                self._take_back_in(seconds)

    def _take_back_in(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._take_back)
        self._timer.daemon = True
        self._timer.start()

    def _take_back(self) -> None:
        """What was lent, unless somebody was lent it anew meanwhile."""
        with self._lock:
            left = self._lent_until - time.monotonic()
            if self._closed:
                return
            if left > 0:
                self._take_back_in(left)
            else:
                self._timer = None
                self.narrow()

    def close(self) -> None:
        """Let go of the database, which is about to be closed."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._con.close()

    def _set(self, size: int) -> None:
        if not self._closed:
            self._con.execute(f"SET memory_limit = '{size}B'")
