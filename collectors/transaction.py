"""All or nothing on a DuckDB connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import duckdb


@contextmanager
def transaction(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """What the block does with ``con``, all of it or, when anything fails, nothing."""
    con.execute("BEGIN")
    try:
        yield
        con.execute("COMMIT")
    except BaseException:  # also when interrupted
        with suppress(duckdb.Error):  # a failed COMMIT has ended the transaction
            con.execute("ROLLBACK")
        raise
