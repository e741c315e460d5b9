"""What importing rlinsight costs, and that the import rules cover every module."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "transformers", "duckdb", "streamlit", "plotly", "pandas", "pyarrow", "numpy")
MODULES = sorted(path.stem for path in (ROOT / "rlinsight").glob("*.py") if path.stem != "__init__")


def heavy_after(code: str) -> list[str]:
    """Heavy top-level modules loaded once a fresh interpreter has run ``code``."""
    report = f"{code}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def _processor_time(code: str) -> float:
    """Of a fresh interpreter that runs ``code``, the least of three; nothing heavy may be loaded after it."""

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    took = []
    for _ in range(3):
        before = children()
        assert heavy_after(code) == []
        took.append(children() - before)
    return min(took)


def test_a_heavy_import_would_be_seen() -> None:
    """The probe reports a module that was loaded."""
    assert heavy_after("import numpy") == ["numpy"]


@pytest.mark.parametrize("module", [*MODULES, "schema"])
def test_importing_rlinsight_is_light(module: str) -> None:
    """No module of rlinsight loads a training, storage or dashboard library when it is imported."""
    assert heavy_after(f"import rlinsight.{module}") == []


def test_help_is_light_and_instant() -> None:
    """`rlinsight --help` loads none of them, nor pydantic, and takes no more processor time than it takes to import
    the libraries that print it: a ratio, so that it holds on any machine.
    """
    run_help = "from rlinsight.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    took = _processor_time(f"{run_help}\nimport sys\nassert 'pydantic' not in sys.modules")
    assert took < _processor_time("import typer.rich_utils, rich.markdown, rich.table")


def test_the_reward_worker_starts_without_torch() -> None:
    """Verifiers need none of it; a reward model loads it when there is one."""
    probe = "import core_trainer.workers.reward, sys\nassert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_every_module_has_a_layer() -> None:
    """A new module of rlinsight must be given a place in the layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    placed = {name for layer in layers for name in layer.replace("|", " ").replace(":", " ").split()}
    assert {f"rlinsight.{module}" for module in [*MODULES, "schema"]} - placed == set()
