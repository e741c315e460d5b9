"""The open DuckDB file: exclusive, of the right schema version, closed to the outside; and the SQL it serves.

Owns the write connection and its settings. Does not decide what is written (writer.py).
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import duckdb
import psutil

from rlinsight import schema
from rlinsight.errors import CollectorError, StoreError

LOCK_WAIT_S = 5.0  # readers hold a file at rest only while their query runs
MEMORY_SHARE = 0.25  # of the machine; training has the first claim on it
MAX_TEMP_BYTES = 10 * 1024**3


class Database:
    """An exclusively open store. Raises StoreError or CollectorError saying why it cannot be had."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.con = _open(store)
        try:
            schema.apply(self.con, store)
            self.columns = schema.columns(self.con)
            memory = max(512 * 1024**2, int(psutil.virtual_memory().total * MEMORY_SHARE))
            self.con.execute(f"SET memory_limit = '{memory}B'")
            self.con.execute(f"SET max_temp_directory_size = '{MAX_TEMP_BYTES}B'")
        except BaseException:
            self.con.close()
            raise

    def close(self) -> None:
        self.con.close()


def _open(store: Path) -> duckdb.DuckDBPyConnection:
    folder = store.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"folder {folder} of the store cannot be created ({error.strerror}); choose another --store"
        ) from None
    if store.is_dir():
        raise StoreError(f"{store} is a folder; --store names a DuckDB file, e.g. {store / 'rlinsight.duckdb'}")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return duckdb.connect(
                str(store), config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
            )
        except duckdb.Error as error:
            message = str(error).splitlines()[0]
            if "lock" not in message.lower():
                raise explain(store, error) from None
            if time.monotonic() > deadline:
                holder = re.search(r"PID (\d+)", message)
                who = f"process {holder[1]}" if holder and int(holder[1]) != os.getpid() else "another process"
                raise CollectorError(f"{store} is in use by {who}; stop it or choose another --store") from None
            time.sleep(0.1)


def explain(store: Path, error: duckdb.Error) -> StoreError:
    """Why a database file could not be opened, for the user."""
    message = str(error).splitlines()[0]
    if not os.access(store if store.exists() else store.parent, os.W_OK):
        return StoreError(f"{store} cannot be written; change its permissions or choose another --store")
    if "not a valid DuckDB database" in message or "Corrupt" in message or "checksum" in message:
        return StoreError(
            f"{store} is no DuckDB file or is damaged; nothing was changed. Move it away or choose another --store"
        )
    return StoreError(f"{store} cannot be opened: {message}")
