"""One trace as a waterfall: a row per span, children under their parent. Pure: frame in, Plotly figure out."""

from __future__ import annotations

from collections import defaultdict
from itertools import cycle

import pandas as pd
import plotly.graph_objects as go

from dashboards import palette
from dashboards.gantt import bars
from dashboards.queries import Frame
from dashboards.text import duration, escape, missing, snippet

ROW = 20.0  # pixels
NAMES = 330  # pixels left of the chart, for names
INDENT, DEEPEST = 11, 14  # pixels a level; deeper ones stand like the deepest
CHARACTER = 6.1  # pixels of one, on average
SERVICES = (palette.BLUE, palette.TEAL, palette.VIOLET, palette.BROWN, palette.PINK, palette.GREEN, "#5f6caf")


def tree(spans: Frame) -> Frame:
    """``spans`` (columns of ``trace_queries.spans``) in the order a reader descends, with their ``depth``.

    A span whose parent is not among them stands at depth 0; siblings are ordered by start. Parents that form a circle
    have no beginning: the earliest of them is taken for it.
    """
    ordered = spans.sort_values(["start_ns", "span_id"]).reset_index(drop=True)
    known = set(ordered["span_id"])
    children: dict[str | None, list[int]] = defaultdict(list)
    for index, (own, parent) in enumerate(zip(ordered["span_id"], ordered["parent_span_id"], strict=True)):
        children[parent if parent in known and parent != own else None].append(index)
    order: list[tuple[int, int]] = []
    seen: set[int] = set()
    for start in [*children[None], *range(len(ordered))]:
        todo = [(start, 0)]
        while todo:
            index, depth = todo.pop()
            if index not in seen:
                seen.add(index)
                order.append((index, depth))
                todo += [(child, depth + 1) for child in reversed(children[ordered["span_id"][index]])]
    return ordered.loc[[index for index, _ in order]].assign(depth=[depth for _, depth in order]).reset_index(drop=True)


def colours(spans: Frame) -> dict[str, str]:
    """A colour for each service, in order of appearance."""
    names = dict.fromkeys(service_of(name) for name in spans["service_name"])
    return dict(zip(names, cycle(SERVICES), strict=False))


def service_of(name: str | None) -> str:
    """A service's name for people."""
    return "no service name" if missing(name) or not name else str(name)


def waterfall(rows: Frame, now_ns: int, selected: str | None) -> go.Figure:
    """Chart of ``tree``'s rows; seconds count from the earliest. Open spans run to ``now_ns``, hatched.

    Spans of a training run have the colours of the timeline, others that of their service.
    """
    by_service = colours(rows)
    end = rows["end_ns"].fillna(now_ns).astype("int64")
    drawn = rows.assign(
        open=rows["end_ns"].isna(),
        end=end.where(end >= rows["start_ns"], rows["start_ns"]),
        lane=rows["lane"].where(rows["lane"].notna(), rows["service_name"].map(service_of)),
        step=rows["step"].astype("Int64"),
        y=[(i + 0.5) * ROW for i in range(len(rows))],
        thick=ROW - 6,
        colour=[_colour(row, by_service) for row in rows.itertuples()],
    )  # fmt: skip
    origin = int(drawn["start_ns"].min())
    figure = go.Figure()
    for (colour, is_open), part in drawn.groupby(["colour", "open"], sort=False):
        bars(figure, part, str(colour), bool(is_open), origin)
    extent = max((int(drawn["end"].max()) - origin) / 1e9, 1e-9)
    figure.update_layout(
        barmode="overlay", showlegend=False, height=int(len(drawn) * ROW + 44), font_size=11, uirevision="keep",
        margin={"l": NAMES, "r": 8, "t": 8, "b": 24}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest", dragmode="zoom", clickmode="event+select",
        annotations=[_name(row) for row in drawn.itertuples()],
        shapes=[
            {
                "type": "rect", "xref": "paper", "x0": -1, "x1": 1, "y0": y - ROW / 2, "y1": y + ROW / 2,
                "line_width": 0, "layer": "below", "fillcolor": "rgba(217,144,47,.16)",
            }
            for y in drawn["y"][drawn["span_id"] == selected]
        ],
    )  # fmt: skip
    figure.update_yaxes(range=[len(drawn) * ROW, 0], visible=False, fixedrange=True)
    figure.update_xaxes(
        showgrid=True, gridcolor="rgba(138,148,163,.22)", zeroline=False, ticksuffix=" s",
        range=[-0.004 * extent, 1.004 * extent],
    )  # fmt: skip
    return figure


def _colour(row, by_service: dict[str, str]) -> str:
    if str(row.name).startswith("rl.") or not missing(row.phase):
        return palette.span_colour(row.name, None if missing(row.phase) else row.phase)
    return by_service[service_of(row.service_name)]


def _name(row) -> dict:
    """The name beside its bar, indented, with the duration behind it."""
    name = row.name if missing(row.method) else f"{row.name} {row.method}"
    shift = INDENT * min(row.depth, DEEPEST)
    took = "open" if row.open else duration((row.end - row.start_ns) / 1e9)
    room = int((NAMES - shift) / CHARACTER) - len(took) - 2
    colour = f' style="color:{palette.RED}"' if bool(pd.notna(row.failed) and row.failed) else ""
    dim = f'<span style="color:{palette.GREY}">'
    return {
        "text": f"<span{colour}>{escape(snippet(name, room))}</span>  {dim}{took}</span>",
        "xref": "paper", "x": 0, "xanchor": "left", "xshift": shift - NAMES + 6, "y": row.y, "yanchor": "middle",
        "showarrow": False, "align": "left",
    }  # fmt: skip
