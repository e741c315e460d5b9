"""A store's tables and main views as Parquet or CSV files, of one run or of all.

Owns which relations are exported and how a folder of files comes to be complete or absent. Knows no terminal.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlinsight import schema
from rlinsight.attach import connected
from rlinsight.errors import StoreError

if TYPE_CHECKING:
    import duckdb

FileFormat = Literal["parquet", "csv"]

# What people load first. Other views can be computed from the tables; `tokens` would repeat the lists a row per token.
VIEWS = ("runs", "attempts", "v_steps", "train_metrics", "groups", "rollouts", "timeline", "health")
OPTIONS: dict[FileFormat, str] = {"parquet": "FORMAT parquet, COMPRESSION zstd", "csv": "FORMAT csv, HEADER"}


class Exported(NamedTuple):
    """One file that was written; ``number`` of ``total``."""

    name: str
    rows: int
    number: int
    total: int


def export(store: Path, folder: Path, form: FileFormat, run: str | None) -> Iterator[Exported]:
    """Write ``<relation>.parquet`` or ``.csv`` files into a new ``folder``, one after the other.

    With ``run``, the rows of that run, of relations that have runs. The folder appears under its name when it is
    complete. Each file is one moment of a live store, all of them together are not. Raises StoreError: no such run,
    the folder exists, or it cannot be written.
    """
    with connected(store) as con, draft(folder) as target:
        require_run(con, run)
        target.mkdir()
        relations = _relations(con, run)
        for number, name in enumerate(relations, start=1):
            sql = f"SELECT * FROM {name}" + (f" WHERE run_id = {schema.quoted(run)}" if run is not None else "")
            file = schema.quoted(target / f"{name}.{form}")
            rows = con.execute(f"COPY (FROM in_store(?)) TO {file} ({OPTIONS[form]})", [sql]).fetchone()
            yield Exported(name, rows[0] if rows else 0, number, len(relations))


def _relations(con: duckdb.DuckDBPyConnection, run: str | None) -> list[str]:
    """All tables and the main views; with a run, those that have a run_id."""
    sql = "SELECT table_name FROM duckdb_tables() WHERE NOT internal ORDER BY 1"
    names = [row[0] for row in con.execute("FROM in_store(?)", [sql]).fetchall()] + list(VIEWS)
    if run is None:
        return names
    return [name for name in names if "run_id" in (column[0] for column in con.execute(f"DESCRIBE {name}").fetchall())]


def require_run(con: duckdb.DuckDBPyConnection, run: str | None) -> None:
    """Raises StoreError naming the newest runs unless the store holds ``run``, or it is None."""
    if run is None:
        return
    sql = f"SELECT count(*) FROM attempts WHERE run_id = {schema.quoted(run)}"
    found = con.execute("FROM in_store(?)", [sql]).fetchone()
    if not found or not found[0]:
        newest = con.execute("SELECT run_id FROM runs ORDER BY started DESC LIMIT 5").fetchall()
        known = ", ".join(row[0] for row in newest) or "none at all"
        raise StoreError(f"the store holds no run {run!r}; its newest: {known}")


@contextmanager
def draft(target: Path) -> Iterator[Path]:
    """A name beside ``target`` to write to; renamed to it at the end of the block, removed when that fails.

    Raises StoreError when ``target`` exists or its folder cannot be written.
    """
    if target.exists():
        raise StoreError(f"{target} exists and is not overwritten; name another, or remove it")
    path = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(path)  # of an export that was killed
        yield path
        path.rename(target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
