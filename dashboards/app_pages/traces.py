"""Traces: any trace in the store, also of services that know nothing of training, down to one span."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import pandas as pd
import streamlit as st

from dashboards import empty, frame, state, trace_detail, trace_queries
from dashboards.frame import StoreView
from dashboards.queries import Frame
from dashboards.text import DASH, duration
from dashboards.trace_queries import TraceFilter
from dashboards.waterfall import service_of

PAGE = 50
MINUTE = 60 * 10**9
WINDOWS = {"any time": None, "last 15 min": 15, "last hour": 60, "last 6 hours": 360, "last day": 1440}
BETWEEN = "between"
COLUMNS = {
    "name": st.column_config.TextColumn("root", width=300),
    "service": st.column_config.TextColumn("service", width=170),
    "began": st.column_config.TextColumn("started, UTC", width=170),
    "took": st.column_config.TextColumn("duration", width=90),
    "spans": st.column_config.NumberColumn("spans", width=70),
    "errors": st.column_config.NumberColumn("errors", width=70),
    "services": st.column_config.NumberColumn("services", width=75),
    "run_id": st.column_config.TextColumn("run", width=220),
    "step": st.column_config.NumberColumn("step", width=60),
}


def body(view: StoreView) -> None:
    extent = trace_queries.extent(view.read)
    if extent is None:
        empty.no_spans(view.path, view.endpoint)
        return
    chosen = _filters(view, extent)
    total = trace_queries.trace_count(view.read, chosen)
    if total:
        _table(view, chosen, total)
    else:
        empty.no_trace_matches()
    opened = state.get("trace")
    if opened is not None:
        trace_detail.show(view, opened)


def _first_page() -> None:
    st.session_state["traces_page"] = 1


def _filters(view: StoreView, extent: tuple[int, int]) -> TraceFilter:
    bound = {"bind": "query-params", "on_change": _first_page}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        services = trace_queries.services(view.read)
        service = st.multiselect("Service", services, key="service", width=230, placeholder="any", **bound)
        name = st.text_input("Span name", key="name", placeholder="contains", width=170, **bound)
        text = st.text_input("Attributes", key="attributes", placeholder="contain this text", width=190, **bound)
        least = st.number_input("Span ms ≥", 0.0, value=None, step=100.0, key="ms", width=120, **bound)
        run = st.selectbox(
            "Run", list(view.runs["run_id"]), index=None, key="of_run", placeholder="any or none", width=230, **bound
        )
        window = st.selectbox("Started", [*WINDOWS, BETWEEN], key="within", width=130, **bound)
        errors = st.checkbox("Errors only", key="errors", **bound)
    since, until = _range(str(window), extent)
    seconds = None if least is None else least / 1000
    return TraceFilter(since, until, run, tuple(service), name or "", seconds, bool(errors), text or "")


def _range(window: str, extent: tuple[int, int]) -> tuple[int | None, int | None]:
    """First and last unix ns. Windows count back from the newest span: a store may be read long after its run."""
    if window != BETWEEN:
        minutes = WINDOWS[window]
        return (None if minutes is None else extent[1] - minutes * MINUTE), None
    # The inputs know whole minutes only.
    first, last = (datetime.fromtimestamp(ns // MINUTE * 60, UTC).replace(tzinfo=None) for ns in extent)
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        at = {"step": timedelta(minutes=1), "width": 230, "on_change": _first_page}
        since = st.datetime_input("From, UTC", first, key="since", **at)
        until = st.datetime_input("To, UTC", last + timedelta(minutes=1), key="until", **at)
    return _ns(since), _ns(until)


def _ns(at: datetime | None) -> int | None:
    return None if at is None else int(at.replace(tzinfo=UTC).timestamp()) * 10**9


def _table(view: StoreView, chosen: TraceFilter, total: int) -> None:
    pages = -(-total // PAGE)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        everything = chosen == TraceFilter()
        fitting = "" if everything else ", with a span that fits all of this"
        st.caption(f"**{total:,}** {'trace' if total == 1 else 'traces'}, newest first{fitting}")
        page = st.pagination(pages, key="traces_page") if pages > 1 else 1
    rows = trace_queries.trace_page(view.read, chosen, PAGE, min(page, pages))
    opened = state.get("trace")
    # A new key when the rows change: a row index kept from other rows would highlight the wrong trace.
    key = "traces-" + hashlib.sha1(",".join(rows["trace_id"]).encode()).hexdigest()[:12]
    index = rows.index[rows["trace_id"] == opened].tolist()

    def choose() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        state.select("trace", rows["trace_id"][selected[0]] if selected else None)

    shown = _shown(rows)
    st.dataframe(
        shown, key=key, hide_index=True, column_order=[c for c in COLUMNS if c in shown], column_config=COLUMNS,
        placeholder=DASH, row_height=28, height=230 if opened else 560, on_select=choose, selection_mode="single-row",
        selection_default={"selection": {"rows": index}} if index else None,
    )  # fmt: skip


def _shown(rows: Frame) -> Frame:
    names = zip(rows["name"], rows["has_root"], strict=True)
    shown = rows.assign(
        name=[name if rooted else f"{name} (its parent is not stored)" for name, rooted in names],
        service=rows["service"].map(service_of),
        began=pd.to_datetime(rows["start_ns"]).dt.strftime("%Y-%m-%d %H:%M:%S"),
        took=rows["duration_s"].map(duration),
    )
    return shown.drop(columns=[c for c in ("run_id", "step") if rows[c].isna().all()])


frame.store_page(body)
