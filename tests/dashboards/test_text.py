from __future__ import annotations

import math

import pytest

from dashboards import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, text.DASH),
        (math.nan, text.DASH),
        (0, "0"),
        (0.12345, "0.123"),
        (1234.5, "1,234"),
        (2e-7, "2.00e-07"),
        (-3.5, "-3.5"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    """Unknown is a dash and never 0; others keep three digits."""
    assert text.number(value) == shown


def test_percent_never_rounds_up_to_complete() -> None:
    """99.9996% is not shown as 100%."""
    assert text.percent(0.999996) == "99.999%"
    assert text.percent(1.0) == "100%"
    assert text.percent(None) == text.DASH


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.25, "250 ms"), (12.34, "12.3 s"), (125, "2 min 05 s"), (7260, "2 h 01 min"), (None, text.DASH)],
)
def test_duration(seconds: float | None, shown: str) -> None:
    """Durations carry their unit at every size."""
    assert text.duration(seconds) == shown


def test_escape_covers_content_and_attributes() -> None:
    """No character that opens a tag or closes an attribute survives."""
    escaped = text.escape("<img src=x onerror='a' title=\"b\">&")
    assert not set(escaped) & set("<>\"'")


def test_snippet_is_one_short_line() -> None:
    """Newlines fold, and a cut is visible."""
    assert text.snippet("a\n  b", 10) == "a b"
    assert text.snippet("x" * 50, 10) == "x" * 9 + "…"
