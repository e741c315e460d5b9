"""``rlinsight.connect()``: a DuckDB connection in which a store's relations have their plain names, in both modes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

import rlinsight
from collectors.database import Database
from rlinsight import schema
from rlinsight.errors import StoreError
from tests.collectors.live import collector
from tests.synthetic import Run, fill

JOIN = (
    "SELECT count(*) FROM rollouts JOIN rewards USING (run_id, attempt, rollout_id) JOIN v_steps USING (run_id, step)"
)


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("rest") / "it's.duckdb"
    fill(store, Run(groups=2, group_size=2, tokens=4))
    return store


@pytest.fixture(scope="module")
def live(at_rest: Path, tmp_path_factory: pytest.TempPathFactory):
    store = Path(shutil.copy(at_rest, tmp_path_factory.mktemp("live") / "it's.duckdb"))
    with collector(store):
        yield store


@pytest.fixture(params=["at_rest", "live"])
def con(request: pytest.FixtureRequest):
    with rlinsight.connect(request.getfixturevalue(request.param)) as connection:
        yield connection


def test_every_relation_has_its_plain_name(con):
    """Tables, views and macros of the schema answer by name, and so does a join of three of them."""
    names = {row[0] for row in con.execute("SHOW TABLES").fetchall()}
    assert names == {file.name for file in schema.files() if file.kind != "macros"}
    for name in names:
        con.execute(f"FROM {name} LIMIT 1").fetchall()
    assert con.execute("SELECT to_time(1000)::VARCHAR").fetchone() == ("1970-01-01 00:00:00.000001",)
    assert con.execute(JOIN).fetchone() == con.execute("SELECT count(*) FROM rewards").fetchone() == (40,)


def test_a_statement_can_run_where_the_store_is(con):
    """in_store() answers like the same statement here, views and macros included."""
    assert con.execute("FROM in_store(?)", [JOIN]).fetchall() == con.execute(JOIN).fetchall()


def test_own_tables_and_files_stand_beside_the_store(con, tmp_path):
    """The connection is the caller's: it keeps tables, joins them with the store and writes files."""
    con.execute("CREATE TABLE labels AS SELECT rollout_id, 'good' AS label FROM rollouts LIMIT 3")
    assert con.execute("SELECT count(*) FROM rollouts JOIN labels USING (rollout_id)").fetchone() == (3,)
    con.execute(f"COPY (FROM steps) TO '{tmp_path / 'steps.parquet'}'")
    assert con.execute(f"SELECT count(*) FROM '{tmp_path / 'steps.parquet'}'").fetchone() == (5,)


def test_the_store_itself_cannot_be_written(con):
    """Neither through a relation's name nor where the store is."""
    for sql in ("DELETE FROM steps", "DELETE FROM store.steps", "FROM in_store('DELETE FROM steps')"):
        with pytest.raises(duckdb.Error):
            con.execute(sql).fetchall()
    assert con.execute("SELECT count(*) FROM steps").fetchone() == (5,)


def test_an_older_store_at_rest_has_its_own_views(tmp_path):
    """A store of version 1 is read without migrating it."""
    path = tmp_path / "s.duckdb"
    data = Path(__file__).parent / "data" / "v1"
    with duckdb.connect(str(path)) as con:
        con.execute((data / "schema.sql").read_text())
        con.execute(f"INSERT INTO schema_meta FROM '{data / 'schema_meta.parquet'}'")
    with rlinsight.connect(path) as con:
        assert con.execute("SELECT count(*) FROM runs").fetchone() == (0,)


def test_unusable_stores_are_told(tmp_path):
    """No store, a damaged file and a database of something else are errors with a way out."""
    with pytest.raises(StoreError, match="rlinsight train"):
        rlinsight.connect(tmp_path / "none.duckdb")
    (tmp_path / "bad.duckdb").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="damaged"):
        rlinsight.connect(tmp_path / "bad.duckdb")
    with duckdb.connect(str(tmp_path / "other.duckdb")) as con:
        con.execute("CREATE TABLE customers (id INT)")
    with pytest.raises(StoreError, match="customers"):
        rlinsight.connect(tmp_path / "other.duckdb")


def test_closing_frees_the_file(at_rest, tmp_path):
    """After the connection is closed a collector can have the store."""
    path = Path(shutil.copy(at_rest, tmp_path / "s.duckdb"))
    rlinsight.connect(path).close()
    Database(path).close()


def test_the_store_is_found_as_the_command_line_finds_it(at_rest, tmp_path, monkeypatch):
    """RLINSIGHT_STORE, else runs/rlinsight.duckdb in the working directory."""
    (tmp_path / "runs").mkdir()
    shutil.copy(at_rest, tmp_path / "runs" / "rlinsight.duckdb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLINSIGHT_STORE", raising=False)
    assert rlinsight.query("FROM steps").num_rows == 5
    monkeypatch.setenv("RLINSIGHT_STORE", str(tmp_path / "none.duckdb"))
    with pytest.raises(StoreError, match=r"none\.duckdb"):
        rlinsight.query("FROM steps")


def test_importing_the_package_stays_light():
    """``import rlinsight`` loads nothing of the store; an unknown attribute is still an error."""
    code = (
        "import sys, rlinsight; assert 'rlinsight.store' not in sys.modules; assert callable(rlinsight.query);"
        "assert callable(rlinsight.connect); assert 'duckdb' not in sys.modules; assert not hasattr(rlinsight, 'qurey')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
