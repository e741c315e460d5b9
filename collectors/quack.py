"""What Quack lets through: one reading statement at a time, that has shown to end within a time limit.

Quack 1.5.5 has no read-only transactions and no time limit, cannot be told to interrupt a reader, and goes on with a
statement whose client is gone: measured, one runaway kept a core busy until the process ended. All it offers is a
question before each statement. So the statement is first run here, where it can be interrupted, and its rows are thrown
away. That doubles its cost, and ``/v1/sql`` does without; but nothing runs for ever.
"""

from __future__ import annotations

import re
import threading

import duckdb

from collectors.queries import Queries
from collectors.writer import Overloaded
from rlinsight.errors import StoreError
from rlinsight.statements import check
from rlinsight.store import TIMEOUT_S

# After a yes the statement has the memory it was rehearsed with for so long. Nothing tells when it ends; by then it has
# what it collects, sorts and groups, and is sending its rows, or holds so much that the limit stays (memory.py).
MEMORY_S = 2 * TIMEOUT_S
MAX_REHEARSALS = 4  # at once; the rest wait
_RELATION = re.compile(r"FROM \w+")  # ends, and is what rlinsight.connect() asks of each relation to learn its columns


class Gate:
    """Quack's authorization function. Called from Quack's own threads."""

    def __init__(self, queries: Queries, timeout_s: float = TIMEOUT_S) -> None:
        self._queries = queries
        self._timeout_s = timeout_s
        self._slots = threading.BoundedSemaphore(MAX_REHEARSALS)

    def __call__(self, session: str, sql: str) -> bool:
        """Whether ``session`` may run the statement. BEGIN and COMMIT are of no harm; DuckDB's ATTACH sends them."""
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) == 1 and statements[0].type == duckdb.StatementType.TRANSACTION:
                return True
            check(sql)
        except (StoreError, duckdb.Error):
            return False
        if _RELATION.fullmatch(sql):
            self._queries.lend_memory(MEMORY_S)
            return True
        if not self._slots.acquire(timeout=self._timeout_s):
            return False
        try:
            return self._ends(sql)
        finally:
            self._slots.release()

    def _ends(self, sql: str) -> bool:
        """Whether the statement ends in time. One that fails is let through: its client sees the error."""
        try:
            con = self._queries.open()
        except Overloaded:
            return False
        timer = threading.Timer(self._timeout_s, con.interrupt)
        timer.start()
        ends = False
        try:
            con.execute("BEGIN TRANSACTION READ ONLY")
            for _ in con.execute(sql).to_arrow_reader():
                pass
            ends = True
        except duckdb.InterruptException:
            pass
        except duckdb.Error:
            ends = not self._queries.closed
        finally:
            timer.cancel()
            if ends:  # before the memory of the rehearsal is taken back
                self._queries.lend_memory(MEMORY_S)
            self._queries.release(con)
        return ends
