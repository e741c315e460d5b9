"""How much memory DuckDB may use: little while it only takes in data, much while queries run.

Its caches, and a checkpoint's, grow to whatever the limit is and stay there; ingest is no faster for it. A lower limit
makes DuckDB let go of cached blocks at once, and it has no other statement for that.
"""

from __future__ import annotations

import duckdb

INGEST_BYTES = 160 * 1024**2
QUERY_BYTES = 2 * 1024**3  # of all queries together; what takes more is spilled to disk
SHARE = 0.25  # of what the machine or the control group has, where that is less: training has the first claim


class MemoryLimit:
    """The limit of one database, wide at first; ``available`` is the machine's or control group's. Not thread-safe."""

    def __init__(self, con: duckdb.DuckDBPyConnection, available: int) -> None:
        self._con = con.cursor()
        self._query_bytes = min(QUERY_BYTES, int(available * SHARE))
        self._ingest_bytes = min(INGEST_BYTES, self._query_bytes)
        self.widen()

    def widen(self) -> None:
        """Queries run, or a rebuild does."""
        self._set(self._query_bytes)

    def narrow(self) -> None:
        """No query runs any more; where one through Quack still holds more, the limit stays."""
        try:
            self._set(self._ingest_bytes)
        except duckdb.OutOfMemoryException:  # the limit is set all the same
            self.widen()

    def _set(self, size: int) -> None:
        self._con.execute(f"SET memory_limit = '{size}B'")
