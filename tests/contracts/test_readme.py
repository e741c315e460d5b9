"""What the README and the command line tell people to type works."""

from __future__ import annotations

import inspect
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


def test_questions_are_counted_right() -> None:
    """README and changelog say how many questions docs/questions.md answers."""
    questions = re.findall(r"(?m)^### \d+\. ", (ROOT / "docs" / "questions.md").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"the query for {len(questions)} things" in README
    assert f"docs/questions.md: {len(questions)} questions" in changelog


@pytest.mark.parametrize("query", QUERIES)
def test_documented_queries_run(query: str, empty_store: duckdb.DuckDBPyConnection) -> None:
    """Every query in the README and in --help names tables and columns that exist."""
    empty_store.execute(query).fetchall()


def test_ctrl_c_is_described_as_it_works() -> None:
    """README and help say what is finished and what is dropped: a step whose update has not begun does not end."""
    for text in (README, inspect.getdoc(cli.train) or ""):
        (said,) = (paragraph for paragraph in text.split("\n\n") if "Ctrl-C" in paragraph)
        assert "update that has begun" in said
        assert "drop" in said
    (said,) = (paragraph for paragraph in (inspect.getdoc(cli.sft) or "").split("\n\n") if "Ctrl-C" in paragraph)
    assert "leaves one that resumes" in said  # a step there is one update


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^    |`)rlinsight ([a-z]+(?:-[a-z]+)*)((?: [a-z]+\b(?![./]))?)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_exist(page: Path) -> None:
    """Every `rlinsight <command>` of the README and of docs/ is a command, and so is what follows a group of them."""
    import typer

    app = typer.main.get_command(cli.app)
    for name, following in COMMAND.findall(page.read_text(encoding="utf-8")):
        assert name in app.commands, name  # type: ignore[attr-defined]
        command = app.commands[name]  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            assert following.strip() in command.commands, f"{name}{following}"


def test_options_on_a_page_exist() -> None:
    """Every long option on a line with a command is one of it."""
    import typer

    app = typer.main.get_command(cli.app)
    found = 0
    for page in PAGES:
        for line in re.findall(r"^    rlinsight .*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            words = line.split("#")[0].split()
            command = app.commands[words[1]]  # type: ignore[attr-defined]
            command = command.commands[words[2]] if hasattr(command, "commands") else command
            options = {option for parameter in command.params for option in parameter.opts}
            used = {word for word in words if word.startswith("--")}
            found += len(used)
            assert used <= options | {"--help"}, line
    assert found > 10
