"""A store rewritten without the room of removed rows: DuckDB uses freed blocks again, but never shortens its file.

Owns the copy, its verification and the moment of replacement. The store is only read; whatever happens before that
moment, power loss included, leaves it as it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb

from collectors.database import Database
from rlinsight import schema
from rlinsight.errors import StoreError
from rlinsight.memory import memory_bytes
from rlinsight.statements import sql_error
from rlinsight.store import is_locked, require_at_rest

SPARE_BYTES = 256 * 1024**2
ORDER = ("run_id", "step", "rollout_id", "time_ns", "start_ns")  # as far as a table has them


def compact(store: Path, report: Callable[[str, int, int], None] = lambda table, done, total: None) -> tuple[int, int]:
    """Replace a store by a compact copy of itself; returns its bytes before and after.

    ``report`` is told the table that is next, and how many of how many are done. Raises StoreError: no store, one in
    use, no room for the copy, or a copy that differs.
    """
    require_at_rest(store)
    with Database(store) as database:  # brings it to this version
        database.con.execute("CHECKPOINT")
    folder = store.resolve().parent  # a link to the store stays one
    size, free = store.stat().st_size, shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise StoreError(
            f"compacting {store} needs {(size + SPARE_BYTES) >> 20} MiB beside it and {free >> 20} are free; make room"
        )
    draft, spill = folder / f"{store.name}.compact", folder / f"{store.name}.compact.tmp"
    _remove(draft, spill)  # of one that was killed
    try:
        _rewrite(store, draft, spill, report)
    except duckdb.Error as error:
        if is_locked(error):
            raise StoreError(f"{store} is in use by another process; close it there and run this again") from None
        raise sql_error(error) from None
    except OSError as error:
        raise StoreError(f"{store} could not be compacted and is as it was: {error.strerror or error}") from None
    finally:
        _remove(draft, spill)
    return size, store.stat().st_size


def _rewrite(store: Path, draft: Path, spill: Path, report: Callable[[str, int, int], None]) -> None:
    with duckdb.connect(str(draft)) as con:
        schema.apply(con, draft)
        con.execute("DELETE FROM schema_meta")
    with duckdb.connect() as con:
        con.execute(f"SET temp_directory = {schema.quoted(spill)}")
        con.execute(f"SET memory_limit = '{max(1024**3, memory_bytes() // 4)}B'")
        con.execute(f"ATTACH {schema.quoted(store)} AS old (READ_ONLY)")  # from here on nobody can write it
        if store.with_name(f"{store.name}.wal").exists():  # it would be taken for the copy's
            raise StoreError(f"{store} has a write-ahead log that cannot be merged into it now; run this again")
        con.execute(f"ATTACH {schema.quoted(draft)} AS new")
        tables = _tables(con)
        for done, (table, columns) in enumerate(tables.items()):
            report(table, done, len(tables))
            _copy(con, table, columns)
        con.execute("CHECKPOINT new")
        con.execute("DETACH new")
        draft.chmod(store.stat().st_mode & 0o777)
        _sync(draft)
        # Still attached: nobody could write the old file between its last row and this moment.
        draft.replace(store.resolve())
        _sync(draft.parent)


def _tables(con: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Columns of every table of the old store."""
    rows = con.execute(
        "SELECT table_name, list(column_name ORDER BY column_index) FROM duckdb_columns() WHERE database_name = 'old' "
        "AND table_name IN (SELECT table_name FROM duckdb_tables() WHERE database_name = 'old') GROUP BY 1 ORDER BY 1"
    ).fetchall()
    return dict(rows)


def _copy(con: duckdb.DuckDBPyConnection, table: str, columns: list[str]) -> None:
    """Copy one table, each run's rows together in the order of its steps. Raises StoreError when the copy differs."""
    order = ", ".join(column for column in ORDER if column in columns)
    by = f" ORDER BY {order}" if order else ""
    con.execute(f"INSERT INTO new.{table} BY NAME SELECT * FROM old.{table}{by}")
    # Whatever the order, equal rows have equal sums of hashes; differing ones have them by chance of 1 in 2**64.
    digest = f"SELECT count(*), sum(hash({', '.join(columns)})::HUGEINT) FROM %s.{table}"
    if con.execute(digest % "old").fetchall() != con.execute(digest % "new").fetchall():
        raise StoreError(f"the copy of {table} differs from the original; the store is as it was. Please report this")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(draft: Path, spill: Path) -> None:
    draft.unlink(missing_ok=True)
    draft.with_name(f"{draft.name}.wal").unlink(missing_ok=True)
    shutil.rmtree(spill, ignore_errors=True)
