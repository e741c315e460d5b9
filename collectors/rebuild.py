"""The domain tables anew from the raw ones: every projection over every raw row, in one transaction.

For a store whose domain rows were damaged, or were written by an older version with fewer columns. Owns what is kept
because raw rows do not hold it: the lists of tokens, which the raw rows have in outline only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from collectors import arrow, encode
from collectors.database import Database
from collectors.decode import Columns, Decoder
from collectors.projections import PROJECTIONS
from collectors.transaction import transaction
from rlinsight.errors import StoreError
from rlinsight.statements import sql_error
from rlinsight.store import require_at_rest
from rlinsight.wire import Signal

CHUNK_ROWS = 5000


class Rebuilt(NamedTuple):
    """What was done. ``incomplete`` log records had lost their arrays; their rows have none."""

    items: int
    rows: int
    incomplete: int


def rebuild(store: Path, report: Callable[[int, int], None] = lambda done, total: None) -> Rebuilt:
    """Empty the domain tables of a store and fill them again, all or nothing.

    ``report`` is told how many of how many raw rows are done. Rows of token tables that no raw row is tied to (of
    schema version 1) stay. Raises StoreError or CollectorError: no store, or one in use.
    """
    require_at_rest(store)
    with Database(store) as database:
        con = database.con
        try:
            with transaction(con):
                done = _Rebuild(con, database.columns, report).run()
        except duckdb.OperationalError as error:  # of the disk or of memory; any other is a bug
            raise StoreError(
                f"{store} was not rebuilt and is as it was: {sql_error(error)}; free some space and run this again"
            ) from None
        con.execute("CHECKPOINT")
    return done


class _Rebuild:
    def __init__(self, con: duckdb.DuckDBPyConnection, columns: Columns, report: Callable[[int, int], None]) -> None:
        self._con, self._columns, self._report = con, columns, report
        self._reader = con.cursor()  # reads what was committed before, whatever this transaction deletes
        self._decoder = Decoder(columns)
        self._lists = encode.Lists(columns)
        self._items = self._rows = self._incomplete = 0

    def run(self) -> Rebuilt:
        signals: list[Signal] = ["traces", "logs"]  # no projection reads metrics
        total = sum(self._count(encode.TABLES[signal]) for signal in signals)
        for table in dict.fromkeys(projection.table for projection in PROJECTIONS):
            tied = " WHERE item IS NOT NULL" if table in self._lists.tables else ""
            self._con.execute(f"DELETE FROM {table}{tied}")
        for signal in signals:
            statement = encode.select(signal, self._lists)
            for batch in self._reader.execute(statement).to_arrow_reader(CHUNK_ROWS):
                self._project(signal, list(encode.rows(batch)))
                self._report(self._items, total)
        return Rebuilt(self._items, self._rows, self._incomplete)

    def _count(self, table: str) -> int:
        return self._reader.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]

    def _project(self, signal: Signal, raw: list[dict[str, Any]]) -> None:
        """Insert the domain rows of raw rows."""
        if signal == "traces":
            decoded = self._decoder.traces(encode.traces(raw), "", 0)
        else:
            decoded = self._decoder.logs(encode.logs(raw, self._lists), "", 0)
            self._incomplete += sum(encode.is_incomplete(row, self._lists) for row in raw)
        self._items += len(raw)
        for table, rows in decoded.rows.items():
            if table in encode.TABLES.values():
                continue
            if table in self._lists.tables:
                rows = self._tied(table, rows, raw)
            if rows:
                self._con.register("incoming", arrow.table(rows, self._columns[table]))
                self._con.execute(f"INSERT INTO {table} SELECT * FROM incoming")
                self._con.unregister("incoming")
                self._rows += len(rows)

    def _tied(self, table: str, rows: list[tuple], raw: list[dict[str, Any]]) -> list[tuple]:
        """Rows of a token table with the batch and item of their raw rows; those of untied raw rows were kept."""
        names = list(self._columns[table])
        batch_at, item_at = names.index("batch_id"), names.index("item")
        tied = []
        for row in rows:
            source, values = raw[row[item_at]], list(row)  # decoding counts from the first of raw
            values[batch_at], values[item_at] = source["batch_id"], source["item"]
            if source["item"] is not None:
                tied.append(tuple(values))
        return tied
