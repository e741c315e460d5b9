"""A store of every earlier schema version becomes one of this version, or stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from collectors import backup
from collectors.database import Database
from collectors.pruning import prune
from collectors.retention import Keep
from rlinsight import schema
from rlinsight.errors import StoreError
from rlinsight.store import query
from tests.synthetic import Run, fill

V1 = Path(__file__).parent / "data" / "v1"  # schema and rows as version 1 wrote them


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store as version 1 left it, with rows in every table."""
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute((V1 / "schema.sql").read_text(encoding="utf-8"))
        for file in V1.glob("*.parquet"):
            con.execute(f"INSERT INTO {file.stem} BY NAME FROM '{file}'")
    return path


def _content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, in the order of its columns' values, with the columns' names in front."""
    with duckdb.connect(str(path), read_only=True) as con:
        tables = [row[0] for row in con.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
        assert tables
        return {
            t: [*con.execute(f"DESCRIBE {t}").fetchall(), *con.execute(f"FROM {t} ORDER BY ALL").fetchall()]
            for t in tables
        }


def test_an_old_store_becomes_like_a_new_one(old, tmp_path):
    """Every table has the columns and types of a new store, in whatever order, and every row it had; all views work."""
    Database(old).close()
    with Database(tmp_path / "new.duckdb") as new:
        wanted = schema.columns(new.con)
    with duckdb.connect(str(old)) as con:
        found = {table: dict(sorted(columns.items())) for table, columns in schema.columns(con).items()}
        assert found == {table: dict(sorted(columns.items())) for table, columns in wanted.items()}
        for file in V1.glob("*.parquet"):
            columns = [name for name, *_ in con.execute(f"DESCRIBE FROM '{file}'").fetchall()]
            kept = ", ".join(column for column in columns if column in wanted[file.stem])
            rows = f"SELECT {kept} FROM %s ORDER BY ALL"
            if file.stem != "schema_meta":
                assert con.execute(rows % file.stem).fetchall() == con.execute(rows % f"'{file}'").fetchall(), file.stem
        meta = con.execute("SELECT version, views_hash FROM schema_meta").fetchall()
        assert meta == [(schema.VERSION, schema.views_hash())]
        for view in (file.name for file in schema.files() if file.kind == "views"):
            con.execute(f"FROM {view}").fetchall()
        assert con.execute("SELECT steps_done FROM runs").fetchall() == [(2,)]


def test_the_copy_is_the_old_store(old, tmp_path):
    """The copy beside the store has its rows and columns; a later one takes another name instead of replacing it."""
    before = _content(old)
    first = tmp_path / "s.duckdb.v1.bak"
    for copy in (first, tmp_path / "s.duckdb.v1.2.bak"):
        Database(old).close()
        assert _content(copy) == before
        shutil.copy(first, old)


def test_a_failing_migration_changes_nothing(old, tmp_path, monkeypatch):
    """The last statement of the migration fails: every row and column is as before, no copy stays, the error tells."""
    root = tmp_path / "schema"
    shutil.copytree(schema.ROOT, root)
    with (root / "migrations" / f"{schema.VERSION}.sql").open("a") as file:
        file.write("\nALTER TABLE steps RENAME step TO number; SELECT error('no such thing');\n")
    before = _content(old)
    monkeypatch.setattr(schema, "ROOT", root)
    with pytest.raises(StoreError, match=r"schema version 1 to \d+ and was left as it was .*no such thing"):
        Database(old)
    assert _content(old) == before
    assert not list(tmp_path.glob("*.bak"))


def test_without_room_for_a_copy_the_store_is_migrated(old, tmp_path, monkeypatch):
    """A full disk is no reason not to train: the migration is one transaction anyway."""
    monkeypatch.setattr(backup, "SPARE_BYTES", 2**62)
    Database(old).close()
    assert not list(tmp_path.glob("*.bak"))
    assert query("SELECT version FROM schema_meta", store=old)["version"].to_pylist() == [schema.VERSION]


def test_an_old_store_at_rest_is_read_as_it_is(old):
    """Without a collector an older store answers with its own views and keeps its bytes; what it lacks says why."""
    before = old.read_bytes()
    assert query("SELECT steps_done FROM runs", store=old)["steps_done"].to_pylist() == [2]
    with pytest.raises(StoreError, match=r"schema version 1.*rlinsight collect"):
        query("SELECT no_such_column FROM runs", store=old)
    assert old.read_bytes() == before


def test_a_store_of_an_earlier_state_of_this_version_gets_its_columns(tmp_path):
    """It lacks columns that views of today read: at rest that is one clear error, a collector adds them; rows stay."""
    path = tmp_path / "s.duckdb"
    fill(path, Run(steps=1, groups=1, group_size=2))
    with duckdb.connect(str(path)) as con:
        for file in schema.files():
            if file.kind == "views":
                con.execute(f"DROP VIEW IF EXISTS {file.name}")
        con.execute("ALTER TABLE rollout_samples DROP COLUMN error_type")
        con.execute("ALTER TABLE producer_health DROP COLUMN metrics_overflowing")
        con.execute("UPDATE schema_meta SET views_hash = 'former'")
        known = con.execute("SELECT items FROM ingest_batches ORDER BY batch_id").fetchall()
    with pytest.raises(StoreError, match=r"earlier state of schema version.*rlinsight collect"):
        query("SELECT 1", store=path)
    Database(path).close()
    assert query("SELECT count(*) AS n FROM rollouts WHERE error_type IS NULL", store=path)["n"].to_pylist() == [2]
    with duckdb.connect(str(path)) as con:
        assert con.execute("SELECT items FROM ingest_batches ORDER BY batch_id").fetchall() == known
        for view in (file.name for file in schema.files() if file.kind == "views"):
            con.execute(f"FROM {view}").fetchall()
    assert not list(tmp_path.glob("*.bak"))


def test_a_dry_run_of_prune_reads_an_old_store(old, tmp_path):
    """It names the run that would go, without a migration: the file and its folder stay as they are."""
    before = old.read_bytes()
    runs = query("SELECT run_id FROM runs", store=old)["run_id"].to_pylist()
    for keep in (Keep(days=1e-3), Keep(bytes=1)):
        assert [run.run_id for run in prune(old, keep, dry_run=True)] == runs
    assert old.read_bytes() == before
    assert list(tmp_path.iterdir()) == [old]


def test_there_is_a_migration_to_every_version():
    """2.sql up to the current version, nothing else."""
    found = sorted(int(path.stem) for path in (schema.ROOT / "migrations").iterdir())
    assert found == list(range(2, schema.VERSION + 1))
