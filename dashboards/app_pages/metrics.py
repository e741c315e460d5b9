"""Metrics: what clocks sampled on machines, processes, engines and anything else, beside the run's steps and phases."""

from __future__ import annotations

import time

import pandas as pd
import streamlit as st

from dashboards import empty, frame, metric_charts, metric_queries, palette, state
from dashboards.frame import StoreView
from dashboards.metric_charts import Panel
from dashboards.metric_queries import Window
from dashboards.queries import Frame, Row
from dashboards.text import DASH, ago, escape, missing

PANELS = 8
MINUTE = 60 * 10**9
WINDOWS = {
    "all of it": None,
    "last 5 min": 5,
    "last 15 min": 15,
    "last hour": 60,
    "last 6 hours": 360,
    "last day": 1440,
}
GROUPS = ("Machines", "Processes", "GPUs", "Scraped", "Other")
PREFIXES = {"system.": "Machines", "process.": "Processes", "hw.": "GPUs"}
# What to look at first, by the beginning of its name; the rest follows in order of names.
FIRST = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage", "vllm:generation_tokens",
    "vllm:prompt_tokens", "vllm:time_to_first_token", "vllm:e2e_request_latency", "vllm:num_preemptions", "vllm:",
    "hw.gpu.utilization", "hw.gpu.memory.usage", "system.cpu", "system.memory.usage", "process.cpu", "process.memory",
)  # fmt: skip


def body(view: StoreView) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        place, controls = st.container(width=360), st.container(horizontal=True, vertical_alignment="bottom")
    run_id = None
    if len(view.runs):
        run_id = frame.run_selector(view.runs, place, "Everything, in runs or not")
    if run_id is not None and run_id not in set(view.runs["run_id"]):
        empty.unknown_run(run_id)
        return
    targets = metric_queries.scrape_targets(view.read, run_id)
    with controls:
        window = _window(view, run_id)
    if window is None:
        empty.no_metrics(view.path, view.endpoint)
        return
    _silent(targets)
    _charts(view, window, controls)
    _targets(targets)


def _window(view: StoreView, run_id: str | None) -> Window | None:
    """The stretch of time to draw; None where nothing was sampled. Windows count back from the newest point."""
    step = state.step() if run_id is not None else None
    steps = {} if step is None else {f"step {step}": step}
    choice = st.selectbox("Time", [*WINDOWS, *steps], key="window", width=140, bind="query-params")
    if choice in steps and run_id is not None:
        found = metric_queries.step_window(view.read, run_id, steps[choice])
        return None if found is None else Window(*found, run_id)
    extent = _whole(view, run_id)
    if extent is None:
        return None
    minutes = WINDOWS[str(choice)]
    return Window(extent[0] if minutes is None else max(extent[0], extent[1] - minutes * MINUTE), extent[1], run_id)


def _whole(view: StoreView, run_id: str | None) -> tuple[int, int] | None:
    """All that was sampled; for a run its time, in which its neighbours that belong to no run are of interest too."""
    sampled = metric_queries.extent(view.read, run_id)
    if run_id is None:
        return sampled
    run = view.runs[view.runs["run_id"] == run_id].iloc[0]
    known = [*(sampled or ()), *(int(ns) for ns in (run["started_ns"], run["ended_ns"]) if not missing(ns))]
    if sampled is None and run["status"] == "running":
        known.append(time.time_ns())
    return (min(known), max(known)) if known else None


def _charts(view: StoreView, window: Window, controls) -> None:
    catalog = metric_queries.catalog(view.read, window)
    catalog["group"] = [_group(row) for _, row in catalog.iterrows()]
    offered = [group for group in GROUPS if (catalog["group"] == group).any()]
    if not offered:
        empty.no_metrics(view.path, view.endpoint)
        return
    with controls:
        group = st.segmented_control("Of", offered, default=offered[0], required=True, key="of", bind="query-params")
        of_group = catalog[catalog["group"] == (group if group in offered else offered[0])]
        names = sorted(dict.fromkeys(of_group["name"]), key=_order)
        wanted = st.multiselect("Metrics", names, key="metrics", placeholder="all", width=420, bind="query-params")
    shown = of_group[of_group["name"].isin(wanted or names)]
    shown = shown.iloc[sorted(range(len(shown)), key=lambda i: _order(shown["name"].iloc[i]))]
    pages = -(-len(shown) // PANELS)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        phases = _phases(view, window)
        page = min(st.pagination(pages, key="metrics_page"), pages) if pages > 1 else 1
    panels = [
        Panel(row, metric_queries.series(view.read, row["name"], row["kind"], bool(row["is_monotonic"]), window))
        for _, row in shown.iloc[(page - 1) * PANELS : page * PANELS].iterrows()
    ]
    steps = metric_queries.steps(view.read, window)
    st.plotly_chart(
        metric_charts.figure(panels, phases, steps, window.since_ns, window.until_ns), key="panels",
        config={"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
    )  # fmt: skip
    if len(catalog) == metric_queries.MAX_NAMES:
        st.caption(f"Only the first {len(catalog):,} metrics by name are offered; the SQL page has all.")
    _meanings(shown)


def _group(metric: Row) -> str:
    if metric["scraped"]:
        return "Scraped"
    return next((group for prefix, group in PREFIXES.items() if metric["name"].startswith(prefix)), "Other")


def _order(name: str) -> tuple[int, str]:
    return next((i for i, prefix in enumerate(FIRST) if name.startswith(prefix)), len(FIRST)), name


def _phases(view: StoreView, window: Window) -> Frame:
    """Bands behind the panels, and what their colours say."""
    phases = metric_queries.phases(view.read, window)
    said = {name: colour for name, colour in palette.PHASE.items() if name in set(phases["phase"])}
    keys = "".join(f'<span><span style="color:{c}">■</span> {escape(n)}</span>' for n, c in said.items())
    span = " to ".join(f"{pd.Timestamp(ns):%Y-%m-%d %H:%M:%S}" for ns in (window.since_ns, window.until_ns))
    st.html(f'<div class="rl-facts"><span class="rl-dim">{span} UTC</span>{keys}</div>')
    return phases


def _meanings(shown: Frame) -> None:
    with st.expander("What these are"):
        about = shown[["name", "kind", "unit", "description"]].drop_duplicates()
        st.dataframe(about, hide_index=True, height="content" if len(about) <= 12 else 420, placeholder=DASH)


def _silent(targets: Frame) -> None:
    """A red note for each endpoint that does not answer."""
    notes = []
    for target in targets[~targets["up"].fillna(False).astype(bool)].itertuples():
        since = "never has" if missing(target.last_success) else f"last did {target.last_success:%Y-%m-%d %H:%M:%S} UTC"
        reason = "" if missing(target.last_error) else f": {target.last_error}"
        notes.append(f"{target.target} does not answer at {target.url}; it {since}{reason}")
    if notes:
        style = f'class="rl-note" style="border-color:{palette.RED}"'
        st.html("".join(f"<div {style}>{escape(note)}</div>" for note in notes))


def _targets(targets: Frame) -> None:
    st.markdown("#### Scrape targets")
    if targets.empty:
        st.caption(
            "None: name engines and exporters under `telemetry.scrape` of a run's configuration, "
            "e.g. `[{name: engine, url: http://127.0.0.1:8000/metrics}]`."
        )
        return
    now = pd.Timestamp.now("UTC").tz_localize(None)
    shown = pd.DataFrame(
        {
            "target": targets["target"],
            "state": ["up" if up else "no answer" for up in targets["up"].fillna(False).astype(bool)],
            "url": targets["url"],
            "scrapes": targets["scrapes"],
            "failed": targets["failures"],
            "last scrape": [DASH if missing(at) else ago((now - at).total_seconds()) for at in targets["last_scrape"]],
            "last error": targets["last_error"],
            "run": targets["run_id"],
        }
    )
    bad = f"color: {palette.RED}; font-weight: 600"
    styled = shown.style.map(lambda said: bad if said == "no answer" else "", subset=["state"])
    styled = styled.map(lambda failed: f"color: {palette.RED}" if failed else "", subset=["failed"])
    st.dataframe(styled, hide_index=True, height="content" if len(shown) <= 10 else 380, placeholder=DASH)


frame.store_page(body)
