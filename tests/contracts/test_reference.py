"""The reference in docs/reference/ is what the code says, and the code says something about everything."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

from collectors import reference
from collectors.projections import PROJECTIONS
from rlinsight import schema
from rlinsight.cli import app, main

ROOT = Path(__file__).parents[2]
FILES = schema.files()
MACROS = [file for file in FILES if file.kind == "macros"]


@pytest.fixture(scope="module")
def con() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    schema.apply(connection, Path(":memory:"))
    return connection


def test_the_committed_pages_are_current():
    """What `rlinsight docs` would write is there already; run it when this fails."""
    result = CliRunner().invoke(app, ["docs", "--check", "-o", str(ROOT / "docs" / "reference")])
    assert result.exception is None, result.exception


def test_a_stale_page_is_named(tmp_path, monkeypatch, capsys):
    """After a change by hand --check fails with the page's name and leaves it alone; writing again repairs it."""
    assert CliRunner().invoke(app, ["docs", "-o", str(tmp_path)]).exit_code == 0
    page = tmp_path / "views.md"
    page.write_text("by hand")
    monkeypatch.setattr("sys.argv", ["rlinsight", "docs", "--check", "-o", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "views.md is not what" in capsys.readouterr().err
    assert page.read_text() == "by hand"
    assert CliRunner().invoke(app, ["docs", "-o", str(tmp_path)]).exit_code == 0
    assert page.read_text() != "by hand"


def test_every_column_of_the_domain_is_explained(con):
    """By the attribute that fills it, or as a column that means the same everywhere."""
    known = reference.sources()
    domain = {projection.table for projection in PROJECTIONS}
    columns = [(table, column) for table, types in schema.columns(con).items() if table in domain for column in types]
    assert [key for key in columns if key not in known and key[1] not in reference.COLUMNS] == []


def test_every_object_is_on_its_page():
    """Each table, view and macro has a heading and its comment; each macro over a relation an example."""
    pages = reference.pages()
    for file in FILES:
        assert f"\n## {file.name}\n" in pages[f"{file.kind}.md"]
        assert file.comment.partition(" Example: ")[0] in pages[f"{file.kind}.md"]
    assert [file.name for file in MACROS if "AS TABLE" in file.sql and reference.example(file) is None] == []


@pytest.mark.parametrize("file", [file for file in MACROS if reference.example(file)], ids=lambda file: file.name)
def test_examples_run(con, file):
    """Each example in a macro's comment binds and runs, on an empty store."""
    con.execute(reference.example(file)).fetchall()
