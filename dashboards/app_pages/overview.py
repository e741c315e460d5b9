"""Overview: is the run learning, is it healthy, how fast is it; and the way from a curve to its step."""

from __future__ import annotations

import json

import pandas as pd
import streamlit as st
import yaml

from dashboards import alerts, charts, empty, frame, palette, queries, state
from dashboards.frame import View
from dashboards.queries import Frame
from dashboards.text import DASH, duration, escape, missing, number, percent


def body(view: View) -> None:
    curves = queries.curves(view.read, view.run_id)
    opened = queries.open_spans(view.read_live, view.run_id)
    if not curves.empty:
        _readings(view, curves)
    raised = queries.raised_alerts(view.read, view.run_id)
    _alerts(alerts.find(view.run, curves, opened, raised, view.linked, view.dropped))
    if curves.empty:
        empty.no_steps(str(view.run["status"]))
    else:
        _curves(view, curves)
    _open_now(opened, view.live)
    _about(view)


def _readings(view: View, curves: Frame) -> None:
    window = max(1, min(5, len(curves) // 2))
    first, last = curves.head(window).mean(numeric_only=True), curves.tail(window).mean(numeric_only=True)
    walls = queries.step_walls(view.read, view.run_id, view.steps_done - 19, view.steps_done)
    wall = walls["wall_s"].tail(5).mean() if len(walls) else None
    total = None if missing(view.run["total_steps"]) else int(view.run["total_steps"])
    columns = st.columns(6)
    with columns[0]:
        st.metric(
            "Step",
            f"{view.steps_done} / {total or DASH}",
            _left(view, total, wall),
            delta_color="off",
            delta_arrow="off",
            border=True,
            height="stretch",
        )
    readings = [
        (
            f"Reward, last {window} steps" if window > 1 else "Reward",
            "reward_mean",
            number,
            "normal",
            "mean over rollouts",
        ),
        ("Response length", "response_length_mean", number, "off", "sampled tokens per rollout"),
        ("Truncated", "response_length_truncated", percent, "inverse", "responses cut off at max_new_tokens"),
        ("Tokens per second", "tokens_per_s", number, "off", "prompt and response tokens over the step's wall time"),
    ]
    for column, (label, name, form, sense, meaning) in zip(columns[1:5], readings, strict=True):
        change = last[name] - first[name]
        known = len(curves) > 1 and not missing(change) and change != 0
        text = f"{'+' if change > 0 else '-'}{form(abs(change))} since the first {window}" if known else None
        column.metric(label, form(last[name]), text, delta_color=sense, border=True, help=meaning, height="stretch")
    spread = f"{duration(walls['wall_s'].min())} to {duration(walls['wall_s'].max())}" if len(walls) else None
    columns[5].metric(
        "Step time", duration(wall), spread, delta_color="off", delta_arrow="off", border=True, height="stretch"
    )


def _left(view: View, total: int | None, wall: float | None) -> str | None:
    if not view.live or total is None or wall is None or missing(wall):
        return None
    return f"about {duration(max(0, total - view.steps_done) * wall)} left"


def _alerts(found: list[alerts.Alert]) -> None:
    colours = {"bad": palette.RED, "warn": palette.AMBER}
    notes = [f'<div class="rl-note" style="border-color:{colours[a.level]}">{escape(a.text)}</div>' for a in found]
    if notes:
        st.html("".join(notes))


def _curves(view: View, curves: Frame) -> None:
    resumed = queries.attempts(view.read, view.run_id)
    resumed = resumed[resumed["attempt"] > resumed["attempt"].min()]["resumed_from_step"].dropna()
    figure = charts.overview(
        curves,
        queries.signals(view.read, view.run_id),
        queries.components(view.read, view.run_id),
        queries.validation(view.read, view.run_id),
        queries.drops(view.read, view.run_id),
        [int(step) + 1 for step in resumed],
        state.step(),
    )
    width = int(curves["steps"].max())
    notes = [f"each point is the mean of {width} steps"] if width > 1 else []
    notes += ["dotted line: resumed from a checkpoint"] if len(resumed) else []
    _selected(curves, notes)
    event = st.plotly_chart(
        figure, key="curves", on_select="rerun", selection_mode="points", config={"displayModeBar": False}
    )
    points = event["selection"]["points"]
    if points and int(points[0]["x"]) not in (0, state.step()):  # 0 is a validation before any step
        state.select("step", int(points[0]["x"]))
        st.rerun(scope="fragment")


def _selected(curves: Frame, notes: list[str]) -> None:
    """The selected step in one line, with the ways onward."""
    step = state.step()
    row = curves[curves["step"] == step]
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        if row.empty:
            st.caption("; ".join(["Click a point to select its step", *notes]))
            return
        facts = ", ".join(
            f"{label} {number(row.iloc[0][name])}"
            for label, name in (("reward", "reward_mean"), ("length", "response_length_mean"), ("entropy", "entropy"))
        )
        st.markdown(f"**Step {step}**: {facts}", width="content")
        link = {"run": str(state.get("run")), "step": str(step)}
        st.page_link("app_pages/timeline.py", label="Timeline", icon=":material/view_timeline:", query_params=link)
        st.page_link(
            "app_pages/rollouts.py",
            label="Rollouts",
            icon=":material/list:",
            query_params=link | {"from": str(step), "to": str(step)},
        )
        st.button("Clear", type="tertiary", on_click=state.select, args=("step", None))
        if notes:
            st.caption("; ".join(notes))


def _open_now(opened: Frame, live: bool) -> None:
    if opened.empty:
        return
    st.markdown("#### Open now" if live else "#### Open when last heard of")
    shown = pd.DataFrame(
        {
            "span": opened["name"].str.cat(opened["method"], sep=" ").fillna(opened["name"]),
            "lane": opened["lane"],
            "step": opened["step"],
            "open for": opened["age_s"].map(duration),
            "usually": opened["usual_s"].map(duration),
        }
    )
    st.dataframe(shown, hide_index=True, height="content", placeholder=DASH)


def _about(view: View) -> None:
    with st.expander("Attempts"):
        attempts = queries.attempts(view.read, view.run_id)
        attempts.insert(3, "took", attempts.pop("duration_s").map(duration))
        st.dataframe(attempts, hide_index=True, height="content", placeholder=DASH)
    with st.expander("Completeness"):
        edges = queries.linkage(view.read, view.run_id)
        edges["linked share"] = [percent(row.linked / row.n) if row.n else DASH for row in edges.itertuples()]
        left, right = st.columns(2)
        left.dataframe(edges, hide_index=True, height="content")
        right.dataframe(
            queries.health(view.read_live, view.run_id), hide_index=True, height="content", placeholder=DASH
        )
    with st.expander("Configuration"):
        _configuration(queries.run_facts(view.read, view.run_id))


def _configuration(facts: Frame) -> None:
    if facts.empty or missing(facts["config"][0]):
        st.caption("The sender recorded no configuration.")
        return
    row = facts.iloc[0]
    host = {} if missing(row["host"]) else json.loads(row["host"])
    st.html(
        '<div class="rl-facts">'
        + "".join(
            f"<span><span class='rl-dim'>{escape(key)}</span> {escape(value)}</span>"
            for key, value in {"code": row["code_version"], "config sha256": row["config_hash"], **host}.items()
            if not isinstance(value, dict | list)
        )
        + "</div>"
    )
    st.code(yaml.safe_dump(json.loads(row["config"]), sort_keys=False), language="yaml")


frame.page(body)
