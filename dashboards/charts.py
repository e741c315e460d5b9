"""Frames to Plotly figures. Pure: no Streamlit, no SQL. Colours and their meanings come from ``palette``."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards import palette
from dashboards.queries import Frame, Row
from dashboards.text import number, percent

COLUMNS = 3
PANEL_HEIGHT = 178
FAINT = "rgba(138,148,163,.22)"


def overview(
    curves: Frame,
    signals: Frame,
    components: Frame,
    resumed: Iterable[int] = (),
    step: int | None = None,
) -> go.Figure:
    """Small multiples by step. ``resumed`` are first steps of later attempts, ``step`` is the selected one."""
    panels = [
        ("Reward", _reward),
        ("Reward components", lambda f, c, at: _components(f, components, at)),
        ("Group signal", lambda f, c, at: _signals(f, signals, at)),
        ("Response length, tokens", _length),
        ("Truncated responses", _line("response_length_truncated", palette.AMBER, percent, fill=True)),
        ("Entropy, nat/token", _line("entropy", palette.TEAL)),
        ("KL, nat/token", _kl),
        ("Rollout vs training log-probs", _mismatch),
        ("Clip fraction", _line("clip_fraction", palette.PINK, percent)),
        ("Gradient norm", _line("grad_norm", palette.VIOLET)),
        ("Weights changed by update", _line("weights_changed", palette.GREEN, percent)),
        ("Tokens per second", _throughput),
    ]
    rows = -(-len(panels) // COLUMNS)
    figure = make_subplots(rows, COLUMNS, vertical_spacing=0.075, horizontal_spacing=0.045)
    for i, (title, draw) in enumerate(panels):
        at = {"row": i // COLUMNS + 1, "col": i % COLUMNS + 1}
        reading = draw(figure, curves, at)
        _title(figure, at, title, reading)
    x = curves["step"] if len(curves) else pd.Series([0])
    figure.update_xaxes(matches="x", showgrid=False, zeroline=False, range=[x.min() - 0.5, x.max() + 0.5])
    figure.update_yaxes(showgrid=True, gridcolor=FAINT, zeroline=False, nticks=4, tickfont_size=10)
    figure.update_xaxes(tickfont_size=10, nticks=8)
    for first in resumed:
        figure.add_vline(x=first - 0.5, line={"color": palette.GREY, "width": 1, "dash": "dot"}, row="all", col="all")  # type: ignore[arg-type]
    if step is not None:
        figure.add_vline(x=step, line={"color": palette.AMBER, "width": 1.5}, row="all", col="all")  # type: ignore[arg-type]
    _layout(figure, rows * PANEL_HEIGHT)
    figure.update_layout(showlegend=False, hovermode="x unified", hoversubplots="axis", clickmode="event+select")
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


def _last(series: Row):
    known = series.dropna()
    return known.iloc[-1] if len(known) else None


def _curve(figure, curves, at, column, colour, name=None, form=number, **style) -> str:
    """Add a line for ``column`` when it holds numbers; returns the latest value as text."""
    if column not in curves or curves[column].isna().all():
        return ""
    width = style.pop("width", 1.6)
    mode = "lines+markers" if len(curves) <= 300 else "lines"
    figure.add_scatter(
        x=curves["step"], y=curves[column], mode=mode, name=name or column.replace("_", " "),
        line={"color": colour, "width": width, **({"dash": style.pop("dash")} if "dash" in style else {})},
        marker={"size": 4, "color": colour}, unselected={"marker": {"opacity": 1}},
        hovertemplate="%{y:.1%}" if form is percent else "%{y:.4~g}", **style, **at,
    )  # fmt: skip
    return form(_last(curves[column]))


def _line(column: str, colour: str, form=number, fill: bool = False):
    style = {"fill": "tozeroy", "fillcolor": _alpha(colour, 0.16)} if fill else {}

    def draw(figure, curves, at) -> str:
        reading = _curve(figure, curves, at, column, colour, form=form, **style)
        if form is percent:
            figure.update_yaxes(tickformat=".0%" if curves[column].max() > 0.05 else ".1%", rangemode="tozero", **at)
            if curves[column].max() == 0:
                figure.update_yaxes(range=[0, 0.05], **at)
        return reading or "not recorded"

    return draw


def _reward(figure, curves, at) -> str:
    mean, std = curves["reward_mean"], curves["reward_std"]
    if std.notna().any():
        band = pd.concat([mean + std, (mean - std)[::-1]])
        figure.add_scatter(
            x=pd.concat([curves["step"], curves["step"][::-1]]), y=band, fill="toself", mode="lines", hoverinfo="skip",
            line_width=0, fillcolor=_alpha(palette.BLUE, 0.15), unselected={"marker": {"opacity": 1}}, **at,
        )  # fmt: skip
    reading = _curve(figure, curves, at, "reward_mean", palette.BLUE, "reward", width=2)
    spread = _last(std)
    return f"{reading} ± {number(spread, 2)}" if spread is not None else reading


def _components(figure, components, at) -> str:
    colours = [palette.BLUE, palette.AMBER, palette.GREEN, palette.VIOLET, palette.PINK, palette.BROWN, palette.TEAL]
    names = list(dict.fromkeys(components["component"]))
    for name, colour in zip(names, colours, strict=False):
        part = components[components["component"] == name]
        _curve(figure, part.rename(columns={"value": name}), at, name, colour, name)
    if not names:
        return "not recorded"
    hidden = f" +{len(names) - len(colours)} more" if len(names) > len(colours) else ""
    return " · ".join(f"<span style='color:{c}'>{n}</span>" for n, c in zip(names, colours, strict=False)) + hidden


def _signals(figure, signals, at) -> str:
    for key in ("all_fail", "mixed", "all_pass"):
        figure.add_scatter(
            x=signals["step"], y=signals[key], stackgroup="signal", mode="lines", name=palette.SIGNAL_LABEL[key],
            line={"width": 0.5, "color": palette.SIGNAL[key]}, fillcolor=_alpha(palette.SIGNAL[key], 0.55),
            hovertemplate="%{y:.0%}", unselected={"marker": {"opacity": 1}}, **at,
        )  # fmt: skip
    figure.update_yaxes(range=[0, 1], tickformat=".0%", **at)
    return " · ".join(
        f"<span style='color:{palette.SIGNAL[key]}'>{palette.SIGNAL_LABEL[key]}</span>" for key in palette.SIGNAL
    )


def _length(figure, curves, at) -> str:
    _curve(figure, curves, at, "response_length_max", palette.LIGHT, "longest", dash="dot", width=1)
    reading = _curve(figure, curves, at, "response_length_mean", palette.BLUE, "mean")
    figure.update_yaxes(rangemode="tozero", **at)
    return f"{reading} mean, {number(_last(curves['response_length_max']))} longest"


def _kl(figure, curves, at) -> str:
    parts = []
    for column, label, colour in (("ref_kl", "reference", palette.VIOLET), ("policy_kl", "update", palette.BLUE)):
        reading = _curve(figure, curves, at, column, colour, label)
        if reading:
            parts.append(f"<span style='color:{colour}'>{label} {reading}</span>")
    return " · ".join(parts) or "not recorded"


def _mismatch(figure, curves, at) -> str:
    """Log axis: the interesting values span 1e-8 to 1; steps that agree bit for bit fall off it and are counted."""
    known = curves["rollout_log_prob_gap"].dropna()
    if len(known) and (known == 0).all():
        figure.add_scatter(x=curves["step"], y=curves["rollout_log_prob_gap"], mode="lines", hoverinfo="skip", **at)
        figure.update_traces(line_color=palette.GREEN, selector={"hoverinfo": "skip", "mode": "lines", "fill": None})
        return "equal bit for bit"
    parts = []
    for column, label, colour in (
        ("rollout_log_prob_gap_max", "max gap", palette.LIGHT),
        ("rollout_log_prob_gap", "mean gap", palette.TEAL),
        ("rollout_kl", "KL", palette.RED),
    ):
        positive = curves.assign(**{column: curves[column].where(curves[column] > 0)})
        reading = _curve(figure, positive, at, column, colour, label)
        if reading:
            parts.append(f"<span style='color:{colour}'>{label} {reading}</span>")
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, **at)
    return " · ".join(parts) or "not recorded"


def _throughput(figure, curves, at) -> str:
    _curve(figure, curves, at, "generation_tokens_per_s", palette.LIGHT, "generation", dash="dot")
    reading = _curve(figure, curves, at, "tokens_per_s", palette.BLUE, "whole step")
    figure.update_yaxes(rangemode="tozero", **at)
    return f"{reading} step, {number(_last(curves['generation_tokens_per_s']))} generation"


def _alpha(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
