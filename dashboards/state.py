"""What the reader is looking at: store, run, step, rollout, trace, span; mirrored in the URL, so a link shows the same.

Filters are widgets bound to the URL by Streamlit itself; they live in their pages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import streamlit as st

from rlinsight.store import resolve

KEYS = ("run", "step", "rollout", "trace", "trace_span")


def store_path() -> Path:
    """``--store`` of the command line, else $RLINSIGHT_STORE, else the default of a run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--store")
    return resolve(parser.parse_known_args(sys.argv[1:])[0].store)


def restore() -> None:
    """Take over what a link says, and put the rest of the selection back after a page switch cleared the URL."""
    for key in KEYS:
        st.session_state[key] = st.query_params.get(key, st.session_state.get(key))
        _mirror(key)


def get(key: str) -> str | None:
    """The selected run id, step, rollout id, trace id or span id."""
    return st.session_state.get(key)


def step() -> int | None:
    """The selected step; None when none is, or the link's value is not a number."""
    value = get("step")
    return int(value) if value and value.isdigit() else None


def select(key: str, value: str | int | None) -> None:
    """Select; choosing another run forgets the step and rollout of the previous one, another trace its span."""
    value = None if value is None else str(value)
    if key == "run" and get("run") not in (None, value):
        select("step", None)
        select("rollout", None)
    if key == "trace" and get("trace") != value:
        select("trace_span", None)
    st.session_state[key] = value
    _mirror(key)


def _mirror(key: str) -> None:
    value = st.session_state[key]
    if value is None:
        st.query_params.pop(key, None)
    elif st.query_params.get(key) != value:
        st.query_params[key] = value
