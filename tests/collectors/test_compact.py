"""A compacted store holds the same in less room, and is never seen half done."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from collectors import compact as compacting
from collectors.compact import compact
from rlinsight import schema
from rlinsight.errors import StoreError
from tests.collectors.live import collector
from tests.synthetic import Run, fill


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs whose rows alternate, and the room of many rows that are gone."""
    path = tmp_path_factory.mktemp("filled") / "it's.duckdb"
    for first_step in (1, 2):
        later = {"attempt": first_step, "first_step": first_step, "resumed_from_step": first_step - 1}
        fill(path, *(Run(run, steps=1, groups=2, **later) for run in ("one-1", "two-2")))
    with duckdb.connect(str(path)) as con:
        con.execute("CREATE TABLE ballast AS SELECT repeat(uuid()::VARCHAR, 20) AS text FROM range(20000)")
        con.execute("CHECKPOINT")
        con.execute("DROP TABLE ballast")
    return path


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copy(filled, tmp_path / filled.name))
    path.chmod(0o600)
    return path


def _content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with duckdb.connect(str(path), read_only=True) as con:
        return {table: con.execute(f"FROM {table} ORDER BY ALL").fetchall() for table in schema.columns(con)}


def test_a_compact_store_holds_the_same_in_less_room(store):
    """Every row of every table, the views, the file's mode, and nothing left beside it; runs lie together by step."""
    before = _content(store)
    was, now = compact(store)
    assert now == store.stat().st_size < was - 5_000_000
    assert _content(store) == before
    assert store.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in store.parent.iterdir()] == [store.name]
    with duckdb.connect(str(store), read_only=True) as con:
        assert con.execute("SELECT count(*) FROM runs").fetchone() == (2,)
        assert con.execute("SELECT run_id, step FROM steps").fetchall() == [
            (run, step) for run in ("one-1", "two-2") for step in (1, 2)
        ]
    with collector(store) as running:  # and it goes on: the ledger still knows every batch
        assert running.http.get("/healthz").is_success


def test_a_link_to_the_store_stays_one(store, tmp_path):
    """The file it leads to is what is replaced, where it is; a log left beside the link is part of the store."""
    link = tmp_path / "elsewhere" / "link.duckdb"
    link.parent.mkdir()
    link.symlink_to(store)
    code = "import duckdb, os, sys; c = duckdb.connect(sys.argv[1]); c.execute('DELETE FROM steps'); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(link)], check=True)
    before = _content(link)
    was, now = compact(link)
    assert link.is_symlink()
    assert now == store.stat().st_size < was
    assert _content(link) == _content(store) == before
    assert before["steps"] == []


@pytest.mark.slow
def test_a_compaction_killed_at_any_moment_leaves_the_store(store):
    """SIGKILL after ever longer times, until one compaction comes through: the rows are always all there."""
    before = _content(store)
    code = "import sys; from pathlib import Path; from collectors.compact import compact; compact(Path(sys.argv[1]))"
    delay, killed = 0.0, 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", code, str(store)])
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        assert _content(store) == before
        if process.returncode == 0:
            break
        delay += 0.25
    assert killed > 2
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_a_copy_that_differs_is_not_taken(store, monkeypatch):
    """Rows lost on the way are noticed; the store keeps its bytes."""
    copy = compacting._copy

    def lossy(con: duckdb.DuckDBPyConnection, table: str, columns: list[str]) -> None:
        if table == "steps":
            con.execute("INSERT INTO new.steps BY NAME SELECT * REPLACE (step + 1 AS step) FROM old.steps LIMIT 1")
        copy(con, table, columns)

    monkeypatch.setattr(compacting, "_copy", lossy)
    before = _content(store)
    with pytest.raises(StoreError, match="the copy of steps differs"):
        compact(store)
    assert _content(store) == before
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_no_writer_gets_in_between(store):
    """While tables are copied, and at the last one, the store cannot be opened for writing."""
    refused = []

    def report(table: str, done: int, total: int) -> None:
        code = "import duckdb, sys; duckdb.connect(sys.argv[1])"
        if done in (0, total - 1):
            refused.append(subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True).returncode)

    compact(store, report)
    assert refused == [1, 1]


def test_what_stands_in_the_way_is_told(store, tmp_path, monkeypatch):
    """A collector, no store, and too little room; the store keeps its rows."""
    with pytest.raises(StoreError, match="no store"):
        compact(tmp_path / "none.duckdb")
    before = _content(store)
    monkeypatch.setattr(compacting, "SPARE_BYTES", 2**62)
    with pytest.raises(StoreError, match=r"are free; make room"):
        compact(store)
    assert _content(store) == before
    with collector(store), pytest.raises(StoreError, match="a collector"):
        compact(store)
