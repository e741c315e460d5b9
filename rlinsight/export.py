"""A store's tables and main views as Parquet or CSV files: of one run, of services that belong to none, or all.

Owns which relations are exported and how a folder of files comes to be complete or absent. Knows no terminal.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlinsight import schema
from rlinsight.attach import connected
from rlinsight.errors import StoreError

if TYPE_CHECKING:
    import duckdb

FileFormat = Literal["parquet", "csv"]

RAW = ("otel_spans", "otel_logs", "otel_metrics")
# What people load first. Other views can be computed from the tables; `tokens` would repeat the lists a row per token.
VIEWS = ("runs", "attempts", "v_steps", "train_metrics", "groups", "rollouts", "timeline", "health")
OPTIONS: dict[FileFormat, str] = {"parquet": "FORMAT parquet, COMPRESSION zstd", "csv": "FORMAT csv, HEADER"}


class Exported(NamedTuple):
    """One file that was written; ``number`` of ``total``."""

    name: str
    rows: int
    number: int
    total: int


def export(
    store: Path, folder: Path, form: FileFormat, run: str | None, services: Sequence[str] = ()
) -> Iterator[Exported]:
    """Write ``<relation>.parquet`` or ``.csv`` files into a new ``folder``, one after the other.

    With ``run``, the rows of that run, of relations that have runs; with ``services``, what those sent outside of runs.
    The folder appears under its name when it is complete. Each file is one moment of a live store, all of them together
    are not. Raises StoreError: no such run or service, the folder exists, or it cannot be written.
    """
    with connected(store) as con, draft(folder) as target:
        rows = condition(con, run, services)
        target.mkdir()
        relations = _relations(
            con, {"service_name", "run_id"} if services else {"run_id"} if run is not None else set()
        )
        for number, name in enumerate(relations, start=1):
            sql = f"SELECT * FROM {name} WHERE {rows}"
            file = schema.quoted(target / f"{name}.{form}")
            written = con.execute(f"COPY (FROM in_store(?)) TO {file} ({OPTIONS[form]})", [sql]).fetchone()
            yield Exported(name, written[0] if written else 0, number, len(relations))


def _relations(con: duckdb.DuckDBPyConnection, columns: set[str]) -> list[str]:
    """All tables and the main views that have these columns."""
    sql = "SELECT table_name FROM duckdb_tables() WHERE NOT internal ORDER BY 1"
    names = [row[0] for row in con.execute("FROM in_store(?)", [sql]).fetchall()] + list(VIEWS)
    if not columns:
        return names
    return [name for name in names if columns <= {column[0] for column in con.execute(f"DESCRIBE {name}").fetchall()}]


def condition(con: duckdb.DuckDBPyConnection, run: str | None, services: Sequence[str] = ()) -> str:
    """What a row has to meet, in SQL: to be of the run, or of the services and of no run; anything without either.

    Raises StoreError, which names some that there are, unless the store holds the run, or something of each service.
    """
    if run is not None:
        _require_run(con, run)
        return f"run_id = {schema.quoted(run)}"
    if not services:
        return "true"
    raw = " UNION ".join(f"SELECT service_name FROM {table} WHERE run_id IS NULL" for table in RAW)
    known = {row[0] for row in con.execute("FROM in_store(?)", [raw]).fetchall()} - {None}
    if unknown := [service for service in services if service not in known]:
        some = ", ".join(sorted(known)[:20]) or "none at all"
        raise StoreError(f"no service {unknown[0]!r} sent anything outside of runs; those that did: {some}")
    return f"run_id IS NULL AND service_name IN ({', '.join(map(schema.quoted, services))})"


def _require_run(con: duckdb.DuckDBPyConnection, run: str) -> None:
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
