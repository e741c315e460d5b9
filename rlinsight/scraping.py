"""Asks the collector to scrape a run's metrics endpoints, for the length of the run. Does not scrape (collectors)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rlinsight import store
from rlinsight.config import TelemetrySection

POLL_S = 1.0  # between looks at who collects: another collector knows nothing of the targets
TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@contextmanager
def scraped(section: TelemetrySection, run_id: str, attempt: int) -> Iterator[None]:
    """The configured targets are scraped in this block, by whichever collector serves the store. Never raises."""
    if not section.scrape:
        yield
        return
    ended = threading.Event()
    body = {"run_id": run_id, "attempt": attempt, "targets": [target.model_dump() for target in section.scrape]}
    thread = threading.Thread(target=_keep, args=(section.store, body, ended), name="scrape-targets", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _keep(path: Path, body: dict[str, Any], ended: threading.Event) -> None:
    """Tell every collector of the store that comes along; the last one that it is over."""
    told: store.Endpoint | None = None
    while True:
        endpoint = store.read_endpoint(path)
        if endpoint is not None and (told is None or endpoint.pid != told.pid) and _ask(endpoint, "POST", body):
            told = endpoint
        if ended.wait(POLL_S):
            break
    if told is not None:
        _ask(told, "DELETE", {})


def _ask(endpoint: store.Endpoint, method: Literal["POST", "DELETE"], body: dict[str, Any]) -> bool:
    """Whether the collector has answered; a refusal is told, and not asked about again."""
    try:
        status, answer = store.call(endpoint, method, "/v1/targets", {"pid": os.getpid(), **body}, TIMEOUT_S)
    except OSError as error:
        _log.debug("collector %d does not take scrape targets: %s", endpoint.pid, error)
        return False
    if status != 200:
        _log.warning("telemetry.scrape is not taken by the collector: %s", store.refusal(answer) or f"HTTP {status}")
    return True
