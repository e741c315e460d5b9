"""Frames to Plotly figures. Pure: no Streamlit, no SQL. Colours and their meanings come from ``palette``."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards import palette, panels
from dashboards.queries import Frame, Row

COLUMNS = 3
PANEL_HEIGHT = 178
FAINT = "rgba(138,148,163,.22)"


def overview(
    curves: Frame,
    signals: Frame,
    components: Frame,
    validation: Frame,
    drops: Frame,
    resumed: Iterable[int] = (),
    step: int | None = None,
) -> go.Figure:
    """Small multiples by step, those of ``panels.chosen``: ``resumed`` are first steps of later attempts, ``step`` the
    selected one."""
    drawn = panels.chosen(curves, signals, components, validation, drops)
    rows = -(-len(drawn) // COLUMNS)
    cells = [{} if i < len(drawn) else None for i in range(rows * COLUMNS)]
    specs = [cells[row * COLUMNS : (row + 1) * COLUMNS] for row in range(rows)]
    figure = make_subplots(rows, COLUMNS, specs=specs, vertical_spacing=0.3 / rows, horizontal_spacing=0.045)
    for i, (title, draw) in enumerate(drawn):
        at = {"row": i // COLUMNS + 1, "col": i % COLUMNS + 1}
        reading = draw(figure, curves, at)
        _title(figure, at, title, reading)
    x = pd.concat([curves["step"], validation["step"]]) if len(curves) else pd.Series([0])
    figure.update_xaxes(matches="x", showgrid=False, zeroline=False, range=[x.min() - 0.5, x.max() + 0.5])
    figure.update_yaxes(showgrid=True, gridcolor=FAINT, zeroline=False, nticks=4, tickfont_size=10)
    figure.update_xaxes(tickfont_size=10, nticks=8)
    for first in resumed:
        figure.add_vline(x=first - 0.5, line={"color": palette.GREY, "width": 1, "dash": "dot"}, row="all", col="all")  # type: ignore[arg-type]
    if step is not None:
        figure.add_vline(x=step, line={"color": palette.AMBER, "width": 1.5}, row="all", col="all")  # type: ignore[arg-type]
    _layout(figure, rows * PANEL_HEIGHT)
    figure.update_layout(showlegend=False, hovermode="x unified", hoversubplots="axis", clickmode="event+select")
    figure.update_layout(barmode="stack", bargap=0.25)
    return figure


def phase_shares(phases: Frame, share: bool, step: int | None = None) -> go.Figure:
    """Stacked bars of seconds, or of the share of the step, per phase; the unattributed rest on top."""
    figure = go.Figure()
    wide = phases.pivot_table(index="step", columns="phase", values="seconds", aggfunc="sum").fillna(0.0)
    if share:
        wide = wide.div(wide.sum(axis=1), axis=0)
    order = [phase for phase in palette.PHASE if phase in wide.columns]
    order += [phase for phase in wide.columns if phase not in order]
    for phase in order:
        unit = "%{y:.1%}" if share else "%{y:.2f} s"
        figure.add_bar(
            x=wide.index,
            y=wide[phase],
            name=phase,
            marker={"color": palette.PHASE.get(phase, palette.GREY), "line": {"width": 0}},
            hovertemplate=f"{unit}<extra>{phase}</extra>",
        )
    _layout(figure, 270)
    figure.update_layout(barmode="stack", bargap=0.08, hovermode="x unified", showlegend=True)
    figure.update_layout(legend={"orientation": "v", "x": 1.01, "y": 1, "font_size": 11, "traceorder": "reversed"})
    figure.update_yaxes(tickformat=".0%" if share else None, ticksuffix="" if share else " s", gridcolor=FAINT)
    figure.update_xaxes(title_text=None, showgrid=False)
    if step is not None:
        figure.add_vline(x=step, line={"color": palette.AMBER, "width": 1.5})
    return figure


def token_profile(values: Row, positions: Row, label: str) -> go.Figure:
    """The strip's number along the response."""
    figure = go.Figure()
    figure.add_bar(x=positions, y=values, marker={"color": palette.BLUE, "line": {"width": 0}}, name=label)
    figure.update_traces(hovertemplate="token %{x}: %{y:.4f}<extra></extra>")
    _layout(figure, 120)
    figure.update_layout(bargap=0.1, showlegend=False)
    figure.update_yaxes(gridcolor=FAINT, nticks=4)
    figure.update_xaxes(showgrid=False)
    return figure


def _layout(figure: go.Figure, height: int) -> None:
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 24, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font_size=11,
        uirevision="keep",  # a live refresh keeps the reader's zoom
    )


def _title(figure: go.Figure, at: dict[str, int], title: str, reading: str) -> None:
    text = f"<b>{title}</b>" + (f"  <span style='color:{palette.GREY}'>{reading}</span>" if reading else "")
    figure.add_annotation(
        text=text, xref="x domain", yref="y domain", x=0, y=1.0, xanchor="left", yanchor="bottom", showarrow=False,
        font_size=12, **at,
    )  # fmt: skip
