"""Metric series to one figure of panels over a shared time axis, with the run's phases and steps behind them.

Pure: frames in, Plotly figure out. What is asked of the store stands in ``metric_queries``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards import palette
from dashboards.metric_queries import is_rate
from dashboards.queries import Frame, Row
from dashboards.text import duration, escape, missing, number, percent, snippet

COLUMNS = 2
PANEL, GAP = 150, 74  # pixels of a panel; between two rows of them, for time below and a title of two lines above
MARGIN = {"l": 8, "r": 8, "t": 36, "b": 34}
FAINT = "rgba(138,148,163,.22)"
COLOURS = (
    palette.BLUE, palette.AMBER, palette.GREEN, palette.VIOLET, palette.PINK, palette.BROWN, palette.TEAL, palette.GREY,
)  # fmt: skip
LEGEND = 95  # characters of labels over one panel


@dataclass(frozen=True)
class Panel:
    """One metric: a row of ``metric_queries.catalog`` and its ``metric_queries.series``."""

    metric: Row
    series: Frame


def figure(panels: list[Panel], phases: Frame, steps: Frame, since_ns: int, until_ns: int) -> go.Figure:
    """The panels in rows of COLUMNS; zooming one zooms all."""
    rows = -(-len(panels) // COLUMNS)
    inner = rows * PANEL + (rows - 1) * GAP
    drawn = make_subplots(rows, COLUMNS, vertical_spacing=GAP / inner, horizontal_spacing=0.05)
    notes, shapes = [], []
    for i, panel in enumerate(panels):
        axis = "" if i == 0 else str(i + 1)
        title = _panel(drawn, panel, {"row": i // COLUMNS + 1, "col": i % COLUMNS + 1})
        notes.append(_title(title, axis))
        shapes += _behind(phases, steps, axis)
        notes += _step_numbers(steps, axis) if i < COLUMNS else []
    first, last = _time(since_ns, " "), _time(until_ns, " ")
    drawn.update_layout(
        height=inner + MARGIN["t"] + MARGIN["b"], margin=MARGIN, font_size=11, uirevision="keep",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", showlegend=False, hovermode="x unified",
        shapes=shapes, annotations=notes,
    )  # fmt: skip
    drawn.update_xaxes(matches="x", showgrid=False, zeroline=False, range=[first, last], tickfont_size=10, nticks=8)
    drawn.update_yaxes(showgrid=True, gridcolor=FAINT, zeroline=False, nticks=5, tickfont_size=10, rangemode="tozero")
    return drawn


def labels(series: Frame) -> dict[Any, str]:
    """What tells each series from the others: service, rank, host and attributes that differ; instances if need be."""
    about = {}
    for row in series.drop_duplicates("series").itertuples():
        attributes = {} if missing(row.attributes) else json.loads(row.attributes)
        about[row.series] = {
            "service": row.service_name, "rank": row.rank, "host": row.host, **attributes,
            "instance": row.service_instance_id,
        }  # fmt: skip
    keys = list(dict.fromkeys(key for facts in about.values() for key in facts if key != "instance"))
    differing = [key for key in keys if len({str(facts.get(key)) for facts in about.values()}) > 1]
    texts = {one: _text(facts, differing) for one, facts in about.items()}
    if len(set(texts.values())) < len(texts):
        texts = {one: _text(facts, [*differing, "instance"]) for one, facts in about.items()}
    return {one: text or _text(about[one], ["service"]) or "all" for one, text in texts.items()}


def _text(facts: dict[str, Any], keys: list[str]) -> str:
    values = [number(facts[key]) if key == "rank" else str(facts[key]) for key in keys if not missing(facts.get(key))]
    return " ".join(value.removeprefix("rlinsight.") for value in values)


def _panel(drawn: go.Figure, panel: Panel, at: dict[str, int]) -> str:
    """Draw the lines of one metric; returns its title as HTML."""
    metric, names = panel.metric, labels(panel.series)
    form = _Form(str(metric["name"]), None if missing(metric["unit"]) else str(metric["unit"]),
                 is_rate(str(metric["kind"]), bool(metric["is_monotonic"])))  # fmt: skip
    histogram = metric["kind"] == "histogram"
    keys = []
    ordered = sorted(names, key=lambda one: names[one])
    for one, colour in zip(ordered, COLOURS, strict=False):
        part = panel.series[panel.series["series"] == one]
        x = pd.to_datetime(part["time_ns"])
        if histogram:
            drawn.add_scatter(
                x=x, y=part["high"], mode="lines", line={"color": colour, "width": 1, "dash": "dot"},
                name=f"{escape(names[one])} p99", hovertemplate="%{y:.4~g}", **at,
            )  # fmt: skip
        drawn.add_scatter(
            x=x, y=part["value"], customdata=part["high"], name=escape(snippet(names[one], 60)),
            mode="lines+markers" if len(part) <= 60 else "lines", line={"color": colour, "width": 1.5},
            marker={"size": 4}, hovertemplate=form.hover + ("" if histogram else " (highest %{customdata:.4~g})"), **at,
        )  # fmt: skip
        latest = part["value"].dropna()
        reading = form.text(latest.iloc[-1]) if len(latest) else ""
        keys.append((colour, names[one], reading))
    drawn.update_yaxes(
        {"tickformat": form.ticks(panel.series), "ticksuffix": form.suffix}, row=at["row"], col=at["col"]
    )
    total = 0 if panel.series.empty else int(panel.series["total"].iloc[0])
    hidden = f"{len(names)} of {total:,} series, the highest" if total > len(names) else ""
    what = ", ".join(filter(None, ["median, dotted 0.99" if histogram else "", form.unit, hidden]))
    title = f"<b>{escape(snippet(metric['name'], 60))}</b>  <span style='color:{palette.GREY}'>{escape(what)}</span>"
    return f"{title}<br>{_legend(keys)}"


def _legend(keys: list[tuple[str, str, str]]) -> str:
    """Labels in their colours with the latest value, as many as have room."""
    parts, room = [], LEGEND
    for colour, label, reading in keys:
        text = f"{snippet(label, 40)} {reading}".strip()
        room -= len(text) + 3
        if room < 0:
            parts.append(f"+{len(keys) - len(parts)} more")
            break
        parts.append(f"<span style='color:{colour}'>{escape(text)}</span>")
    return " · ".join(parts) or f"<span style='color:{palette.GREY}'>a first point alone: no change to show yet</span>"


class _Form:
    """How numbers of one metric are written. Units are UCUM's: braces hold what is counted."""

    def __init__(self, name: str, unit: str | None, rate: bool) -> None:
        self.is_share = not rate and unit in ("1", None) and name.endswith(("utilization", "_perc", "_ratio"))
        self._sent = (unit or "").strip("{}").replace("1", "")
        self.unit = {"By": "bytes", "Cel": "°C"}.get(self._sent, self._sent) + ("/s" if rate else "")
        self.suffix = {"s": " s", "bytes": "B", "bytes/s": "B/s", "W": " W", "°C": " °C"}.get(self.unit, "")
        self.hover = "%{y:.1%}" if self.is_share else f"%{{y:.4~s}}{self.suffix}"

    def text(self, value: float) -> str:
        """The value for a title."""
        if self.is_share:
            return percent(value)
        if self.unit == "s":
            return duration(value)
        for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if self.suffix.startswith("B") and abs(value) >= size:
                return f"{number(value / size)} {prefix}{self.suffix}"
        return number(value) + (f" {self.suffix.strip()}" if self.suffix else "")

    def ticks(self, series: Frame) -> str:
        """Plotly's tick format."""
        if self.is_share:
            return ".0%" if missing(series["value"].max()) or series["value"].max() > 0.05 else ".1%"
        return "~s" if self._sent == "By" or series["value"].abs().max() >= 10_000 else ""


def _title(text: str, axis: str) -> dict[str, Any]:
    return {
        "text": text, "xref": f"x{axis} domain", "yref": f"y{axis} domain", "x": 0, "y": 1.0, "xanchor": "left",
        "yanchor": "bottom", "showarrow": False, "font": {"size": 11}, "align": "left",
    }  # fmt: skip


def _behind(phases: Frame, steps: Frame, axis: str) -> list[dict[str, Any]]:
    """Bands of phases and lines of step starts behind one panel, a shape per colour: each costs Plotly 4 ms."""
    common = {"type": "path", "xref": f"x{axis}", "yref": f"y{axis} domain", "layer": "below"}
    shapes = []
    for phase, part in phases.groupby("phase"):
        bands = zip(part["start_ns"].map(_time), part["end_ns"].map(_time), strict=True)
        path = " ".join(f"M{x0},0 L{x0},1 L{x1},1 L{x1},0 Z" for x0, x1 in bands)
        colour = palette.PHASE.get(str(phase), palette.GREY)
        shapes.append({**common, "path": path, "line_width": 0, "fillcolor": colour, "opacity": 0.13})
    if len(steps):
        path = " ".join(f"M{x},0 L{x},1" for x in steps["start_ns"].map(_time))
        shapes.append({**common, "path": path, "line": {"color": palette.GREY, "width": 1, "dash": "dot"}})
    return shapes


def _step_numbers(steps: Frame, axis: str) -> list[dict[str, Any]]:
    return [
        {
            "text": f"{step.step}", "xref": f"x{axis}", "yref": f"y{axis} domain", "x": _time(step.start_ns, " "),
            "y": 1, "xanchor": "left", "yanchor": "top", "showarrow": False,
            "font": {"size": 9, "color": palette.GREY},
        }
        for step in steps.itertuples()
    ]  # fmt: skip


def _time(ns: int, between: str = "_") -> str:
    """A time as Plotly reads it; in paths an underscore stands between day and time."""
    return pd.Timestamp(int(ns)).strftime(f"%Y-%m-%d{between}%H:%M:%S.%f")
