"""Cached reads: ``queries`` ask through here, keyed by a version of the data, so an idle page costs one small query.

Owns the cache and the conversion of results; which questions are asked stands in ``queries``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from dashboards.queries import Frame, Read
from rlinsight import store


def read_at(path: Path, version: str) -> Read:
    """A reader whose answers are reused while ``version`` stays the same. Raises StoreError."""

    def read(sql: str, params: dict[str, Any]) -> Frame:
        return _cached(str(path), sql, params, version)

    return read


def read_now(path: Path) -> Read:
    """A reader that always asks the store. Raises StoreError."""

    def read(sql: str, params: dict[str, Any]) -> Frame:
        return _ask(str(path), sql, params)

    return read


@st.cache_data(max_entries=256, ttl=3600, show_spinner=False)
def _cached(path: str, sql: str, params: dict[str, Any], version: str) -> Frame:
    return _ask(path, sql, params)


def _ask(path: str, sql: str, params: dict[str, Any]) -> Frame:
    """Parameters the statement does not name are left out (DuckDB refuses them); numpy numbers become plain ones."""
    used = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in params.items()
        if f"${name}" in sql
    }
    return store.query(sql, store=Path(path), params=used or None).to_pandas()
