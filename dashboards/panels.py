"""What each panel of the overview draws, and which panels a run has. Pure: no Streamlit, no SQL.

A panel is a title and a function that draws into a figure ``at`` a cell and returns the reading beside the title. What
a run did not record (a critic, rollout correction, validation, ...) has no panel.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from dashboards import palette
from dashboards.queries import Frame, Row
from dashboards.text import escape, number, percent

Panel = tuple[str, Callable[..., str]]
MAX_DATASETS = 6  # panels of validation; the SQL page has all
COLOURS = (
    palette.BLUE, palette.AMBER, palette.GREEN, palette.VIOLET, palette.PINK, palette.BROWN, palette.TEAL, palette.GREY,
)  # fmt: skip
MODULES = ("embeddings", "attention", "mlp", "norms", "head", "value_head", "lora", "other")


def chosen(curves: Frame, signals: Frame, components: Frame, validation: Frame, drops: Frame) -> list[Panel]:
    """The panels of a run: twelve for every run, and between them those of what it recorded beside."""

    def when(present: object, *panels: Panel) -> list[Panel]:
        return list(panels) if present else []

    known = {name for name in curves.columns if curves[name].notna().any()}
    modules = [f"grad_norm_{module}" for module in MODULES if f"grad_norm_{module}" in known]
    datasets = sorted(dict.fromkeys(validation["dataset"]), key=lambda name: (name != "all", name))
    return [
        ("Reward", _reward),
        *(
            (f"Validation: {escape(name)}", _validation(validation[validation["dataset"] == name]))
            for name in datasets[:MAX_DATASETS]
        ),
        ("Reward components", lambda f, c, at: _components(f, components, at)),
        ("Group signal", lambda f, c, at: _signals(f, signals, at)),
        *when(len(drops), ("Groups dropped", _drops(drops))),
        ("Response length, tokens", _length),
        ("Truncated responses", _line("response_length_truncated", palette.AMBER, percent, fill=True)),
        ("Entropy, nat/token", _line("entropy", palette.TEAL)),
        ("KL, nat/token", _kl),
        *when(curves["kl_coef"].nunique() > 1, ("KL coefficient", _line("kl_coef", palette.VIOLET))),
        *when("kl_reward" in known, ("KL off the reward, nat/rollout", _line("kl_reward", palette.VIOLET))),
        ("Rollout vs training log-probs", _mismatch),
        *when(
            "correction_k3" in known,
            ("Engine to trainer", _lines(
                ("correction_k3", "k3", palette.RED), ("correction_chi2_token", "χ² token", palette.TEAL),
                ("correction_chi2_sequence", "χ² sequence", palette.BLUE), log=True,
            )),
            ("Effective sample size", _lines(
                ("correction_effective_sample_size", "ratios", palette.LIGHT),
                ("correction_weight_effective_sample_size", "weights", palette.BLUE), form=percent,
            )),
            ("Correction", _lines(
                ("correction_weight_bounded_fraction", "bounded", palette.AMBER),
                ("correction_rejected_token_fraction", "tokens rejected", palette.RED),
                ("correction_rejected_rollout_fraction", "rollouts hit", palette.PINK), form=percent,
            )),
        ),
        ("Clip fraction", _line("clip_fraction", palette.PINK, percent)),
        ("Gradient norm", _line("grad_norm", palette.VIOLET)),
        *when(
            len(modules) > 1,
            ("Gradient norm of", _lines(
                *((name, name.removeprefix("grad_norm_").replace("_", " "), colour)
                  for name, colour in zip(modules, COLOURS, strict=False)), form=None, log=True,
            )),
        ),
        ("Weights changed by update", _line("weights_changed", palette.GREEN, percent)),
        *when(
            "critic_value_loss" in known,
            ("Critic: explained variance", _explained_variance),
            ("Critic: value loss", _line("critic_value_loss", palette.RED)),
            ("Critic", _lines(
                ("critic_value_mean", "value", palette.GREEN), ("critic_return_mean", "return", palette.BLUE)
            )),
        ),
        ("Tokens per second", _throughput),
    ]  # fmt: skip


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


def _band(figure, steps, middle, half, colour, at) -> None:
    """Shade ``middle`` plus and minus ``half`` where both are known."""
    known = middle.notna() & half.notna()
    steps, low, high = steps[known], (middle - half)[known], (middle + half)[known]
    figure.add_scatter(
        x=pd.concat([steps, steps[::-1]]), y=pd.concat([high, low[::-1]]), fill="toself", mode="lines",
        hoverinfo="skip", line_width=0, fillcolor=_alpha(colour, 0.15), unselected={"marker": {"opacity": 1}}, **at,
    )  # fmt: skip


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
    std = curves["reward_std"]
    if std.notna().any():
        _band(figure, curves["step"], curves["reward_mean"], std, palette.BLUE, at)
    reading = _curve(figure, curves, at, "reward_mean", palette.BLUE, "reward", width=2)
    spread = _last(std)
    return f"{reading} ± {number(spread, 2)}" if spread is not None else reading


def _components(figure, components, at) -> str:
    names = list(dict.fromkeys(components["component"]))
    for name, colour in zip(names, COLOURS, strict=False):
        part = components[components["component"] == name]
        _curve(figure, part.rename(columns={"value": name}), at, name, colour, name)
    if not names:
        return "not recorded"
    hidden = f" +{len(names) - len(COLOURS)} more" if len(names) > len(COLOURS) else ""
    return " · ".join(_said(escape(n), c) for n, c in zip(names, COLOURS, strict=False)) + hidden


def _signals(figure, signals, at) -> str:
    for key in ("all_fail", "mixed", "all_pass"):
        figure.add_scatter(
            x=signals["step"], y=signals[key], stackgroup="signal", mode="lines", name=palette.SIGNAL_LABEL[key],
            line={"width": 0.5, "color": palette.SIGNAL[key]}, fillcolor=_alpha(palette.SIGNAL[key], 0.55),
            hovertemplate="%{y:.0%}", unselected={"marker": {"opacity": 1}}, **at,
        )  # fmt: skip
    figure.update_yaxes(range=[0, 1], tickformat=".0%", **at)
    return " · ".join(_said(palette.SIGNAL_LABEL[key], palette.SIGNAL[key]) for key in palette.SIGNAL)


def _length(figure, curves, at) -> str:
    _curve(figure, curves, at, "response_length_max", palette.LIGHT, "longest", dash="dot", width=1)
    reading = _curve(figure, curves, at, "response_length_mean", palette.BLUE, "mean")
    figure.update_yaxes(rangemode="tozero", **at)
    return f"{reading} mean, {number(_last(curves['response_length_max']))} longest"


def _kl(figure, curves, at) -> str:
    said = _lines(("ref_kl", "reference", palette.VIOLET), ("policy_kl", "update", palette.BLUE))(figure, curves, at)
    coef = curves["kl_coef"].dropna()
    return f"{said} · coefficient {number(coef.iloc[-1])}" if said and coef.nunique() == 1 else said or "not recorded"


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
            parts.append(_said(f"{label} {reading}", colour))
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, **at)
    return " · ".join(parts) or "not recorded"


def _throughput(figure, curves, at) -> str:
    _curve(figure, curves, at, "generation_tokens_per_s", palette.LIGHT, "generation", dash="dot")
    reading = _curve(figure, curves, at, "tokens_per_s", palette.BLUE, "whole step")
    figure.update_yaxes(rangemode="tozero", **at)
    return f"{reading} step, {number(_last(curves['generation_tokens_per_s']))} generation"


def _validation(validation: Frame):
    """Metrics of one dataset: of each kind (mean, pass, ...) that of most samples, one standard error around it."""

    def draw(figure, curves, at) -> str:
        largest = {}
        for name in dict.fromkeys(validation["metric"]):
            kind, _, k = name.partition("@")
            largest[kind] = max(largest.get(kind, (-1, "")), (int(k) if k.isdigit() else 0, name))
        parts = []
        for (_, name), colour in zip(largest.values(), COLOURS, strict=False):
            part = validation[validation["metric"] == name]
            if part["std_error"].notna().any():
                _band(figure, part["step"], part["value"], part["std_error"], colour, at)
            reading = _curve(figure, part, at, "value", colour, name, width=2)
            parts.append(_said(f"{escape(name)} {reading}", colour))
        return " · ".join(parts)

    return draw


def _drops(drops: Frame):
    """Bars of groups by reason, and how often the step sampled where that was more than once."""

    def draw(figure, curves, at) -> str:
        parts = []
        for reason, colour in zip(dict.fromkeys(drops["reason"]), COLOURS, strict=False):
            part = drops[drops["reason"] == reason]
            figure.add_bar(
                x=part["step"], y=part["groups"], name=escape(reason), hovertemplate="%{y:.3~g}",
                marker={"color": _alpha(colour, 0.6), "line": {"width": 0}},
                unselected={"marker": {"opacity": 1}}, **at,
            )  # fmt: skip
            parts.append(_said(escape(reason), colour))
        if curves["sampling_rounds"].max() > 1:
            reading = _curve(
                figure, curves, at, "sampling_rounds", palette.GREY, "sampling rounds", dash="dot", width=1
            )
            parts.append(f"sampling rounds {reading}")
        figure.update_yaxes(rangemode="tozero", **at)
        return " · ".join(parts)

    return draw


def _lines(*of: tuple[str, str, str], form=number, log: bool = False):
    """Lines of (column, label, colour), those that hold numbers; shares have an axis in percent.

    ``form`` None leaves the latest values out of the title. ``log`` makes the axis logarithmic where values span more
    than one and a half decades, with less its ticks cannot be read; what is not above 0 is then left out.
    """

    def draw(figure, curves, at) -> str:
        parts = []
        positive = curves[[column for column, _, _ in of]].where(lambda values: values > 0)
        found = positive.stack()
        is_log = log and len(found) > 0 and found.max() > 30 * found.min()
        shown = curves.assign(**positive) if is_log else curves
        for column, label, colour in of:
            reading = _curve(figure, shown, at, column, colour, label, form=form or number)
            if reading:
                parts.append(_said(f"{label} {reading}" if form else label, colour))
        if is_log:
            figure.update_yaxes(type="log", exponentformat="power", dtick=1, **at)
        elif form is percent:
            figure.update_yaxes(tickformat=".0%", rangemode="tozero", **at)
        return " · ".join(parts)

    return draw


def _explained_variance(figure, curves, at) -> str:
    """1 is a perfect critic, 0 one that knows the mean; far below is off the axis, the title has the number."""
    known = curves["critic_explained_variance"]
    reading = _curve(figure, curves, at, "critic_explained_variance", palette.GREEN)
    figure.update_yaxes(range=[max(-1.0, min(0.0, known.min())) - 0.05, 1.05], **at)
    return reading


def _said(text: str, colour: str) -> str:
    return f"<span style='color:{colour}'>{text}</span>"


def _alpha(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
