"""What all pages share: run selector, status line, live refresh, and the right answer when there is nothing to show.

A page about a run hands its body to ``page`` and gets a ``View``; one about whole stores, with or without runs, to
``store_page`` and gets a ``StoreView``. StoreErrors end here as a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboards import empty, palette, queries, state, trace_queries
from dashboards.queries import Frame, Read, Row
from dashboards.reader import read_at, read_now
from dashboards.text import DASH, ago, duration, escape, missing, percent
from rlinsight import store
from rlinsight.errors import StoreError

REFRESH_S = 2.0
STORE_REFRESH_S = 5.0  # pages of the whole store have no small counter to watch: every batch may change what they show


@dataclass(frozen=True)
class View:
    """The selected run and how to read it."""

    path: Path
    run: Row  # a row of queries.runs
    read: Read  # answers move when a step or the run ends
    read_live: Read  # answers move with every stored batch
    linked: float | None  # share of joins that found their partner
    dropped: int  # telemetry items lost, over all producers

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

    @property
    def live(self) -> bool:
        return self.run["status"] == "running"

    @property
    def steps_done(self) -> int:
        return 0 if missing(self.run["last_step"]) else int(self.run["last_step"])


@dataclass(frozen=True)
class StoreView:
    """A store, its runs if it has any, and how to read it."""

    path: Path
    runs: Frame  # of queries.runs
    read: Read  # answers move with every stored batch
    endpoint: store.Endpoint | None  # of the collector that owns it right now


Body = Callable[[View], None]
V = TypeVar("V")


def page(body: Body, refresh: bool = True) -> None:
    """Draw the header and ``body``; both are redrawn every REFRESH_S while there is something to wait for.

    With ``refresh`` false only the header is: for a body the reader types in.
    """
    state.restore()
    waiting = st.session_state.setdefault("waiting", True)
    drawn: list[View] = []

    def draw() -> None:
        view = _header(drawn)
        if view is not None and refresh:
            _guarded(body, view)

    st.fragment(draw, run_every=REFRESH_S if waiting else None)()
    if drawn and not refresh:
        _guarded(body, drawn[0])


def store_page(body: Callable[[StoreView], None]) -> None:
    """Draw ``body`` over the whole store; redrawn every STORE_REFRESH_S while a collector lives or is waited for."""
    state.restore()
    waiting = st.session_state.setdefault("store_waiting", True)

    def draw() -> None:
        path = state.store_path()
        endpoint = store.read_endpoint(path)
        if path.exists():
            _guarded(lambda at: body(_store_view(at, endpoint)), path)
        else:
            empty.no_store(path)
        still = endpoint is not None or not path.exists()
        if still != st.session_state["store_waiting"]:
            st.session_state["store_waiting"] = still
            st.rerun()

    st.fragment(draw, run_every=STORE_REFRESH_S if waiting else None)()


def _store_view(path: Path, endpoint: store.Endpoint | None) -> StoreView:
    now = read_now(path)
    return StoreView(path, queries.runs(now), read_at(path, trace_queries.version(now)), endpoint)


def _guarded(body: Callable[[V], None], view: V) -> None:
    try:
        body(view)
    except StoreError as error:
        empty.store_error(error)


def _header(drawn: list[View]) -> View | None:
    path = state.store_path()
    view = None
    try:
        view = _select(path)
    except StoreError as error:
        empty.store_error(error)
    if view is not None:
        drawn.append(view)
    # A lost run may only be out of touch, so it is waited for too.
    waiting = view.run["status"] in ("running", "lost") if view is not None else True
    if waiting != st.session_state["waiting"]:
        st.session_state["waiting"] = waiting
        st.rerun()
    return view


def _select(path: Path) -> View | None:
    """Selector and status line. None when there is nothing to draw under them; the reason is then on the page."""
    if not path.exists():
        empty.no_store(path)
        return None
    runs = queries.runs(read_now(path))
    if runs.empty:
        empty.no_runs(path)
        return None
    left, right = st.columns([2, 7], vertical_alignment="center")
    run_id = run_selector(runs, left)
    if run_id is None:
        empty.no_run_selected()
        return None
    chosen = runs[runs["run_id"] == run_id]
    if chosen.empty:
        empty.unknown_run(run_id)
        return None
    view = _view(path, chosen.iloc[0])
    right.html(_status(view))
    return view


def run_selector(runs: Frame, where: DeltaGenerator, placeholder: str = "Pick a run") -> str | None:
    """The run the reader chose, the newest until then; None once the choice was cleared."""
    ids = [str(run_id) for run_id in runs["run_id"]]
    if state.get("run") is None and not st.session_state.get("cleared"):
        state.select("run", ids[0])
    current = state.get("run")
    options = ids if current is None or current in ids else [current, *ids]
    labels = {str(row.run_id): _label(row) for row in runs.itertuples()}
    # A browser answers with a label, which may by then have moved on with the run: all labels given out are kept.
    given = st.session_state.setdefault("labels", {})
    given |= {label: run_id for run_id, label in labels.items()}
    st.session_state["run_choice"] = current

    def chosen() -> None:
        choice = st.session_state["run_choice"]
        st.session_state["cleared"] = choice is None
        state.select("run", given.get(choice, choice))

    where.selectbox(
        "Run",
        options,
        index=None,
        format_func=lambda run_id: labels.get(str(run_id), str(run_id)),
        key="run_choice",
        on_change=chosen,
        placeholder=placeholder,
        label_visibility="collapsed",
    )
    return state.get("run")


def _label(row) -> str:
    """One line of the selector: state, id (name and start), progress."""
    dot = {"running": "●", "finished": "○", "interrupted": "◐"}.get(row.status, "✕")
    done = 0 if missing(row.last_step) else int(row.last_step)
    total = "" if missing(row.total_steps) else f"/{int(row.total_steps)}"
    return f"{dot} {row.run_id} · {done}{total} · {DASH if missing(row.model) else row.model}"


def _view(path: Path, run: Row) -> View:
    batches, steps = queries.versions(read_now(path), str(run["run_id"]))
    read_live = read_at(path, batches)
    # An ended run is read by batches too: what was still travelling when it ended moves no step counter.
    read = read_at(path, steps) if run["status"] == "running" else read_live
    edges = queries.linkage(read, str(run["run_id"]))
    n, linked = edges["n"].sum(), edges["linked"].sum()
    dropped = queries.health(read_live, str(run["run_id"]))["dropped"].fillna(0).sum()
    return View(path, run, read, read_live, float(linked / n) if n else None, int(dropped))


def _status(view: View) -> str:
    run = view.run
    colour = palette.STATUS.get(run["status"], palette.GREY)
    live = "rl-live" if view.live else ""
    total = None if missing(run["total_steps"]) else int(run["total_steps"])
    share = min(1.0, view.steps_done / total) if total else 0.0
    began = None if missing(run["started_ns"]) else time.time() - run["started_ns"] / 1e9
    length = None if missing(run["ended_ns"]) else (run["ended_ns"] - run["started_ns"]) / 1e9
    parts = [
        f'<span><span class="rl-dot {live}" style="background:{colour}"></span><b>{escape(run["name"])}</b> '
        f"{escape(run['status'])}</span>",
        f'<span>step <b>{view.steps_done}</b>{f" / {total}" if total else ""}<span class="rl-track">'
        f'<span class="rl-fill" style="width:{share:.1%};background:{colour}"></span></span></span>',
        f'<span class="rl-dim">{escape(run["algorithm"])} · {escape(run["model"])}</span>',
        f'<span class="rl-dim">started {ago(began)}{f", took {duration(length)}" if length else ""}</span>',
        _completeness(view),
        _source(view),
    ]
    return f'<div class="rl-bar">{"".join(parts)}</div>'


def _completeness(view: View) -> str:
    health = queries.health(view.read_live, view.run_id)
    refused = int(health["refused"].sum())
    good = (view.linked is None or view.linked >= 0.999) and not view.dropped and not refused
    counts = f" · refused <b>{refused:,}</b>" if refused else ""
    if len(health) and not health["emitted"].isna().all():
        counts = f"{counts} · emitted {health['emitted'].sum():,.0f} · stored {health['stored'].sum():,.0f}"
    return (
        f'<span title="linked: rows whose joins found their partner"><span style="color:'
        f'{palette.GREEN if good else palette.RED}">■</span> linked <b>{percent(view.linked)}</b>{counts} · dropped '
        f"<b>{view.dropped:,}</b></span>"
    )


def _source(view: View) -> str:
    if store.read_endpoint(view.path) is not None:
        return '<span class="rl-dim">live from the collector</span>'
    if view.live:
        return f'<span style="color:{palette.AMBER}">collector is down: showing what is stored</span>'
    return '<span class="rl-dim">read from the file</span>'
