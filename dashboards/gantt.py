"""Spans to a Gantt chart: lanes, nested rows, open spans. Pure: frame in, Plotly figure out."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from dashboards import palette
from dashboards.queries import Frame
from dashboards.text import duration, escape, missing

ROW, THIN = 22.0, 6.0  # pixels of a row; of a rollout's row
MAX_ROWS = 72  # rows of one lane; spans that need more are left out and counted


@dataclass(frozen=True)
class Gantt:
    """The figure and how many spans found no row in it."""

    figure: go.Figure
    hidden: int


def gantt(spans: Frame, steps: Frame, now_ns: int) -> Gantt:
    """Chart of ``spans`` (columns of ``queries.spans``); seconds count from the earliest span.

    ``steps`` gives step starts to rule off when there are several. Open spans (end NULL) run to ``now_ns``, hatched.
    """
    rows = spans.assign(
        open=spans["end_ns"].isna(),
        end=spans["end_ns"].fillna(now_ns).astype("int64"),
        lane=spans["lane"].fillna("no lane").where(spans["rollout_id"].isna(), "rollouts"),
    )
    placed, lanes, hidden = _place(rows)
    origin = int(rows["start_ns"].min())
    figure = go.Figure()
    for (colour, is_open), part in placed.groupby(["colour", "open"], sort=False):
        bars(figure, part, str(colour), bool(is_open), origin)
    extent = (int(rows["end"].max()) - origin) / 1e9
    _axes(figure, lanes, extent)
    if len(steps) > 1:
        for step in steps.itertuples():
            figure.add_vline(x=(step.start_ns - origin) / 1e9, line={"color": palette.GREY, "width": 1, "dash": "dot"})
            figure.add_annotation(
                x=(step.start_ns - origin) / 1e9, yref="paper", y=1, yanchor="bottom", xanchor="left", showarrow=False,
                text=f"step {step.step}", font={"size": 10, "color": palette.GREY},
            )  # fmt: skip
    return Gantt(figure, hidden)


def lane_order(lane: str) -> tuple[int, str, int]:
    """Controller first, then workers by role and rank, rollouts last."""
    role, _, rank = lane.partition("/")
    place = {"controller": 0, "policy": 1, "reference": 2, "critic": 3, "reward": 4, "rollouts": 9}
    return place.get(role, 5), role, int(rank) if rank.isdigit() else 0


def _place(rows: Frame) -> tuple[Frame, list[tuple[str, float, float]], int]:
    """Centre and thickness of every span. Returns spans, lanes (name, top, bottom) and how many are left out.

    Inside a lane a span takes the first row that is free at its start; with parents sorted before children this draws
    nesting. All spans of one rollout share a row, the inner ones over the outer.
    """
    kept, lanes, top = [], [], 0.0
    for lane in sorted(rows["lane"].unique(), key=lane_order):
        part = rows[rows["lane"] == lane].copy()
        unit = part["rollout_id"].fillna(part["span_id"])
        extent = part.assign(unit=unit).groupby("unit").agg(start=("start_ns", "min"), end=("end", "max"))
        part["row"] = unit.map(_first_free_row(extent.sort_values(["start", "end"], ascending=[True, False])))
        part = part[part["row"] < MAX_ROWS]
        height = THIN if part["rollout_id"].notna().any() else ROW
        inner = part["rollout_id"].notna() & part["parent_span_id"].isin(set(part["span_id"]))
        part["y"] = top + (part["row"] + 0.5) * height
        part["thick"] = (height - 1.5) * inner.map({True: 0.55, False: 1.0})
        part["colour"] = [
            palette.span_colour(n, None if missing(p) else p) for n, p in zip(part["name"], part["phase"], strict=True)
        ]
        kept.append(part.assign(inner=inner))
        bottom = top + (part["row"].max() + 1) * height
        lanes.append((lane, top, bottom))
        top = bottom + 10
    placed = pd.concat(kept).sort_values("inner", kind="stable")
    return placed, lanes, len(rows) - len(placed)


def _first_free_row(extent: Frame) -> dict[str, int]:
    free_at: list[int] = []
    rows: dict[str, int] = {}
    for unit, start, end in extent.itertuples():
        row = next((i for i, free in enumerate(free_at) if free <= start), len(free_at))
        if row == len(free_at):
            free_at.append(0)
        free_at[row] = end
        rows[unit] = row
    return rows


def bars(figure: go.Figure, part: Frame, colour: str, is_open: bool, origin: int) -> None:
    """Add the spans of one look at their ``y`` and ``thick``; seconds count from ``origin``, a click gives the span id.

    Wide bars bear their name.
    """
    start = (part["start_ns"] - origin) / 1e9
    seconds = (part["end"] - part["start_ns"]) / 1e9
    label = [_label(*names) for names in zip(part["name"], part["phase"], part["method"], strict=True)]
    label_font = {"size": 11} if is_open else {"size": 11, "color": "#ffffff"}
    failed = part["failed"].fillna(False)
    hover = [
        f"<b>{text}</b><br>{'open for ' if is_open else ''}{duration(s)}, from {at:.3f} s<br>"
        + ("" if missing(step) else f"step {step} · ")
        + escape(lane)
        + ("" if missing(rollout) else f"<br>{escape(rollout)}")
        + ("<br>ended in an error" if bad else "")
        for text, s, at, step, lane, rollout, bad in zip(
            label, seconds, start, part["step"], part["lane"], part["rollout_id"], failed, strict=True
        )
    ]
    figure.add_bar(
        orientation="h", base=start, x=seconds, y=part["y"], width=part["thick"], hovertext=hover,
        customdata=part["span_id"], unselected={"marker": {"opacity": 1}},
        hovertemplate="%{hovertext}<extra></extra>",
        text=[text if thick >= ROW - 2 else "" for text, thick in zip(label, part["thick"], strict=True)],
        textposition="inside", insidetextanchor="start", textangle=0, textfont=label_font,
        marker={
            "color": colour,
            "line": {"width": [1.5 if bad else 0 for bad in failed], "color": palette.RED},
            **({"pattern": {"shape": "/", "size": 6, "solidity": 0.35}} if is_open else {}),
        },
    )  # fmt: skip


def _label(name: str, phase: str | None, method: str | None) -> str:
    if name == "rl.loop":
        return "step"
    if not missing(phase):
        return escape(phase)
    return escape(name.removeprefix("rl.") if missing(method) else method)


def _axes(figure: go.Figure, lanes: list[tuple[str, float, float]], extent: float) -> None:
    bottom = lanes[-1][2]
    for _, top, end in lanes:
        figure.add_shape(
            type="rect", xref="paper", x0=0, x1=1, y0=top - 4, y1=end + 4, line_width=0, layer="below",
            fillcolor="rgba(138,148,163,.09)",
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay", showlegend=False, height=int(bottom + 60), margin={"l": 8, "r": 8, "t": 22, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font_size=11, hovermode="closest",
        uirevision="keep", dragmode="zoom",
    )  # fmt: skip
    figure.update_yaxes(
        range=[bottom + 6, -6], tickvals=[(top + end) / 2 for _, top, end in lanes],
        ticktext=[escape(lane) for lane, _, _ in lanes], showgrid=False, zeroline=False, fixedrange=True,
    )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s", showgrid=True, gridcolor="rgba(138,148,163,.22)", zeroline=False,
                        range=[-0.005 * extent, 1.005 * extent])  # fmt: skip
