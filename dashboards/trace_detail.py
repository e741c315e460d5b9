"""One trace in full: its waterfall, a span of it with all that was sent, what it links to, and its log records."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboards import palette, state, trace_queries
from dashboards.frame import StoreView
from dashboards.queries import Frame, Row
from dashboards.text import DASH, duration, escape, missing, number, snippet
from dashboards.waterfall import colours, service_of, tree, waterfall

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
STATUS = {1: ("ok", palette.GREEN), 2: ("error", palette.RED)}
CELL = 4000  # characters of a value a table cell holds


def show(view: StoreView, trace_id: str) -> None:
    """Draw the trace; says so when the store does not hold it."""
    found = trace_queries.spans(view.read, trace_id, state.get("trace_span"))
    if found.empty:
        st.caption(f"This store holds no span of trace {trace_id}.")
        st.button("Close", type="tertiary", on_click=state.select, args=("trace", None))
        return
    rows = tree(found)
    chosen = state.get("trace_span")
    selected = chosen if chosen is not None and chosen in set(rows["span_id"]) else str(rows["span_id"][0])
    _facts(trace_id, rows)
    _chart(rows, selected)
    _choice(rows, selected)
    _span(view, trace_id, rows[rows["span_id"] == selected].iloc[0])
    _linked_from(trace_queries.linked_from(view.read, trace_id))
    _logs(trace_queries.logs(view.read, trace_id), int(rows["start_ns"].min()))


def _open(trace_id: str, span_id: str) -> None:
    state.select("trace", trace_id)
    state.select("trace_span", span_id)


def _facts(trace_id: str, rows: Frame) -> None:
    total, known = int(rows["total"][0]), rows["end_ns"].dropna()
    seconds = (int(known.max()) - int(rows["start_ns"].min())) / 1e9 if len(known) else None
    facts = {
        "trace": escape(trace_id),
        "began": f"{pd.Timestamp(int(rows['start_ns'].min())):%Y-%m-%d %H:%M:%S} UTC",
        "took": duration(seconds),
        "spans": f"{total:,}",
        "failed": f"{int(rows['failed'].fillna(False).sum()):,}",
    }
    services = "".join(
        f'<span><span style="color:{colour}">■</span> {escape(name)}</span>' for name, colour in colours(rows).items()
    )
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.html(
            f'<div class="rl-facts"><span><b>{escape(snippet(rows["name"][0], 80))}</b></span>'
            + "".join(f'<span><span class="rl-dim">{key}</span> <b>{value}</b></span>' for key, value in facts.items())
            + f"{services}</div>"
        )
        st.button("Close", type="tertiary", on_click=state.select, args=("trace", None))
    if total > len(rows):
        st.caption(f"{len(rows):,} of {total:,} spans drawn: the failed ones, then the longest.")


def _chart(rows: Frame, selected: str) -> None:
    # Nobody knows how long the open spans of a silent run went on: they are drawn to the last thing it reported.
    live = rows["open_for"].eq("running").any()
    now_ns = time.time_ns() if live else int(rows[["start_ns", "end_ns"]].max().max())

    def choose() -> None:
        points = st.session_state["waterfall"]["selection"]["points"]
        if points:
            state.select("trace_span", str(np.ravel(points[0]["customdata"])[0]))

    st.plotly_chart(
        waterfall(rows, now_ns, selected), key="waterfall", on_select=choose, selection_mode="points",
        config={"displayModeBar": False},
    )  # fmt: skip


def _choice(rows: Frame, selected: str) -> None:
    names = {str(row.span_id): f"{'· ' * min(int(row.depth), 12)}{row.name}" for row in rows.itertuples()}
    st.session_state["span_choice"] = selected
    st.selectbox(
        "Span", list(names), format_func=lambda span_id: names.get(str(span_id), str(span_id)), key="span_choice",
        on_change=lambda: state.select("trace_span", st.session_state["span_choice"]),
    )  # fmt: skip


def _span(view: StoreView, trace_id: str, row: Row) -> None:
    found = trace_queries.span(view.read, trace_id, str(row["span_id"]))
    if found.empty:
        st.caption("This span has begun and not ended: its attributes, events and links arrive with its end.")
        return
    sent = found.iloc[0]
    _span_facts(sent, str(row["span_id"]))
    links = _json(sent["links"]) or []
    _links(view, trace_id, links)
    left, right = st.columns([6, 5])
    with left:
        st.markdown("#### Attributes")
        _pairs(_json(sent["span_attributes"]) or {}, "It has none.")
    with right:
        _events(_json(sent["events"]) or [], int(sent["start_ns"]))
        st.markdown("#### Resource")
        _pairs(_json(sent["resource_attributes"]) or {}, "Its sender did not say what it is.")


def _span_facts(sent: Row, span_id: str) -> None:
    label, colour = STATUS.get(int(sent["status_code"] or 0), ("status unset", palette.GREY))
    scope = " ".join(str(part) for part in (sent["scope_name"], sent["scope_version"]) if not missing(part))
    lost = {
        what: int(sent[f"dropped_{what}_count"] or 0)
        for what in ("attributes", "events", "links")
        if not missing(sent[f"dropped_{what}_count"])
    }
    facts = {
        "span": escape(span_id),
        "kind": KINDS.get(0 if missing(sent["kind"]) else int(sent["kind"]), "unspecified"),
        "service": escape(service_of(sent["service_name"])),
        "instance": escape(sent["service_instance_id"]),
        "scope": escape(scope or None),
        "took": duration((sent["end_ns"] - sent["start_ns"]) / 1e9),
        "run": escape(sent["run_id"]),
        "step": number(sent["step"]),
    }
    st.html(
        f'<div class="rl-facts"><span><b>{escape(snippet(sent["name"], 100))}</b></span>'
        f'<span class="rl-chip" style="color:{colour}">{label}</span>'
        + "".join(f'<span><span class="rl-dim">{k}</span> <b>{v}</b></span>' for k, v in facts.items() if v != DASH)
        + "</div>"
    )
    if not missing(sent["status_message"]):
        st.html(f'<div class="rl-note" style="border-color:{colour}">{escape(sent["status_message"])}</div>')
    if any(lost.values()):
        said = ", ".join(f"{count:,} {what}" for what, count in lost.items() if count)
        st.html(f'<div class="rl-note" style="border-color:{palette.AMBER}">Its sender dropped {said}.</div>')


def _links(view: StoreView, trace_id: str, links: list[dict[str, Any]]) -> None:
    """A way to each linked span, in this trace or another."""
    if not links:
        return
    shown = [(str(link.get("trace_id")), str(link.get("span_id"))) for link in links[: trace_queries.MAX_LINKS]]
    names = trace_queries.named(view.read, shown)
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown("**Links to**", width="content")
        for i, target in enumerate(shown):
            where = "this trace" if target[0] == trace_id else f"trace {target[0][:8]}"
            if target in names:
                st.button(
                    f"{_plain(names[target])} in {where}", key=f"link-{i}", type="tertiary", icon=":material/link:",
                    on_click=_open, args=target,
                )  # fmt: skip
            else:
                st.caption(f"span {target[1]} in {where} (not stored)")
        if len(links) > len(shown):
            st.caption(f"and {len(links) - len(shown):,} more")


def _linked_from(found: Frame) -> None:
    if found.empty:
        return
    total = int(found["total"][0])
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown("**Linked from**", width="content")
        for i, row in enumerate(found.itertuples()):
            st.button(
                f"{_plain(row.name)} in trace {row.trace_id[:8]}", key=f"from-{i}", type="tertiary",
                icon=":material/link:", on_click=_open, args=(str(row.trace_id), str(row.span_id)),
            )  # fmt: skip
        if total > len(found):
            st.caption(f"and {total - len(found):,} more")


def _events(events: list[dict[str, Any]], start_ns: int) -> None:
    if not events:
        return
    st.markdown(f"#### Events: {len(events)}")
    shown = pd.DataFrame(
        {
            "after": [duration((event.get("time_ns", start_ns) - start_ns) / 1e9) for event in events],
            "event": [event.get("name") for event in events],
            "attributes": [_cell(event.get("attributes") or None) for event in events],
        }
    )
    st.dataframe(shown, hide_index=True, height="content" if len(shown) <= 8 else 300, placeholder=DASH)


def _pairs(values: dict[str, Any], nothing: str) -> None:
    if not values:
        st.caption(nothing)
        return
    shown = pd.DataFrame({"key": list(values), "value": [_cell(value) for value in values.values()]})
    st.dataframe(
        shown, hide_index=True, height="content" if len(shown) <= 14 else 440, placeholder=DASH,
        column_config={"value": st.column_config.TextColumn("value", width="large")},
    )  # fmt: skip


def _logs(found: Frame, origin: int) -> None:
    if found.empty:
        st.caption("No log record carries this trace id.")
        return
    total = int(found["total"][0])
    more = f", the first {len(found):,} of {total:,}" if total > len(found) else ""
    st.markdown(f"#### Log records: {total:,}{more}")
    shown = pd.DataFrame(
        {
            "after": ((found["time_ns"] - origin) / 1e9).map(duration),
            "severity": found["severity"].replace("", None),
            "service": found["service_name"],
            "event": found["event_name"],
            "body": found["body"],
            "attributes": found["attributes"].replace("{}", None),
            "span": found["span_id"],
        }
    )
    st.dataframe(shown.dropna(axis="columns", how="all"), hide_index=True, placeholder=DASH,
                 height="content" if len(shown) <= 12 else 420)  # fmt: skip


def _json(text: str | None) -> Any:
    return None if missing(text) else json.loads(str(text))


def _cell(value: Any) -> str | None:
    """A value as one text; the SQL page has all of one that is cut."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= CELL else f"{text[:CELL]}… ({len(text):,} characters)"


def _plain(name: str) -> str:
    """A name inside a button's label, where Markdown would be read."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()<>#+-.!|~:$" else c for c in snippet(name, 40))
