"""The token strip: one rollout's tokens as HTML, coloured by one number, every number on hover.

Pure: a frame with the columns of ``rollout_queries.tokens`` in, HTML out. All token text is escaped, attribute and
content.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dashboards.palette import COLD, WARM
from dashboards.queries import Frame, Row
from dashboards.text import escape, missing, number


@dataclass(frozen=True)
class Channel:
    """A number per token that can be shown as colour."""

    label: str
    value: Callable[[Frame], Row]
    two_sided: bool  # below zero and above zero differ; else only the distance from zero counts
    floor: float  # smallest full-colour value, so that rounding noise stays pale
    meaning: str


CHANNELS = {
    "log-prob": Channel("log-prob", lambda t: t["rollout_log_prob"], False, 1.0, "unlikely when sampled"),
    "new - old": Channel("new - old", lambda t: t["log_prob"] - t["old_log_prob"], True, 0.05, "moved by the update"),
    "old - rollout": Channel(
        "old - rollout", lambda t: t["old_log_prob"] - t["rollout_log_prob"], True, 0.01, "engine and trainer disagree"
    ),
    "new - ref": Channel(
        "new - ref", lambda t: t["log_prob"] - t["ref_log_prob"], True, 0.1, "drift from the reference"
    ),
    "entropy": Channel("entropy", lambda t: t["entropy"], False, 0.5, "undecided"),
    "advantage": Channel("advantage", lambda t: t["advantage"], True, 0.5, "pushed down or up"),
    "weight - 1": Channel(
        "weight - 1", lambda t: t["weight"] - 1, True, 0.1, "rollout correction: counts less or more; -1 is rejected"
    ),
    "value": Channel("value", lambda t: t["value"], True, 0.1, "what the critic expected"),
    "target - value": Channel(
        "target - value",
        lambda t: t["value_target"] - t["value"],
        True,
        0.1,
        "worse or better than the critic expected",
    ),
}

TIP = (
    ("rollout", "rollout_log_prob"),
    ("old", "old_log_prob"),
    ("new", "log_prob"),
    ("ref", "ref_log_prob"),
    ("entropy", "entropy"),
    ("advantage", "advantage"),
    ("weight", "weight"),
    ("value", "value"),
    ("target", "value_target"),
    ("ratio", "ratio"),
)


def available(tokens: Frame) -> list[str]:
    """Channels that hold at least one number for these tokens."""
    return [name for name, channel in CHANNELS.items() if values(tokens, name).notna().any()]


def values(tokens: Frame, channel: str) -> Row:
    """The channel's number per token, float64, NaN where unknown."""
    return CHANNELS[channel].value(tokens.astype({name: float for _, name in TIP}))


def scale(series: Row, channel: str) -> float:
    """Value at which the colour is full: the 98th percentile of |value|, at least the channel's floor."""
    size = series.abs().replace(math.inf, math.nan).quantile(0.98)
    return max(CHANNELS[channel].floor, 0.0 if missing(size) else float(size))


def strip(tokens: Frame, channel: str) -> str:
    """HTML of the strip. Struck through: not in the loss. Underlined: the clip cut its gradient."""
    series = values(tokens, channel)
    full = scale(series, channel)
    spans = []
    for value, row in zip(series, tokens.to_dict("records"), strict=True):
        marks = " ".join(
            name for name, on in (("rl-out", _is(row["in_loss"], False)), ("rl-cut", _is(row["clipped"], True))) if on
        )
        shade = _shade(value, full, CHANNELS[channel].two_sided)
        spans.append(f'<span class="{marks}" style="{shade}" data-tip="{_tip(row)}">{escape(_piece(row))}</span>')
    return f'<div class="rl-tokens">{"".join(spans)}</div>'


def legend(tokens: Frame, channel: str) -> str:
    """HTML of the colour scale."""
    spec, full = CHANNELS[channel], scale(values(tokens, channel), channel)
    cold, warm = (f"rgba({c[0]},{c[1]},{c[2]},.75)" for c in (COLD, WARM))
    if spec.two_sided:
        left, right, ramp = number(-full), f"+{number(full)}", f"{cold}, transparent, {warm}"
    else:
        left, right, ramp = "0", number(-full if spec.label == "log-prob" else full), f"transparent, {warm}"
    return (
        f'<div class="rl-legend">{left}'
        f'<span class="rl-ramp" style="background:linear-gradient(to right, {ramp})"></span>'
        f"{right}<span>{spec.meaning}</span><span><s>not in loss</s></span>"
        f'<span style="border-bottom:2px solid #d9902f">clipped</span></div>'
    )


def _shade(value: float, full: float, two_sided: bool) -> str:
    if math.isnan(value):
        return ""
    red, green, blue = COLD if two_sided and value < 0 else WARM
    return f"background:rgba({red},{green},{blue},{0.75 * min(1.0, abs(value) / full):.2f})"


def _is(value: object, expected: bool) -> bool:
    return not missing(value) and bool(value) is expected


def _piece(row: dict) -> str:
    if missing(row["piece"]):
        return f"⟨{row['token_id']}⟩"
    text = str(row["piece"]).replace("\r", "␍").replace("\t", "⇥\t").replace("\n", "↵\n")
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text) or "∅"


def _tip(row: dict) -> str:
    lines = [f"token {row['pos']}   id {row['token_id']}"]
    if not missing(row["piece"]):
        lines.append(repr(str(row["piece"])))
    for label, column in TIP:
        if not missing(row[column]):
            chance = f"   p {number(math.exp(row[column]))}" if column.endswith("log_prob") else ""
            sign = "" if column in ("weight", "ratio") else "+"
            lines.append(f"{label:<10}{row[column]:{sign}.5f}{chance}")
    for label, column in (("in loss", "in_loss"), ("clipped", "clipped")):
        if not missing(row[column]):
            lines.append(f"{label:<10}{'yes' if row[column] else 'no'}")
    return escape("\n".join(lines)).replace("\n", "&#10;")
