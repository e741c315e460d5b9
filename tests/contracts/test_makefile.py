"""The Makefile gets from a bare or broken machine to an environment, or says what is wanting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def _make(venv: Path, python: str | Path) -> subprocess.CompletedProcess[str]:
    """Make the environment; what would be installed in it is only printed."""
    command = ["make", f"{venv}/.train", f"VENV={venv}", f"PYTHON={python}", "PIP=echo pip"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_half_made_environment_is_made_anew(tmp_path: Path) -> None:
    """A venv that has a python but no pip gets one; the same command then leaves a whole one alone."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    made = _make(venv, sys.executable)
    assert made.returncode == 0, made.stderr
    subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], check=True, stdout=subprocess.DEVNULL)
    (venv / ".train").unlink()
    again = _make(venv, "no-such-python")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("body", ["#!/bin/sh\nexit 1\n", None])
def test_an_old_or_missing_python_is_told_before_anything_is_made(tmp_path: Path, body: str | None) -> None:
    """One line names the version wanted and the interpreter found; no folder is left behind."""
    python = tmp_path / "python3.9"
    if body:
        python.write_text(body)
        python.chmod(0o755)
    failed = _make(tmp_path / "venv", python)
    assert failed.returncode != 0
    assert f"needs Python 3.11 or newer, and {python} is not" in failed.stderr.splitlines()[0]
    assert not (tmp_path / "venv").exists()
