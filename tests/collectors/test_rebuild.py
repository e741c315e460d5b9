"""Domain tables are a function of the raw ones: rebuilt from them, they are what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collectors import rebuild as rebuilding
from collectors.database import Database
from collectors.decode import Decoder
from collectors.projections import PROJECTIONS
from collectors.rebuild import rebuild
from collectors.writer import Writer
from rlinsight import names
from rlinsight.errors import StoreError
from tests.collectors.live import collector
from tests.synthetic import Request, Run, batch, fill

DOMAIN = sorted({projection.table for projection in PROJECTIONS})
TOKENS = ("token_runs", "rollout_training")
V1 = Path(__file__).parents[1] / "data" / "v1"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two runs of ours, a run of somebody else's trainer, and a trace of no run."""
    path = tmp_path / "s.duckdb"
    fill(path, Run(steps=2, groups=2), Run("two-2", steps=1, groups=1, status=None, failed_rollouts=1))
    foreign = ExportTraceServiceRequest()
    for run in ("theirs", None):
        spans = foreign.resource_spans.add()
        if run:
            spans.resource.attributes.add(key=names.RUN_ID).value.string_value = run
        for number, name in enumerate((names.STEP, "chat gpt", "GET /")):
            span = spans.scope_spans.add().spans.add(name=name, start_time_unix_nano=5, end_time_unix_nano=9)
            span.trace_id, span.span_id = bytes(15) + b"1", bytes(7) + bytes([number + 1])
            span.attributes.add(key="gen_ai.usage.prompt_tokens").value.int_value = 7
    with Database(path) as database:
        writer = Writer(database.con, database.columns)
        writer.start()
        done = writer.submit(batch(Decoder(database.columns), Request("traces", foreign, "theirs", 1)))
        writer.close()
        assert done.result(10)
    return path


def _content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with duckdb.connect(str(path), read_only=True) as con:
        tables = [row[0] for row in con.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
        return {table: con.execute(f"FROM {table} ORDER BY ALL").fetchall() for table in tables}


def _damage(path: Path) -> None:
    with duckdb.connect(str(path)) as con:
        for table in DOMAIN:
            columns = [row[0] for row in con.execute(f"DESCRIBE {table}").fetchall()]
            key = columns[0]  # run_id, but where a row belongs to no run
            if table not in TOKENS:
                con.execute(f"DELETE FROM {table} WHERE rowid % 2 = 0")
                con.execute(f"INSERT INTO {table} ({key}) VALUES ('made up')")
            con.execute(f"UPDATE {table} SET {key} = {key} || '?'")
            if "attempt" in columns:
                con.execute(f"UPDATE {table} SET attempt = 99")


def test_rebuilt_tables_are_what_they_were(store):
    """Rows deleted, changed and made up in every domain table: afterwards all tables are as at first, raw ones too."""
    before = _content(store)
    _damage(store)
    assert all(_content(store)[table] != before[table] for table in DOMAIN if before[table])
    seen: list[tuple[int, int]] = []
    done = rebuild(store, lambda *progress: seen.append(progress))
    assert _content(store) == before
    assert done.incomplete == 0
    assert done.rows == sum(len(before[table]) for table in DOMAIN)
    assert seen[-1] == (done.items, len(before["otel_spans"]) + len(before["otel_logs"]))
    assert {row[0] for row in before["steps"]} == {"demo-20250101-120000-a1b2", "two-2", "theirs"}


def test_lost_arrays_are_counted(store):
    """A token row that is gone comes back with its texts and ids, without its arrays, and is counted."""
    with duckdb.connect(str(store)) as con:
        con.execute("DELETE FROM token_runs WHERE rollout_id = (SELECT min(rollout_id) FROM token_runs)")
    assert rebuild(store).incomplete == 1
    with duckdb.connect(str(store)) as con:
        rows = con.execute("SELECT response_text IS NOT NULL FROM token_runs WHERE token_ids IS NULL").fetchall()
    assert rows == [(True,)]


def test_a_rebuild_that_fails_changes_nothing(store, monkeypatch):
    """An error after the first chunk leaves every row where it was."""
    before = _content(store)
    monkeypatch.setattr(rebuilding, "CHUNK_ROWS", 2048)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebuild(store, stop)
    assert _content(store) == before


def test_a_migrated_store_keeps_its_tokens_and_gains_tables(tmp_path):
    """Token rows of version 1 have no tie to their raw rows: they stay; the other tables are filled anew."""
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute((V1 / "schema.sql").read_text())
        for file in V1.glob("*.parquet"):
            con.execute(f"INSERT INTO {file.stem} BY NAME FROM '{file}'")
    Database(path).close()
    before = _content(path)
    with duckdb.connect(str(path)) as con:
        for table in set(DOMAIN) - set(TOKENS):
            con.execute(f"DELETE FROM {table}")
    rebuild(path)
    after = _content(path)
    old = [file.stem for file in V1.glob("*.parquet")]
    assert {table: len(after[table]) for table in old} == {table: len(before[table]) for table in old}
    assert len(after["worker_calls"]) > len(before["worker_calls"]) == 0  # a table that version 1 had not
    assert {table: after[table] for table in TOKENS} == {table: before[table] for table in TOKENS}


def test_a_store_in_use_and_a_missing_one_are_refused(store, tmp_path):
    """Beside a collector nothing is rebuilt, and no store is made by the way."""
    with collector(store), pytest.raises(StoreError, match=r"a collector .* serves"):
        rebuild(store)
    with pytest.raises(StoreError, match="no store"):
        rebuild(tmp_path / "none.duckdb")
    assert not (tmp_path / "none.duckdb").exists()
