"""One rollout in full: facts, texts, reward parts, tokens, siblings, trace."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboards import charts, palette, rollout_queries, state, tokens
from dashboards.frame import View
from dashboards.queries import Frame, Row
from dashboards.text import DASH, duration, escape, missing, number


def show(view: View, rollout_id: str) -> None:
    """Draw the rollout; says so when the run does not hold it."""
    found = rollout_queries.rollout(view.read, view.run_id, rollout_id)
    if found.empty:
        st.caption(f"This run holds no rollout {rollout_id}.")
        return
    row = found.iloc[0]
    _facts(row)
    left, right = st.columns([5, 6])
    with left:
        _text("Prompt", row["prompt_text"])
        if not missing(row["answer"]):
            st.html(
                f'<div class="rl-facts"><span class="rl-dim">answer</span> <code>{escape(row["answer"])}</code></div>'
            )
    with right:
        _text("Response", row["response_text"])
        _rewards(rollout_queries.reward_components(view.read, view.run_id, rollout_id))
    _tokens(view, rollout_id)
    if not missing(row["group_id"]):
        _siblings(view, row)
    _trace(view, row)


def _facts(row: Row) -> None:
    finish = row["finish_reason"]
    signal = row["signal"]
    chips = [
        _chip(finish, palette.FINISH.get(finish, palette.GREY)),
        _chip(palette.SIGNAL_LABEL.get(signal), palette.SIGNAL.get(signal, palette.GREY)),
    ]
    seconds = None if missing(row["end_ns"]) else (row["end_ns"] - row["start_ns"]) / 1e9
    versions = row["policy_version_min"], row["policy_version_max"]
    version = number(versions[0]) if versions[0] == versions[1] else f"{number(versions[0])} to {number(versions[1])}"
    facts = {
        "step": number(row["step"]),
        "reward": number(row["reward"]),
        "advantage": number(row["advantage"]),
        "tokens": f"{number(row['prompt_tokens'])} + {number(row['response_tokens'])}",
        "policy version": version,
        "staleness": number(row["staleness"]),
        "took": duration(seconds),
        "source": escape(row["data_source"]),
    }
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.html(
            f'<div class="rl-facts"><span><b>{escape(row["rollout_id"])}</b></span>{"".join(chips)}'
            + "".join(f'<span><span class="rl-dim">{key}</span> <b>{value}</b></span>' for key, value in facts.items())
            + "</div>"
        )
        st.button("Close", type="tertiary", on_click=state.select, args=("rollout", None))


def _chip(label: str | None, colour: str) -> str:
    return "" if missing(label) else f'<span class="rl-chip" style="color:{colour}">{escape(label)}</span>'


def _text(title: str, text: str | None) -> None:
    st.markdown(f"#### {title}")
    if missing(text):
        st.caption("Text was not captured (telemetry.text is redacted or off).")
    else:
        st.html(f'<div class="rl-text">{escape(text)}</div>')


def _rewards(parts: Frame) -> None:
    if parts.empty:
        return
    four = st.column_config.NumberColumn(format="%.4g")
    columns = {"value": four, "weight": four, "contribution": four, "ms": st.column_config.NumberColumn(format="%.1f")}
    st.dataframe(parts, hide_index=True, height="content", placeholder=DASH, row_height=28, column_config=columns)


def _tokens(view: View, rollout_id: str) -> None:
    start = 0
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.markdown("#### Tokens", width="content")
        where = st.container(horizontal=True, vertical_alignment="center")
    part = rollout_queries.tokens(view.read, view.run_id, rollout_id, 0)
    if part.empty:
        st.caption("No token arrays are stored for this rollout (telemetry.token_arrays is off, or not delivered yet).")
        return
    total = int(part["total"][0])
    if total > rollout_queries.MAX_TOKENS:
        pages = -(-total // rollout_queries.MAX_TOKENS)
        with where:
            start = (st.pagination(pages, key=f"tokens-{rollout_id}") - 1) * rollout_queries.MAX_TOKENS
        part = rollout_queries.tokens(view.read, view.run_id, rollout_id, start)
    names = tokens.available(part)
    if not names:
        st.caption("Token ids are stored, their log-probs are not.")
        return
    with where:
        channel = st.segmented_control(
            "Colour by",
            names,
            default=names[0],
            required=True,
            key="colour",
            bind="query-params",
            label_visibility="collapsed",
        )
    channel = channel if channel in names else names[0]
    st.html(tokens.legend(part, channel) + tokens.strip(part, channel))
    if total > len(part):
        st.caption(f"Tokens {start + 1:,} to {start + len(part):,} of {total:,}.")
    positions = part["pos"] if part["turn_index"].nunique() == 1 else pd.Series(range(start, start + len(part)))
    st.plotly_chart(
        charts.token_profile(tokens.values(part, channel), positions, channel),
        key="profile",
        config={"displayModeBar": False},
    )


def _siblings(view: View, row: Row) -> None:
    group = rollout_queries.siblings(view.read, view.run_id, row["group_id"])
    total = int(group["total"][0]) if len(group) else 0
    more = f", the best {len(group)} of {total}" if total > len(group) else ""
    st.markdown(f"#### Its group: {total} rollouts of one prompt{more}")
    width = 4
    for start in range(0, len(group), width):
        for column, sibling in zip(st.columns(width), group.iloc[start : start + width].itertuples(), strict=False):
            with column.container(border=True):
                _card(sibling, sibling.rollout_id == row["rollout_id"])


def _card(sibling, current: bool) -> None:
    text = '<span class="rl-dim">text not captured</span>' if missing(sibling.response) else escape(sibling.response)
    colour = palette.GREY if missing(sibling.advantage) else palette.GREEN if sibling.advantage > 0 else palette.RED
    colour = palette.GREY if sibling.advantage == 0 else colour
    st.html(
        f'<div class="rl-facts"><b style="color:{colour}">{number(sibling.reward)}</b>'
        f'<span class="rl-dim">advantage {number(sibling.advantage)}</span>'
        f'<span class="rl-dim">{number(sibling.response_tokens)} tokens</span>'
        f"{_chip(sibling.finish_reason, palette.FINISH.get(sibling.finish_reason, palette.GREY))}</div>"
        f'<div class="rl-card">{text}</div>'
    )
    st.button(
        "This one" if current else "Open", key=f"open-{sibling.rollout_id}", disabled=current, type="tertiary",
        on_click=state.select, args=("rollout", sibling.rollout_id),
    )  # fmt: skip


def _trace(view: View, row: Row) -> None:
    with st.expander("Trace"):
        if missing(row["trace_id"]):
            st.caption("No span of this rollout is stored.")
            return
        st.page_link(
            "app_pages/traces.py", label=f"Trace {row['trace_id']}", icon=":material/account_tree:",
            query_params={"trace": str(row["trace_id"])},
        )  # fmt: skip
        spans = rollout_queries.trace(view.read, row["trace_id"])
        if len(spans):
            origin = spans["start_ns"].min()
            spans.insert(2, "at", ((spans.pop("start_ns") - origin) / 1e9).map(duration))
            spans["seconds"] = spans["seconds"].map(duration)
        st.dataframe(spans, hide_index=True, height="content", placeholder=DASH)
