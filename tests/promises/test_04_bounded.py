"""Promise 4. Bounded memory and disk: queue and spool caps; drops are counted by reason and shown.

The caps themselves, and what happens to memory while the disk hangs: tests/test_spool.py and tests/test_telemetry.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectors.server import start_process
from rlinsight import exporter, spool, store, telemetry
from tests.promises.support import stopped

pytestmark = pytest.mark.slow


def _health(tmp_path: Path) -> dict:
    """Deliver what is left in the spool and ask the store what it knows about its producer."""
    path = tmp_path / "s.duckdb"
    with stopped(start_process(path, os.getpid())) as endpoint:
        spool.deliver_leftovers(tmp_path / "spool", endpoint.http, endpoint.token)
        (row,) = store.query("SELECT * FROM health", store=path).to_pylist()
    return row


def _start(tmp_path: Path, **settings: int) -> None:
    telemetry.setup("controller", spool_dir=tmp_path / "spool", run_id="r", attempt=1, endpoint=None, **settings)


def test_what_the_spool_had_no_room_for_is_shown(tmp_path: Path) -> None:
    """Over its cap on disk, a producer without collector drops by the reason limit; all else is stored."""
    cap = 1024**2
    _start(tmp_path, spool_bytes=cap)
    for index in range(100):
        telemetry.event("e", {"index": index, "blob": os.urandom(50_000)})
        telemetry.flush(5)
    used = sum(file.stat().st_size for file in (tmp_path / "spool").rglob("*") if file.is_file())
    telemetry.shutdown(1)
    row = _health(tmp_path)
    assert used < 1.2 * cap
    assert row["dropped_limit"] >= 70
    assert (row["dropped"], row["missing"]) == (row["dropped_limit"], 0)
    assert row["stored"] == row["emitted"] - row["dropped"]


def test_what_the_queue_had_no_room_for_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that come faster than they are written are dropped by the reason queue; all else is stored."""
    monkeypatch.setattr(exporter, "QUEUE_ITEMS", 100)
    _start(tmp_path)
    for index in range(20_000):
        telemetry.event("e", {"index": index})
    telemetry.flush(20)
    telemetry.shutdown(5)
    row = _health(tmp_path)
    assert row["dropped_queue"] > 1000
    assert (row["dropped"], row["missing"]) == (row["dropped_queue"], 0)
    assert row["stored"] == row["emitted"] - row["dropped"]
