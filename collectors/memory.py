"""How much memory DuckDB may use: little while it only takes in data, much while queries run.

Its caches, and a checkpoint's, grow to whatever the limit is and stay there; ingest is no faster for it. A lower limit
makes DuckDB let go of cached blocks at once, and it has no other statement for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

INGEST_BYTES = 160 * 1024**2
QUERY_BYTES = 2 * 1024**3  # of all queries together; what takes more is spilled to disk
SHARE = 0.25  # of what the machine or the control group has, where that is less: training has the first claim


class MemoryLimit:
    """The limit of one database: wide until the first ``narrow``, for whoever has the store to itself, as a rebuild.

    ``available`` is the machine's or control group's memory. Every method may be called from any thread.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, available: int) -> None:
        self._con = con.cursor()
        self._lock = threading.Lock()
        self._users = 1
        self._query_bytes = min(QUERY_BYTES, int(available * SHARE))
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

    def _set(self, size: int) -> None:
        self._con.execute(f"SET memory_limit = '{size}B'")
