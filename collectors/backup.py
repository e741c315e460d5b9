"""A copy of a store beside it before its tables are migrated, for whoever wants to go back to the older rlinsight.

The migration itself needs no copy: it is one transaction. Owns the copy's name and when there is none.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import duckdb

from rlinsight import schema
from rlinsight.errors import StoreError

logger = logging.getLogger(__name__)

SPARE_BYTES = 1024**3  # left free beside the copy: the migration and the run need room too


@contextmanager
def kept(con: duckdb.DuckDBPyConnection, store: Path) -> Iterator[None]:
    """Copy a store of an older version to ``<store>.v<n>.bak`` for a migration in the block; removed if that fails.

    No copy where the disk has no room for it, with a warning. Raises StoreError for a store not of rlinsight.
    """
    version = schema.stored_version(con, store)
    if version in (None, schema.VERSION):
        yield
        return
    con.execute("CHECKPOINT")  # the file alone is the whole store then
    size, free = store.stat().st_size, shutil.disk_usage(store.parent).free
    if free < size + SPARE_BYTES:
        logger.warning("no room for a copy of %s (%d MB) before its migration; going on without", store, size >> 20)
        yield
        return
    names = (store.with_name(f"{store.name}.v{version}{suffix}.bak") for suffix in _suffixes())
    copy = next(name for name in names if not name.exists())
    # By a process of its own: closing a second descriptor of the file in this one would give up DuckDB's lock on it.
    part = copy.with_name(f"{copy.name}.partial")  # one that was cut off is not taken for a copy
    done = subprocess.run(["cp", "-p", str(store), str(part)], capture_output=True, text=True)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise StoreError(f"{store} could not be copied to {copy} before its migration: {done.stderr.strip()}")
    part.rename(copy)
    try:
        yield
    except BaseException:  # also when interrupted: nothing was migrated
        copy.unlink()
        raise
    logger.info("%s was of schema version %d; a copy of it is in %s", store, version, copy)


def _suffixes() -> Iterator[str]:
    yield ""
    yield from (f".{number}" for number in count(2))
