"""The open DuckDB file: exclusive, of the right schema version, closed to the outside; and the SQL it serves.

Owns the write connection and its settings. Does not decide what is written (writer.py).
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

from collectors import backup
from collectors.memory import MemoryLimit
from collectors.quack import Gate
from collectors.queries import Queries
from rlinsight import schema
from rlinsight.attach import extension
from rlinsight.errors import CollectorError, StoreError
from rlinsight.memory import memory_bytes
from rlinsight.store import explain, is_locked

# Readers hold a file while their query runs, a leaving collector until it has drained and checkpointed.
LOCK_WAIT_S = 15.0
# Nothing is downloaded, and no commit makes a checkpoint: see checkpoints.py. Checkpoints do not merge row groups;
# DuckDB rewrites them until they hold 122,880 rows, which of token lists is gigabytes: 20 million tokens took 19 bytes
# each, half of it free blocks, instead of 11, and half as long again. Groups whose rows are all deleted still go.
_CONFIG: dict[str, Any] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "checkpoint_threshold": "1TB",
    "max_vacuum_tasks": "0",
}
MAX_TEMP_BYTES = 10 * 1024**3


class Database:
    """An exclusively open store. Raises StoreError or CollectorError saying why it cannot be had."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.con = _open(store)
        try:
            with backup.kept(self.con, store):
                schema.apply(self.con, store)
            self.columns = schema.columns(self.con)
            self.memory = MemoryLimit(self.con, memory_bytes())
            self.queries = Queries(self.con, self.memory)
            # Two threads made an insert cost 14 us a span, one 8; and a race of theirs in 1.5.5's window operator ends
            # with a database that refuses everything, so that a query could stop ingest.
            self.con.execute("SET threads = 1")
            self.con.execute(f"SET max_temp_directory_size = '{MAX_TEMP_BYTES}B'")
            self._close_to_outside()
        except duckdb.OperationalError as error:  # of the disk; any other is a bug
            self.con.close()
            raise explain(store, error) from None
        except BaseException:  # also when interrupted: the file's lock must go
            self.con.close()
            raise
        self._quack: str | None = None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving SQL and close the file."""
        self.queries.close()
        if self._quack:
            with suppress(duckdb.Error):  # after a fatal error DuckDB answers nothing, and closing is all that is left
                self.con.execute(f"CALL quack_stop('{self._quack}')")
        self.memory.close()
        self.con.close()

    def serve_sql(self, port: int, token: str) -> str:
        """Serve read-only SQL to DuckDB clients on loopback (port 0 picks a free one); returns the quack URI.

        Raises CollectorError when the port is taken.
        """
        uri = f"quack:127.0.0.1:{port or _free_port()}"
        try:
            self.con.execute(f"CALL quack_serve('{uri}', token = '{token}')")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise CollectorError(f"live SQL at {uri} cannot start ({reason}); choose another --sql-port") from None
        self._quack = uri
        return uri

    def _close_to_outside(self) -> None:
        """Load what serving needs, then let no statement reach files or the network.

        Settings stay open, for the memory limit; a reader's statement that would change one is refused by
        ``rlinsight.statements.check``.
        """
        for name in ("httpfs", "quack"):  # quack's client part needs httpfs
            self.con.execute(f"LOAD '{extension(name)}'")
        self.con.create_function(
            "rlinsight_authorize",
            Gate(self.queries).__call__,
            ["VARCHAR", "VARCHAR"],  # type: ignore[arg-type]
            "BOOLEAN",  # type: ignore[arg-type]
            side_effects=True,
        )
        self.con.execute("SET GLOBAL quack_authorization_function = 'rlinsight_authorize'")
        self.con.execute("SET enable_external_access = false")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


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
            return duckdb.connect(str(store), config=_CONFIG)
        except duckdb.Error as error:
            if not is_locked(error):
                raise explain(store, error) from None
            if time.monotonic() > deadline:
                holder = re.search(r"PID (\d+)", str(error))
                who = f"process {holder[1]}" if holder and int(holder[1]) != os.getpid() else "another process"
                raise CollectorError(f"{store} is in use by {who}; stop it or choose another --store") from None
            time.sleep(0.1)
