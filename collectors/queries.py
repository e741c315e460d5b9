"""Connections of the queries that run now: they get memory, and none outlives the collector's wish to leave."""

from __future__ import annotations

import threading

import duckdb

from collectors.memory import MemoryLimit
from collectors.writer import Overloaded

CLOSE_TIMEOUT_S = 5.0
POLL_S = 0.05  # an interrupt that comes before its statement begins is lost, so it is repeated


class Queries:
    """Gives out connections for one query each. Every method may be called from any thread."""

    def __init__(self, con: duckdb.DuckDBPyConnection, memory: MemoryLimit) -> None:
        self._con, self._memory = con, memory
        self._changed = threading.Condition()
        self._open: set[duckdb.DuckDBPyConnection] = set()
        self.closed = False

    def open(self) -> duckdb.DuckDBPyConnection:
        """A connection, until ``release``. Raises Overloaded when the collector is leaving."""
        with self._changed:
            if self.closed:
                raise Overloaded("the collector is leaving")
            self._memory.widen()
            con = self._con.cursor()
            self._open.add(con)
            return con

    def release(self, con: duckdb.DuckDBPyConnection) -> None:
        """Close a connection of ``open``."""
        con.close()
        with self._changed:
            self._open.discard(con)
            self._changed.notify_all()
        self._memory.narrow()

    def lend_memory(self, seconds: float) -> None:
        """Give a query that has no connection of ours the memory of one, for so long from now on."""
        self._memory.lend(seconds)

    def close(self) -> None:
        """Give out no more, and interrupt those that are out until all are back, or for CLOSE_TIMEOUT_S."""
        with self._changed:
            self.closed = True
            for _ in range(round(CLOSE_TIMEOUT_S / POLL_S)):
                for con in self._open:
                    con.interrupt()
                if self._changed.wait_for(lambda: not self._open, POLL_S):
                    return
