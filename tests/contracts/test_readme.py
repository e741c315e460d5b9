"""What the README and the command line tell people to type works."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from rlinsight import cli, schema

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HELP = (ROOT / "rlinsight" / "cli.py").read_text(encoding="utf-8")

QUERIES = [
    *(
        query
        for block in re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
        for query in block.split(";")
        if query.strip()
    ),
    *re.findall(r'rlinsight sql "([^"]+)"', README + HELP),
    cli.RUNS,
]


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    path = tmp_path_factory.mktemp("store") / "empty.duckdb"
    con = duckdb.connect(str(path))
    schema.apply(con, path)
    return con


def test_readme_asks_three_questions() -> None:
    """The README shows SQL, so the parametrised test below covers it."""
    assert len(re.findall(r"(?m)^-- .*\?", README)) == 3


@pytest.mark.parametrize("query", QUERIES)
def test_documented_queries_run(query: str, empty_store: duckdb.DuckDBPyConnection) -> None:
    """Every query in the README and in --help names tables and columns that exist."""
    empty_store.execute(query).fetchall()


def test_ctrl_c_is_described_as_it_works() -> None:
    """README and help say what is finished and what is dropped: a step whose update has not begun does not end."""
    for text in (README, HELP):
        (said,) = (paragraph for paragraph in text.split("\n\n") if "Ctrl-C" in paragraph)
        assert "update that has begun" in said
        assert "drop" in said


def test_readme_names_commands_that_exist() -> None:
    """Every `rlinsight <command>` of the README is a command."""
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    known |= {group.name for group in cli.app.registered_groups}
    named = set(re.findall(r"(?:^\s*|`)rlinsight ([a-z]+)", README, re.MULTILINE))
    assert named
    assert named <= known
