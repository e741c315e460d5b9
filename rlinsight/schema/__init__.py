"""The store's schema: SQL files in manifest order, its version, the checks before any of it runs, and migrations.

Owns what a store must look like. Does not open databases: functions take a DuckDB connection, so importing this loads
no duckdb.

Whoever changes the columns of a table changes its file under ``tables/`` and adds the ``ALTER TABLE ... ADD COLUMN IF
NOT EXISTS`` to ``migrations/<VERSION>.sql``; a new table needs its file only. VERSION rises once per release.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlinsight import __version__
from rlinsight.errors import StoreError

VERSION = 2
ROOT = Path(__file__).parent


class SqlFile(NamedTuple):
    """One object of the schema: ``kind`` tables, macros or views; ``comment`` is the text above its statement."""

    kind: str
    name: str
    comment: str
    sql: str


def files(root: Path = ROOT) -> list[SqlFile]:
    """The SQL files in manifest order. Raises StoreError when the manifest and the folder differ."""
    lines = (root / "manifest.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.sql")} - {
        f"migrations/{path.name}" for path in (root / "migrations").glob("*.sql")
    }
    for problem, paths in (("missing from the folder", set(listed) - found), ("not listed in it", found - set(listed))):
        if paths:
            raise StoreError(
                f"schema manifest {root / 'manifest.txt'}: {', '.join(sorted(paths))} {problem}; add or remove"
            )
    return [_read(root, path) for path in listed]


def _read(root: Path, path: str) -> SqlFile:
    sql = (root / path).read_text(encoding="utf-8")
    comment = " ".join(line[2:].strip() for line in re.match(r"(--[^\n]*\n)*", sql)[0].splitlines())  # type: ignore[index]
    return SqlFile(path.partition("/")[0], Path(path).stem, comment, sql)


def stored_version(con: Any, store: Path) -> int | None:
    """Schema version of an open database; None when it is empty.

    Raises StoreError for a database of something else, and for one written by a newer rlinsight.
    """
    relations = {row[0] for row in con.execute("SELECT table_name FROM duckdb_tables() WHERE NOT internal").fetchall()}
    if not relations:
        return None
    if "schema_meta" not in relations:
        raise StoreError(
            f"{store} holds tables of something else ({', '.join(sorted(relations)[:3])}); choose another --store"
        )
    version = con.execute("SELECT max(version) FROM schema_meta").fetchone()[0]
    if version is None or version > VERSION:
        raise StoreError(
            f"{store} was written by schema version {version}, this rlinsight knows {VERSION}; upgrade rlinsight"
        )
    return version


def apply(con: Any, store: Path) -> None:
    """Bring an open, writable database to this version, all or nothing: tables of an older one are migrated, and
    those of an earlier state of this one get the columns that they lack.

    One of this version that has every object, and the hash of these very files, is left alone, and with it what
    somebody changed inside an object by hand. The hash is written with the objects, so after a failure the next start
    does it all again.

    Raises StoreError before any change, or with every change undone when a migration fails.
    """
    version = stored_version(con, store)
    if version == VERSION and _is_whole(con):
        return
    con.execute("BEGIN")
    try:
        _create_missing_tables(con)
        if version is None:
            con.execute("INSERT INTO schema_meta VALUES (?, ?, ?, NULL)", [VERSION, __version__, time.time_ns()])
        for number in range(version or VERSION, VERSION):
            con.execute(_migration(number + 1))
        if version == VERSION:  # of an earlier state of it: columns were added since
            for statement in re.findall(r"^ALTER TABLE \w+ ADD COLUMN IF NOT EXISTS .*;", _migration(VERSION), re.M):
                con.execute(statement)
        for file in files():
            if file.kind != "tables":
                con.execute(file.sql)
            if file.kind != "macros":
                target = "TABLE" if file.kind == "tables" else "VIEW"
                con.execute(f"COMMENT ON {target} {file.name} IS {quoted(file.comment)}")
        con.execute("UPDATE schema_meta SET version = ?, views_hash = ?", [VERSION, views_hash()])
        con.execute("COMMIT")
    except Exception as error:  # whatever it is, the old version must stay whole
        with suppress(Exception):  # a failed COMMIT has ended the transaction
            con.execute("ROLLBACK")
        if version in (None, VERSION):
            raise
        raise StoreError(
            f"{store} could not be brought from schema version {version} to {VERSION} and was left as it was "
            f"({str(error).splitlines()[0]}); use the rlinsight that wrote it, and report this"
        ) from error


def _migration(version: int) -> str:
    """What makes a store of this version of one of the version before."""
    return (ROOT / "migrations" / f"{version}.sql").read_text(encoding="utf-8")


def _create_missing_tables(con: Any) -> None:
    """All tables of a new store, the new ones of an older store. Migrations alter tables that exist by then."""
    existing = {row[0] for row in con.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    for file in files():
        if file.kind == "tables" and file.name not in existing:
            con.execute(file.sql)


def _is_whole(con: Any) -> bool:
    """Whether a database of this version has each of its tables, macros and views."""
    found = con.execute(
        "SELECT table_name FROM duckdb_tables() UNION SELECT view_name FROM duckdb_views() UNION "
        "SELECT function_name FROM duckdb_functions() WHERE NOT internal"
    ).fetchall()
    (known,) = con.execute("SELECT views_hash FROM schema_meta").fetchone()
    return known == views_hash() and {file.name for file in files()} <= {row[0] for row in found}


def views_hash() -> str:
    """What tells this version's objects, as their files define and describe them, from those of others."""
    return hashlib.sha256("\n".join(file.sql for file in files()).encode()).hexdigest()


def shadow_old_views(con: Any) -> None:
    """Put this version's macros and views before those of an open, read-only store, if it holds others.

    Views live in the file, so a store at rest keeps those of its last collector. Only for tables of this VERSION; the
    shadows are temporary and the file stays as it is.
    """
    cursor = con.execute("FROM schema_meta")
    meta = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
    if meta["version"] != VERSION or meta.get("views_hash") == views_hash():
        return
    for file in files():
        if file.kind != "tables":
            con.execute(file.sql.replace("CREATE OR REPLACE", "CREATE OR REPLACE TEMP", 1))
        if file.kind == "views":
            con.execute(f"COMMENT ON VIEW temp.{file.name} IS {quoted(file.comment)}")


def quoted(text: str | Path) -> str:
    """A text or path as an SQL literal, for statements that cannot take parameters."""
    return "'" + str(text).replace("'", "''") + "'"


def columns(con: Any) -> dict[str, dict[str, str]]:
    """Type of every column of every table, in table order: ``{table: {column: SQL type}}``."""
    rows = con.execute(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal "
        "AND table_name IN (SELECT table_name FROM duckdb_tables()) ORDER BY table_name, column_index"
    ).fetchall()
    tables: dict[str, dict[str, str]] = {}
    for table, column, sql_type in rows:
        tables.setdefault(table, {})[column] = sql_type
    return tables
