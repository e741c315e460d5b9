"""Timeline: what every process did during a step, where the time went, and what is still open."""

from __future__ import annotations

import time

import pandas as pd
import streamlit as st

from dashboards import charts, empty, frame, queries, state, trace_queries
from dashboards.frame import View
from dashboards.gantt import gantt
from dashboards.queries import Frame
from dashboards.text import DASH, duration, missing, percent

CONTEXT = 60  # steps drawn around the chosen one under Phases by step


def body(view: View) -> None:
    opened = queries.open_spans(view.read_live, view.run_id)
    newest = max([view.steps_done, *opened["step"].dropna().astype(int)], default=0)
    if newest == 0:
        empty.no_steps(str(view.run["status"]))
        return
    first, last = _range(view, newest)
    reads = view.read_live if view.live and last >= view.steps_done else view.read
    spans = queries.spans(reads, view.run_id, first, last)
    walls = queries.step_walls(view.read, view.run_id, first, last)
    _lanes(spans, walls, view.live)
    left, right = st.columns([5, 6])
    with left:
        _durations(view, min(first, view.steps_done), min(last, view.steps_done))
    with right:
        _by_step(view, first, newest)
        _totals(queries.span_totals(reads, view.run_id, first, last))


def _range(view: View, newest: int) -> tuple[int, int]:
    """First and last step to draw; without a selected step the newest is followed."""
    chosen = min(state.step() or newest, newest)
    st.session_state["step_input"] = chosen
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        st.number_input(
            "Step", 1, newest, key="step_input", width=130,
            on_change=lambda: state.select("step", st.session_state["step_input"]),
        )  # fmt: skip
        count = st.number_input("Steps shown", 1, 20, 1, key="span", bind="query-params", width=130)
        if state.step() is not None:
            st.button("Follow the newest", on_click=state.select, args=("step", None))
        st.page_link(
            "app_pages/rollouts.py",
            label="Rollouts of this step",
            query_params={"run": str(state.get("run")), "from": str(chosen), "to": str(chosen)},
        )
        trace = trace_queries.step_trace(view.read_live, view.run_id, chosen)
        if trace is not None:
            link = {"trace": trace, "run": str(state.get("run")), "step": str(chosen)}
            st.page_link("app_pages/traces.py", label="Trace of this step", query_params=link)
    return chosen, min(newest, chosen + int(count) - 1)


def _lanes(spans: Frame, walls: Frame, live: bool) -> None:
    if spans.empty:
        st.caption("No span of this step is stored yet.")
        return
    # Nobody knows how long the open spans of a silent run went on: they are drawn to the last thing it reported.
    now_ns = time.time_ns() if live else int(spans[["start_ns", "end_ns"]].max().max())
    drawn = gantt(spans, walls, now_ns)
    st.plotly_chart(
        drawn.figure, key="lanes", config={"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
    )
    total, shown = int(spans["total"][0]), len(spans) - drawn.hidden
    if shown < total:
        st.caption(f"{shown:,} of {total:,} spans drawn, the longest first. The tables below count all of them.")


def _durations(view: View, first: int, last: int) -> None:
    st.markdown(f"#### Where the time went: step {first}" + (f" to {last}" if last > first else ""))
    wide = queries.phase_seconds(view.read, view.run_id, max(1, first - CONTEXT), last)
    chosen = wide[wide["step"].between(first, last)].groupby("phase")
    here, skipped = chosen["seconds"].sum(), chosen["skipped"].first()
    if here.empty:
        st.caption("No step has finished yet.")
        return
    usual = wide.groupby("phase")["seconds"].median() * max(
        1, wide[wide["step"].between(first, last)]["step"].nunique()
    )
    total = here.sum()
    rows = [
        (
            phase,
            duration(here[phase]),
            percent(here[phase] / total),
            duration(usual[phase]),
            _note(here[phase], usual[phase], skipped[phase]),
        )
        for phase in sorted(here.index, key=lambda p: (p == "unattributed", -here[p]))
    ]
    rows.append(("step", duration(total), percent(1.0), DASH, ""))
    table = pd.DataFrame(rows, columns=["phase", "time", "share", f"median of last {CONTEXT}", "note"])
    st.dataframe(table, hide_index=True, height="content")


def _note(seconds: float, usual: float, skipped: str | None) -> str:
    """Why a phase did no work, or how far it is from its usual time when that is worth a look."""
    if not missing(skipped):
        return f"skipped: {skipped}"
    if missing(usual) or usual <= 0 or abs(seconds - usual) < 0.05:
        return ""
    return f"{(seconds - usual) / usual:+.0%}"


def _by_step(view: View, step: int, newest: int) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.markdown("#### Phases by step")
        unit = st.segmented_control(
            "Unit", ["seconds", "share"], default="seconds", required=True, key="unit", bind="query-params",
            label_visibility="collapsed",
        )  # fmt: skip
    phases = queries.phase_seconds(view.read, view.run_id, 1, newest)
    if phases.empty:
        st.caption("No finished phase yet.")
        return
    st.plotly_chart(charts.phase_shares(phases, unit == "share", step), key="phases", config={"displayModeBar": False})


def _totals(totals: Frame) -> None:
    if totals.empty:
        return
    st.markdown("#### Spans by name")
    shown = totals.assign(
        total=totals["total_s"].map(duration),
        mean=totals["mean_s"].map(duration),
        longest=totals["max_s"].map(duration),
    )[["name", "method", "lane", "n", "total", "mean", "longest"]]
    st.dataframe(shown, hide_index=True, height=250, placeholder=DASH)


frame.page(body)
