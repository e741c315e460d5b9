"""Stores the dashboard tests read, filled once through the collector's own decoder and writer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from collectors.database import Database
from dashboards.launch import APP
from tests.synthetic import Run, fill

MAIN = "main-20251130-120000-aaaa"
RESUMED = "resumed-20251130-110000-bbbb"
FAILED = "failed-20251130-100000-cccc"
PRIVATE = "private-20251130-090000-dddd"
BARE = "bare-20251130-080000-eeee"
PPO = "ppo-20251130-060000-gggg"
EMPTY = "setup-20251130-070000-ffff"
HOUR = 3600 * 10**9


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ordinary (newest), resumed, failed, without texts, without arrays, without a step, and PPO with validation."""
    path = tmp_path_factory.mktemp("dash") / "store.duckdb"
    now = time.time_ns()
    fill(
        path,
        Run(MAIN, "main", steps=12, groups=4, group_size=4, start_ns=now - HOUR),
        Run(RESUMED, "resumed", steps=6, status="interrupted", total_steps=10, start_ns=now - 3 * HOUR),
        Run(RESUMED, "resumed", attempt=2, first_step=5, resumed_from_step=4, steps=6, start_ns=now - 2 * HOUR),
        Run(
            FAILED, "failed", steps=2, status="failed", reason="reward numeric raised KeyError", start_ns=now - 4 * HOUR
        ),
        Run(PRIVATE, "private", steps=2, texts=False, start_ns=now - 5 * HOUR),
        Run(BARE, "bare", steps=2, arrays=False, dropped=40, start_ns=now - 6 * HOUR),
        Run(EMPTY, "setup", steps=0, status="failed", reason="model not found", start_ns=now - 7 * HOUR),
        Run(PPO, "ppo", steps=8, groups=4, group_size=4, serving=True, ppo=True, start_ns=now - 8 * HOUR),
    )
    return path


@pytest.fixture(scope="session")
def bare_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the schema and nothing in it."""
    path = tmp_path_factory.mktemp("dash") / "bare.duckdb"
    Database(path).close()
    return path


@pytest.fixture
def open_page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """Open a page of the app on a store, with URL parameters."""

    def open_(store: Path, page: str = "overview", **params: Any) -> AppTest:
        monkeypatch.setenv("RLINSIGHT_STORE", str(store))
        app = AppTest.from_file(str(APP), default_timeout=30)
        for key, value in params.items():
            app.query_params[key] = str(value)
        app.switch_page(f"app_pages/{page}.py").run()
        assert not app.exception, app.exception
        return app

    return open_
