"""Promise 6. Disk full, read-only directory, corrupt or newer database file: a clear error, nothing overwritten.

A spool on a full disk: tests/test_spool.py. Reading damaged, newer and foreign files: tests/test_store.py.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import httpx
import pytest

from collectors.checkpoints import WAL_BYTES
from rlinsight import schema
from rlinsight.store import query
from tests.collectors.live import Collector, collector, command
from tests.promises.support import log_request
from tests.synthetic import Run, fill

BATCH = 100
PROTOBUF = {"content-type": "application/x-protobuf"}

pytestmark = pytest.mark.slow


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of its own of a few MiB."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _post(running: Collector, first: int, padding: int) -> httpx.Response:
    """Send BATCH events numbered from ``first``, each of which takes so many bytes."""
    body = log_request(range(first, first + BATCH), {"padding": os.urandom(padding // 2).hex()})
    return running.http.post("/v1/logs", content=body, headers=PROTOBUF)


def _stored(store: Path) -> list[int]:
    rows = query("SELECT (log_attributes ->> 'index')::INT AS i FROM otel_logs ORDER BY i", store=store)
    return rows["i"].to_pylist()


def _digest(folder: Path) -> dict[str, str]:
    """Names and contents of what is in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def _refused(store: Path) -> str:
    """The one line of a start that must fail, and that must leave every byte as it was."""
    before = _digest(store.parent)
    done = subprocess.run(command(store), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert _digest(store.parent) == before
    return line


@pytest.mark.parametrize(("size", "padding"), [(8, 2_000), (100, 60_000)])
def test_a_full_disk_refuses_and_the_same_collector_goes_on_when_there_is_room(
    tmp_path: Path, size: int, padding: int
) -> None:
    """503 until space is freed, told by /readyz and /healthz, readers answered; then the same process stores again.

    In the large one the write-ahead log is beyond the size at which it is due for a checkpoint that has no room.
    """
    with small_disk(tmp_path / "disk", f"{size}m") as disk:
        store, filler = disk / "s.duckdb", disk / "filler"
        with collector(store) as running:
            filler.write_bytes(b"x" * (size * 1024**2 // 5))
            acked: list[int] = []
            while (reply := _post(running, len(acked), padding)).status_code == 200:
                acked += range(len(acked), len(acked) + BATCH)
            assert size < 100 or store.with_name("s.duckdb.wal").stat().st_size > WAL_BYTES
            for _ in range(5):  # a sender that insists harms nothing
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                reply = _post(running, 10**6, padding)
            ready = running.http.get("/readyz")
            assert (ready.status_code, "cannot be written" in ready.json()["message"]) == (503, True)
            assert running.http.get("/healthz").json()["status"] == "failing"
            assert _stored(store) == acked
            filler.unlink()
            assert _post(running, len(acked), padding).status_code == 200
            acked += range(len(acked), len(acked) + BATCH)
            assert running.http.get("/readyz").status_code == 200
            assert _stored(store) == acked
            filler.write_bytes(b"x" * _free(disk))
            assert running.stop() == 0
        assert _stored(store) == acked  # it ended on the full disk, and nothing is lost
        (disk / "more").write_bytes(b"x" * _free(disk))
        assert "disk is full; free some space" in _fails(store)
        assert _stored(store) == acked
        filler.unlink()
        with collector(store) as running:
            assert _stored(store) == acked


def _free(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


def test_a_read_only_folder_is_one_clear_line(tmp_path: Path) -> None:
    """Neither a new store nor one that is there can be had; the message says why, and the file stays as it is."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        fill(disk / "s.duckdb", Run(steps=1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for name in ("s.duckdb", "new.duckdb", "below/new.duckdb"):
            line = _refused(disk / name) if "/" not in name else _fails(disk / name)
            assert "read-only" in line.lower()
            assert "--store" in line
            assert "free some space" not in line


def _fails(store: Path) -> str:
    done = subprocess.run(command(store), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    return done.stderr


DAMAGE = {
    "header": (0, 4096),
    "first blocks": (3 * 4096, 64 * 1024),
    "everywhere": (0, None),
    "cut to half": None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_corrupt_file_is_told_and_kept(tmp_path: Path, kind: str) -> None:
    """Overwritten headers or blocks, or half a file: one line that says so, and not a byte is changed."""
    store = tmp_path / "s.duckdb"
    fill(store, Run(steps=1))
    content = bytearray(store.read_bytes())
    if (part := DAMAGE[kind]) is None:
        del content[len(content) // 2 :]
    else:
        end = len(content) if part[1] is None else part[1]
        content[part[0] : end] = os.urandom(end - part[0])
    store.write_bytes(content)
    line = _refused(store)
    assert "damaged" in line
    assert "nothing was changed" in line


def test_a_store_of_a_newer_version_is_told_and_kept(tmp_path: Path) -> None:
    """A file of a later rlinsight is not opened for writing, whatever this version would like to do with it."""
    store = tmp_path / "s.duckdb"
    fill(store, Run(steps=1))
    con = duckdb.connect(str(store))
    con.execute("UPDATE schema_meta SET version = ?", [schema.VERSION + 1])
    con.close()
    assert "upgrade rlinsight" in _refused(store)


def test_a_file_of_a_newer_duckdb_is_told_and_kept(tmp_path: Path) -> None:
    """The storage version in the header is one this DuckDB cannot read."""
    store = tmp_path / "s.duckdb"
    fill(store, Run(steps=1))
    content = bytearray(store.read_bytes())
    content[12:20] = (10**6).to_bytes(8, "little")  # behind a checksum of 8 bytes and the magic of 4
    store.write_bytes(content)
    assert "s.duckdb" in (line := _refused(store))
    assert "newer DuckDB" in line or "damaged" in line


def test_a_corrupt_write_ahead_log_is_told_and_kept(tmp_path: Path) -> None:
    """One flipped bit in what a killed collector left in its log: one line that says so, and not a byte is changed."""
    store = tmp_path / "s.duckdb"
    with collector(store) as running:
        assert _post(running, 0, 1000).status_code == 200
        running.process.kill()
        running.process.wait()
    log = store.with_name("s.duckdb.wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    assert "damaged" in _refused(store)
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    with collector(store):
        assert _stored(store) == list(range(BATCH))
