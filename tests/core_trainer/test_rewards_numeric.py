"""The numeric verifier reads the last number as a person would, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core_trainer.rewards.numeric import NumericVerifier, last_number
from core_trainer.rewards.types import RewardInput
from core_trainer.types import Prompt
from rlinsight.config import NumericReward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7.", "7"),
        ("It is 1,234,567 in total", "1234567"),
        ("numbers 1,2,3", "3"),
        ("12,34", "34"),
        ("x = -4", "-4"),
        ("10-4", "4"),
        ("(3)-2", "2"),
        ("minus \u22125", "-5"),
        ("costs -$1,200.50!", "-1200.50"),
        ("about 2.5e-3 s", "0.0025"),
        ("1e3", "1000"),
        ("**.5**", "0.5"),
        ("5km", "5"),
        ("half is 1/2", "1/2"),
        ("3/0", "0"),
        ("on 3/4/2024", "2024"),
        ("solve for x2", None),
        ("", None),
        ("none at all", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    """The last number of the text, signs, separators, decimals, exponents and fractions understood."""
    assert last_number(text) == (None if number is None else Fraction(number))


@given(number=st.integers(), before=st.text(), after=st.text(st.characters(exclude_categories=["Nd"]), max_size=20))
@example(number=0, before="7", after="")
def test_integers_are_found_in_any_text(number: int, before: str, after: str) -> None:
    """An integer set apart by spaces is the last number whatever comes before, and whatever has no digits after."""
    assert last_number(f"{before} = {number} {after}") == number
    assert last_number(f"{before} = {number:,} {after}") == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9))
def test_decimals_are_exact(number: object) -> None:
    """Decimals are compared as written, not as binary floats."""
    assert last_number(f"so {number}.") == Fraction(str(number))


@given(st.text(alphabet="0123456789.,-+/eE$ x", max_size=60))
def test_any_text_is_read_without_error(text: str) -> None:
    """Whatever a model writes, reading it neither raises nor hangs."""
    last_number(text)


@pytest.mark.parametrize(
    ("answer", "response", "value", "label"),
    [
        ("7", "The answer is 7.", 1.0, "correct"),
        ("7", "7, because 3 + 4 = 8", 0.0, "wrong"),
        ("7", "seven", 0.0, "no_number"),
        ("3 + 4 is 7\n#### 7", "7.0", 1.0, "correct"),
        ("0.75", "3/4", 1.0, "correct"),
        ("0.3333333", "1/3", 1.0, "correct"),
        ("0.33", "1/3", 0.0, "wrong"),
        ("1000000", "1000001", 0.0, "wrong"),
        ("0", "-0.0", 1.0, "correct"),
    ],
)
def test_numeric_verdicts(answer: str, response: str, value: float, label: str) -> None:
    """Equal within the tolerance, integers exactly."""
    item = RewardInput("r", Prompt("d/0", "d", "text", (1,), answer), response, 1)
    (verdict,) = NumericVerifier(NumericReward(type="numeric"))(item)
    assert (verdict.value, verdict.label) == (value, label)


def test_answer_without_a_number_is_an_error() -> None:
    """A wrong dataset is not a wrong response."""
    item = RewardInput("r", Prompt("d/0", "d", "text", (1,), "Paris"), "5", 1)
    with pytest.raises(ValueError, match="answer 'Paris' holds no number"):
        NumericVerifier(NumericReward(type="numeric"))(item)
