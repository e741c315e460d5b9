"""Which runs a store no longer needs, by age and by bytes, and their removal: whole runs, never one that may be alive.

A run is alive while its latest attempt is running, for an hour after anything of it was heard or came in, and, as long
as some process owns the collector, if it has not reported its end: a hung step sends nothing for longer than that. The
ledger keeps its rows, so a batch that arrives again is known and brings nothing back.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from collectors.checkpoints import ROOM
from collectors.transaction import transaction
from rlinsight import schema
from rlinsight.errors import ConfigError
from rlinsight.names import MODEL_CHECK, MODEL_CHECK_LATENCY

logger = logging.getLogger(__name__)

LIVE_S = 3600.0
CHECKPOINT_BYTES = 256 * 1024**2  # what a checkpoint may write anew of row groups that are partly removed
PIECE_ROWS = 100_000  # of no run, removed in one transaction: ingest waits for no more than that
DAY_NS = 86_400 * 10**9
MAX_DAYS = 100_000  # times DAY_NS fits 64 bits

Work = Callable[[duckdb.DuckDBPyConnection], Any]


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays: runs heard of in the last ``days``, and no more of them than fit into ``bytes``. None: no limit.

    Raises ConfigError for limits that are none.
    """

    days: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.days is not None and not 0 < self.days < MAX_DAYS:
            raise ConfigError(f"keep-days {self.days:g} is no number of days; pass one above 0 and under {MAX_DAYS}")
        if self.bytes is not None and self.bytes <= 0:
            raise ConfigError(f"keep-bytes {self.bytes} is no size; pass one above 0")

    def __bool__(self) -> bool:
        return self.days is not None or self.bytes is not None


@dataclass(frozen=True, slots=True)
class Pruned:
    """A run to be removed, or that was; ``run_id`` None for the rows of no run. ``rows`` is None before."""

    run_id: str | None
    reason: str
    last_heard_ns: int | None
    bytes: int | None
    rows: int | None = None


RAW = ("otel_spans", "otel_logs", "otel_metrics")
# Which raw rows are of no run. Those of model checks stay, as the checks do that a rebuild makes of them: they are few.
OF_NO_RUN = {
    "otel_spans": "run_id IS NULL",
    "otel_logs": f"run_id IS NULL AND coalesce(event_name NOT IN ('{MODEL_CHECK}', '{MODEL_CHECK_LATENCY}'), true)",
    "otel_metrics": "run_id IS NULL",
}

RUNS = """
WITH heard AS (
  SELECT run_id, max(ns) AS last_ns FROM (
    SELECT run_id, max(last_seen_ns) AS ns FROM attempts GROUP BY run_id
    UNION ALL SELECT run_id, max(ingest_ns) FROM otel_spans GROUP BY run_id
    UNION ALL SELECT run_id, max(ingest_ns) FROM otel_logs GROUP BY run_id
    UNION ALL SELECT run_id, max(ingest_ns) FROM otel_metrics GROUP BY run_id
  ) WHERE run_id IS NOT NULL GROUP BY run_id
), latest AS (
  SELECT run_id, status FROM attempts QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY attempt DESC) = 1
)
SELECT h.run_id, h.last_ns, l.status FROM heard h LEFT JOIN latest l ON l.run_id = h.run_id ORDER BY h.last_ns
"""
# A batch of several runs counts for each of them.
SENT = """
SELECT p.run_id, sum(b.bytes) AS sent FROM (
  SELECT run_id, batch_id FROM otel_spans UNION SELECT run_id, batch_id FROM otel_logs
  UNION SELECT run_id, batch_id FROM otel_metrics
) p JOIN ingest_batches b ON b.batch_id = p.batch_id GROUP BY p.run_id
"""
USED = "SELECT used_blocks * block_size FROM pragma_database_size()"


def plan(con: duckdb.DuckDBPyConnection, keep: Keep, owned: bool) -> list[Pruned]:
    """The runs to remove now, oldest first. ``owned``: a process needs the collector, so unfinished runs may live."""
    now_ns = time.time_ns()
    sizes = _sizes(con) if keep.bytes is not None else {}
    left = sum(sizes.values())
    chosen = []
    for run_id, last_ns, status in con.execute(RUNS).fetchall():
        unfinished = status in (None, "running", "lost")
        if status == "running" or now_ns - last_ns < LIVE_S * 1e9 or (owned and unfinished):
            continue
        if keep.days is not None and last_ns < now_ns - keep.days * DAY_NS:
            reason = "age"
        elif keep.bytes is not None and left > keep.bytes:
            reason = "bytes"
        else:
            continue
        chosen.append(Pruned(run_id, reason, last_ns, sizes.get(run_id)))
        left -= sizes.get(run_id, 0)
    return chosen


def _sizes(con: duckdb.DuckDBPyConnection) -> dict[str | None, int]:
    """Bytes of the file by run: the blocks in use, shared out by the bytes that were sent."""
    sent = dict(con.execute(SENT).fetchall())
    used = con.execute(USED).fetchall()[0][0]
    total = sum(sent.values()) or 1
    return {run_id: int(used * share / total) for run_id, share in sent.items()}


def sweep(
    con: duckdb.DuckDBPyConnection, write: Callable[[Work], Any], store: Path, keep: Keep, owned: bool
) -> list[Pruned]:
    """Remove what ``keep`` does not hold, a run per transaction; returns what was removed.

    ``con`` reads; ``write`` runs work on the writing connection, so that ingest goes on between two runs.
    """

    def checkpoint() -> bool:
        return write(lambda con: _checkpoint(con, store))

    if keep.bytes is not None and not checkpoint():  # else blocks that are free already would count as used
        keep = Keep(keep.days)
    removed = []
    for run in plan(con, keep, owned):
        done = write(lambda con, run=run: _remove_run(con, run))
        if done is not None:
            logger.info("removed run %s (%s): %d rows", done.run_id, done.reason, done.rows)
            removed.append(done)
    if keep.days is not None:
        cutoff_ns = time.time_ns() - int(keep.days * DAY_NS)
        while (done := write(lambda con: _remove_of_no_run(con, cutoff_ns))) is not None:
            removed.append(done)
    if removed:
        checkpoint()
    return removed


def _checkpoint(con: duckdb.DuckDBPyConnection, store: Path) -> bool:
    """Free the blocks of removed rows for new ones; False where that cannot be done now."""
    wal = store.with_name(f"{store.name}.wal")
    needed = CHECKPOINT_BYTES + (ROOM * wal.stat().st_size if wal.exists() else 0)
    if shutil.disk_usage(store.parent).free < needed:
        logger.warning("under %d MiB are free: blocks of removed rows are not freed yet", needed >> 20)
        return False
    try:
        con.execute("CHECKPOINT")
    except duckdb.Error as error:
        logger.warning("blocks of removed rows are not freed yet: %s", str(error).splitlines()[0])
        return False
    return True


def _remove_run(con: duckdb.DuckDBPyConnection, run: Pruned) -> Pruned | None:
    """Remove a run from every table; None when something of it came in since it was chosen."""
    with transaction(con):
        return _delete_run(con, run)


def _delete_run(con: duckdb.DuckDBPyConnection, run: Pruned) -> Pruned | None:
    newest = con.execute(
        " UNION ALL ".join(f"SELECT max(ingest_ns) FROM {table} WHERE run_id = $run" for table in RAW),
        {"run": run.run_id},
    ).fetchall()
    if any(ns is not None and ns > (run.last_heard_ns or 0) for (ns,) in newest):
        return None
    batches = " UNION ".join(f"SELECT batch_id FROM {table} WHERE run_id = $run" for table in RAW)
    producers = con.execute(
        f"SELECT list(DISTINCT producer) FROM ingest_batches SEMI JOIN ({batches}) USING (batch_id)",
        {"run": run.run_id},
    ).fetchall()[0][0]
    tables = [
        table for table, columns in schema.columns(con).items() if "run_id" in columns and table != "retention_log"
    ]
    rows = sum(_deleted(con, f"{table} WHERE run_id = ?", run.run_id) for table in tables)
    return _log(con, Pruned(run.run_id, run.reason, run.last_heard_ns, run.bytes, rows), producers)


def _remove_of_no_run(con: duckdb.DuckDBPyConnection, cutoff_ns: int) -> Pruned | None:
    """Remove raw rows of no run that came in before, PIECE_ROWS at most; None when there are none."""
    rows = 0
    with transaction(con):
        for table, condition in OF_NO_RUN.items():
            old = f"SELECT rowid FROM {table} WHERE {condition} AND ingest_ns < ? LIMIT {PIECE_ROWS - rows}"
            rows += _deleted(con, f"{table} WHERE rowid IN ({old})", cutoff_ns)
        return _log(con, Pruned(None, "age", cutoff_ns, None, rows), None) if rows else None


def _deleted(con: duckdb.DuckDBPyConnection, what: str, value: Any) -> int:
    return con.execute(f"DELETE FROM {what}", [value]).fetchall()[0][0]


def _log(con: duckdb.DuckDBPyConnection, done: Pruned, producers: list[str] | None) -> Pruned:
    con.execute(
        "INSERT INTO retention_log (run_id, reason, rows, bytes, last_heard_ns, producers, removed_ns) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [done.run_id, done.reason, done.rows, done.bytes, done.last_heard_ns, producers, time.time_ns()],
    )
    return done
