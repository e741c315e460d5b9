"""When a store is swept: by its collector now and then, and when somebody asks, with or without a collector.

Owns the thread, the route and ``prune()`` behind the command; what goes and how is in retention.py.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import duckdb
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from collectors.database import Database
from collectors.payload import PayloadError
from collectors.retention import Keep, Pruned, Work, plan, sweep
from collectors.writer import Overloaded, Writer
from rlinsight import schema
from rlinsight.errors import CollectorError, ConfigError, StoreError
from rlinsight.statements import sql_error
from rlinsight.store import (
    Endpoint,
    call,
    open_at_rest,
    read_endpoint,
    refusal,
    require_at_rest,
    until_handed_over,
)

logger = logging.getLogger(__name__)

SWEEP_S = 600.0  # between two sweeps of a collector
ANSWER_S = 3600.0  # a sweep of many runs takes its time


class Retention:
    """Sweeps a collector's store at its start and every ten minutes, and whenever asked. With a thread of its own."""

    def __init__(self, database: Database, writer: Writer, owned: Callable[[], bool], keep: Keep | None) -> None:
        self._database, self._writer, self._owned = database, writer, owned
        self._lock = threading.Lock()  # one sweep at a time
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(keep,), name="retention", daemon=True)
        if keep:
            self._thread.start()

    def prune(self, keep: Keep, dry_run: bool) -> list[Pruned]:
        """Sweep now, or only say what would go. Raises Overloaded when the collector is leaving."""
        with self._lock, self._database.con.cursor() as con:
            if dry_run:
                return plan(con, keep, self._owned())
            return sweep(con, self._write, self._database.store, keep, self._owned())

    def _write(self, work: Work) -> Any:
        """Do ``work`` on the writer's connection. Raises Overloaded when the collector is leaving."""
        if self._stop.is_set():
            raise Overloaded("the collector is leaving")
        return self._writer.submit_task(work).result()

    def close(self) -> None:
        """Stop sweeping; the removal of one run that is under way is finished."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, keep: Keep) -> None:
        while True:
            try:
                self.prune(keep, dry_run=False)
            except Overloaded:  # leaving
                return
            except Exception:  # the next sweep tries again; ingest goes on
                logger.exception("the store could not be swept")
            if self._stop.wait(SWEEP_S):
                return


def prune(store: Path, keep: Keep, dry_run: bool) -> list[Pruned]:
    """Sweep a store once, through its collector when one runs. Raises StoreError or CollectorError."""
    endpoint = read_endpoint(store)
    if endpoint is not None:
        return _ask(endpoint, keep, dry_run)
    require_at_rest(store)
    if dry_run:
        return until_handed_over(store, lambda: _plan_at_rest(store, keep))
    with Database(store) as database, database.con.cursor() as con:
        try:
            return sweep(con, lambda work: work(database.con), store, keep, owned=False)
        except duckdb.OperationalError as error:  # of the disk or of memory; any other is a bug
            raise StoreError(
                f"{store} was not pruned, or not of every run: {sql_error(error)}; free some space and run this again"
            ) from None


def _plan_at_rest(store: Path, keep: Keep) -> list[Pruned]:
    """What a sweep would remove. The file is only read: one of an older version is not migrated for it."""
    with open_at_rest(store) as con:
        try:
            return plan(con, keep, owned=False) if schema.stored_version(con, store) is not None else []
        except duckdb.Error as error:
            raise sql_error(error) from None


def _ask(endpoint: Endpoint, keep: Keep, dry_run: bool) -> list[Pruned]:
    asked = {"keep_days": keep.days, "keep_bytes": keep.bytes, "dry_run": dry_run}
    try:
        status, answer = call(endpoint, "POST", "/v1/prune", asked, ANSWER_S)
    except OSError as error:
        raise CollectorError(f"the collector (process {endpoint.pid}) does not answer: {error}") from None
    if status != 200:
        reason = refusal(answer) or f"HTTP {status}; its log tells why"
        raise CollectorError(f"the collector (process {endpoint.pid}) did not prune: {reason}")
    return [Pruned(**run) for run in json.loads(answer)["runs"]]


def route(
    retention: Retention,
    authorize: Callable[[Request], None],
    read_json: Callable[[Request], Awaitable[dict[str, Any]]],
) -> Route:
    """POST /v1/prune {"keep_days": 30, "keep_bytes": null, "dry_run": true}: the runs that went, or would."""

    async def endpoint(request: Request) -> Response:
        authorize(request)
        asked = await read_json(request)
        days, size = asked.get("keep_days"), asked.get("keep_bytes")
        if any(isinstance(n, bool) or not isinstance(n, int | float | None) for n in (days, size)):
            raise PayloadError(400, f"keep_days={days!r}, keep_bytes={size!r}: send numbers or null")
        try:
            keep = Keep(days, None if size is None else int(size))
        except (ConfigError, ValueError, OverflowError) as error:  # JSON of Python has NaN and Infinity
            raise PayloadError(400, str(error)) from None
        dry_run = asked.get("dry_run") is not False
        runs = await anyio.to_thread.run_sync(lambda: retention.prune(keep, dry_run))
        return JSONResponse({"runs": [asdict(run) for run in runs]})

    return Route("/v1/prune", endpoint, methods=["POST"])
