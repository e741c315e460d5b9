"""What docs/sql.md tells people to type works, beside a live collector, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collectors.live import Collector, collector
from tests.synthetic import Run, fill

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?m)^    (rlinsight .*)$", TEXT)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHELL = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Collector]]:
    """A project folder with a store in its usual place, behind a collector."""
    folder = tmp_path_factory.mktemp("project")
    store = folder / "runs" / "rlinsight.duckdb"
    fill(store, Run("quickstart-20260131-101500-1f3a", "quickstart"))
    with collector(store) as running:
        yield folder, running


def _run(command: list[str] | str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        shell=isinstance(command, str),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(live: tuple[Path, Collector], command: str) -> None:
    """Every command line answers."""
    _run(command, live[0])


@pytest.mark.parametrize("number", range(2))
def test_python_runs(live: tuple[Path, Collector], number: int) -> None:
    """Each Python example, pasted into a file, prints rows."""
    assert len(PYTHON) == 2
    assert "0 rows" not in _run([sys.executable, "-c", PYTHON[number]], live[0])


def test_statements_for_the_duckdb_shell_run(live: tuple[Path, Collector]) -> None:
    """The statements work in any DuckDB client once the address and token are filled in."""
    import duckdb

    (text,) = SHELL
    packages = Path(duckdb.__file__).parents[1]
    text = text.replace(".venv/lib/python3.11/site-packages", str(packages))
    text = text.replace("quack:127.0.0.1:<port>", live[1].endpoint.sql).replace("<token>", live[1].endpoint.token)
    assert duckdb.connect().execute(text).fetchall()
