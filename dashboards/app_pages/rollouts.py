"""Rollouts: find the ones that matter, then read one down to its tokens beside its siblings."""

from __future__ import annotations

import hashlib
import re

import streamlit as st

from dashboards import empty, frame, rollout_detail, rollout_queries, state
from dashboards.frame import View
from dashboards.palette import SIGNAL_LABEL
from dashboards.queries import Row
from dashboards.rollout_queries import RolloutFilter
from dashboards.text import DASH, missing, number, percent, snippet

PAGE = 50
SPLITS = {"train": "training", "eval": "evaluation", "baseline": "greedy baseline"}
MARKERS = re.compile(r"<\|[^|>]*\|>(system|user|assistant)?")
COLUMNS = {
    "step": st.column_config.NumberColumn("step", width=60),
    "reward": st.column_config.NumberColumn("reward", format="%.3g", width=70),
    "advantage": st.column_config.NumberColumn("advantage", format="%+.3f", width=85),
    "response_tokens": st.column_config.NumberColumn("tokens", width=65),
    "finish_reason": st.column_config.TextColumn("finish", width=65),
    "signal": st.column_config.TextColumn("group", width=75, help="whether the rewards of its group differ"),
    "staleness": st.column_config.NumberColumn("stale", width=55, help="policy versions behind the trainer when used"),
    "data_source": st.column_config.TextColumn("source", width=110),
    "prompt": st.column_config.TextColumn("prompt", width="large"),
    "response": st.column_config.TextColumn("response", width="large"),
}


def body(view: View) -> None:
    choices = rollout_queries.rollout_choices(view.read, view.run_id)
    if choices.empty or missing(choices["first"][0]):
        empty.no_steps(str(view.run["status"]))
        return
    chosen, sort = _filters(choices.iloc[0])
    counts = rollout_queries.rollout_counts(view.read, view.run_id, chosen).iloc[0]
    if not counts["n"]:
        empty.nothing_matches()
    else:
        _table(view, chosen, sort, counts)
    opened = state.get("rollout")
    if opened is not None:
        rollout_detail.show(view, opened)


def _first_page() -> None:
    st.session_state["page"] = 1


def _filters(choices: Row) -> tuple[RolloutFilter, str]:
    bound = {"bind": "query-params", "on_change": _first_page}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        text = st.text_input("Text", key="q", placeholder="in prompt or response", width=180, **bound)
        first = st.number_input("From step", 0, value=None, step=1, key="from", width=100, **bound)
        last = st.number_input("To step", 0, value=None, step=1, key="to", width=100, **bound)
        low = st.number_input("Reward ≥", value=None, step=0.1, key="low", width=100, **bound)
        high = st.number_input("Reward ≤", value=None, step=0.1, key="high", width=100, **bound)
        finish = st.multiselect("Finish", list(choices["finish"]), key="finish", width=150, placeholder="any", **bound)
        signal = st.multiselect(
            "Group", list(SIGNAL_LABEL), format_func=SIGNAL_LABEL.__getitem__, key="signal", width=150,
            placeholder="any", **bound,
        )  # fmt: skip
        sources = [] if choices["sources"] is None else list(choices["sources"])
        source = st.multiselect("Source", sources, key="source", width=150, placeholder="any", **bound)
        split = "train"
        splits = [name for name in SPLITS if name in choices["splits"]]
        if len(splits) > 1:
            split = st.selectbox("For", splits, format_func=SPLITS.__getitem__, key="for", width=115, **bound)
        sort = st.selectbox("Sort", list(rollout_queries.SORTS), key="sort", width=160, **bound)
    first, last = (None if step is None else int(step) for step in (first, last))
    chosen = RolloutFilter(first, last, low, high, tuple(finish), tuple(signal), tuple(source), str(split), text or "")
    return chosen, str(sort)


def _table(view: View, chosen: RolloutFilter, sort: str, counts: Row) -> None:
    pages = -(-int(counts["n"]) // PAGE)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        summary = st.empty()
        page = st.pagination(pages, key="page") if pages > 1 else 1
    rows = rollout_queries.rollout_page(view.read, view.run_id, chosen, sort, PAGE, min(page, pages))
    silent = rows["prompt"].isna().all() and rows["response"].isna().all()
    summary.caption(
        f"**{int(counts['n']):,}** rollouts · mean reward {number(counts['reward'])} · mean length "
        f"{number(counts['tokens'])} tokens · {percent(counts['truncated'])} truncated"
        + (" · texts were not captured" if silent else "")
    )
    opened = state.get("rollout")
    shown = rows.assign(
        signal=rows["signal"].map(SIGNAL_LABEL), prompt=rows["prompt"].map(_end), response=rows["response"].map(_line)
    )
    # A new key when the rows change: a row index kept from other rows would highlight the wrong rollout.
    key = "rows-" + hashlib.sha1(",".join(rows["rollout_id"]).encode()).hexdigest()[:12]
    index = rows.index[rows["rollout_id"] == opened].tolist()

    def choose() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        state.select("rollout", rows["rollout_id"][selected[0]] if selected else None)

    st.dataframe(
        shown, key=key, hide_index=True, column_order=list(COLUMNS), column_config=COLUMNS, placeholder=DASH,
        row_height=28,
        height=300 if opened else 560, on_select=choose, selection_mode="single-row",
        selection_default={"selection": {"rows": index}} if index else None,
    )  # fmt: skip


def _line(text: str | None) -> str | None:
    """One line without chat-template markers: they are the same in every row."""
    return None if missing(text) else snippet(MARKERS.sub(" ", str(text)), 220)


def _end(text: str | None) -> str | None:
    """The end of a prompt, where rows differ: a system message would fill the column with the same words."""
    if missing(text):
        return None
    line = " ".join(MARKERS.sub(" ", str(text)).split())
    return line if len(line) <= 90 else f"…{line[-90:]}"


frame.page(body)
