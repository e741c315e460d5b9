"""Whole runs are slow tests, each of them, and start up to a dozen processes on a machine that may be busy."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 1200  # of a test with its fixture: a few runs of half a minute, when others keep the processors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder: the hook is called with the items of all."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
