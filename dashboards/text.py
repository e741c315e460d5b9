"""How numbers, durations, ages and escaped snippets are written, the same on every page. NULL is a dash, never 0."""

from __future__ import annotations

import html
import math
from typing import Any

DASH = "\u2013"


def missing(value: Any) -> bool:
    """True for None, NaN and pandas' missing markers."""
    if value is None:
        return True
    try:
        return bool(math.isnan(value))
    except TypeError:
        return str(value) in ("NaT", "<NA>")


def number(value: Any, digits: int = 3) -> str:
    """``value`` to ``digits`` significant digits; thousands separated; exponent only where it is shorter."""
    if missing(value):
        return DASH
    value = float(value)
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{value:,.0f}"
    if magnitude < 1e-3:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def percent(value: Any) -> str:
    """A share in [0, 1] as a percentage; 99.97% is not rounded up to 100%."""
    if missing(value):
        return DASH
    share = 100 * float(value)
    if 99.9 <= share < 100:
        return f"{math.floor(share * 1000) / 1000:.3f}%"
    return f"{share:.0f}%" if share == round(share) else f"{share:.1f}%"


def duration(seconds: Any) -> str:
    """Seconds as ``340 ms``, ``12.4 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if missing(seconds):
        return DASH
    seconds = float(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def ago(seconds: Any) -> str:
    """Age of something in words, coarse on purpose."""
    if missing(seconds):
        return DASH
    seconds = max(0.0, float(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def escape(value: Any) -> str:
    """Text that may come from a user or a model, safe inside HTML and inside a quoted attribute."""
    return html.escape(DASH if missing(value) else str(value), quote=True)


def snippet(value: Any, length: int = 120) -> str:
    """One line of at most ``length`` characters."""
    if missing(value):
        return DASH
    line = " ".join(str(value).split())
    return line if len(line) <= length else line[: length - 1] + "…"
