"""A DuckDB connection of one's own to a store: ``connect()``, for joins with other data, notebooks and exports.

Owns how a client reaches the store's relations under their plain names, live and at rest. ``store.query`` is the way
for one statement with limits. Loads duckdb on first use only.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlinsight import schema
from rlinsight.errors import StoreError
from rlinsight.statements import sql_error
from rlinsight.store import (
    Endpoint,
    HandOver,
    explain,
    is_locked,
    missing,
    read_endpoint,
    resolve,
    until_handed_over,
)

if TYPE_CHECKING:
    import duckdb

TABLES = "SELECT table_name FROM duckdb_tables() WHERE NOT internal ORDER BY 1"
RELATIONS = f"({TABLES}) UNION ALL SELECT view_name FROM duckdb_views() WHERE NOT internal"


def connect(store: Path | str | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB connection in which the store's tables, views and macros have their plain names.

    It reads the store and never writes it; tables of your own, files and other databases can be used beside it. At rest
    the store is attached read-only as ``store``, and no collector can start until the connection is closed. While a
    collector runs, each relation is fetched from it, with only the columns a statement uses but all their rows;
    ``FROM in_store('SELECT ...')`` runs a statement where the store is, and works at rest too. Live, macros that read
    tables exist inside ``in_store`` alone, and the collector stops what takes it over 30 seconds. ``store`` defaults to
    RLINSIGHT_STORE, then runs/rlinsight.duckdb. Raises StoreError: no store there, a damaged or newer file.
    """
    path = resolve(store)

    def attempt() -> duckdb.DuckDBPyConnection:
        endpoint = read_endpoint(path)
        return _attach_collector(endpoint) if endpoint is not None else _attach_file(path)

    return until_handed_over(path, attempt)


@contextmanager
def connected(store: Path | str | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """``connect()`` for the length of a block, in which DuckDB's errors are StoreErrors."""
    import duckdb

    con = connect(store)
    try:
        yield con
    except duckdb.Error as error:
        if "Authorization failed" in str(error):
            raise StoreError("the collector stopped a statement after 30 s; take one run, or ask at rest") from None
        raise sql_error(error) from None
    finally:
        con.close()


def _attach_collector(endpoint: Endpoint) -> duckdb.DuckDBPyConnection:
    import duckdb

    con = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
    uri, token = endpoint.sql, endpoint.token
    try:
        for name in ("httpfs", "quack"):  # quack's client part needs httpfs
            con.execute(f"LOAD '{extension(name)}'")
        con.execute(f"CREATE MACRO in_store(q) AS TABLE FROM quack_query('{uri}', q, token = '{token}')")
        names = [row[0] for row in con.execute("FROM in_store(?)", [RELATIONS]).fetchall()]
        # Not ATTACH: of an attached Quack database, a statement can read one relation only (1.5.5).
        for name in names:
            con.execute(f"CREATE VIEW {name} AS FROM quack_query('{uri}', 'FROM {name}', token = '{token}')")
        # Macros that read relations would bind each of them anew, seconds for all: those are for in_store().
        reading = re.compile(rf"\b({'|'.join(names)})\b")
        for file in schema.files():
            if file.kind == "macros" and not reading.search(re.sub("--.*", "", file.sql)):
                con.execute(file.sql)
    except (duckdb.IOException, duckdb.HTTPException) as error:
        con.close()
        raise HandOver(f"collector {endpoint.pid} does not answer ({str(error).splitlines()[0]})") from None
    except BaseException:  # also when interrupted: the connection, and a file's lock, must go
        con.close()
        raise
    return con


def _attach_file(path: Path) -> duckdb.DuckDBPyConnection:
    import duckdb

    if not path.is_file():
        raise missing(path)
    con = duckdb.connect()
    try:
        con.execute(f"ATTACH {schema.quoted(path)} AS store (READ_ONLY)")
        con.execute("USE store")
        version = schema.stored_version(con, path)
        con.execute("USE memory")
        if version is None:
            raise StoreError(f"{path} is empty; fill it with 'rlinsight train CONFIG'")
        con.execute("CREATE MACRO in_store(q) AS TABLE FROM query(q)")
        for (name,) in con.execute(TABLES if version == schema.VERSION else RELATIONS).fetchall():
            con.execute(f"CREATE VIEW {name} AS FROM store.{name}")
        for file in schema.files() if version == schema.VERSION else ():
            if file.kind != "tables":
                con.execute(file.sql)
    except duckdb.Error as error:
        con.close()
        if is_locked(error):
            raise HandOver(str(error).splitlines()[0]) from None
        raise explain(path, error) from None
    except BaseException:  # also when interrupted: the connection, and a file's lock, must go
        con.close()
        raise
    return con


def extension(name: str) -> Path:
    """The signed extension file inside its Python package: no download, the same on every machine.

    Raises StoreError when the package is missing or of another DuckDB version.
    """
    import duckdb

    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    if spec is None or spec.origin is None:
        raise StoreError(f"package duckdb-extension-{name} is missing; install it in version {duckdb.__version__}")
    path = Path(spec.origin).parent / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
    if not path.is_file():
        raise StoreError(f"{path} is missing; install duckdb-extension-{name}=={duckdb.__version__}")
    return path
