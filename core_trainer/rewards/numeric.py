"""The numeric verifier: the last number of the response against the answer. Exact on integers, pure, microseconds."""

from __future__ import annotations

import re
from fractions import Fraction

from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import NumericReward

# A sign counts only where no operand precedes it, so "10-4" ends in 4. Digits inside a word ("x2") are no number.
_NUMBER = re.compile(
    r"""(?<![A-Za-z0-9])
    (?P<sign>(?<![\w)\]}])[-+\u2212])? [$€£]?
    (?P<digits>
        (?<![0-9]/)[0-9]+/0*[1-9][0-9]*(?![0-9/])              # 3/4, but not in 3/4/2024
      | (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+)         # 1,234,567 or 1234567
        (?:\.[0-9]+)? (?:[eE][-+]?[0-9]{1,3}(?![A-Za-z0-9]))?  # with decimals or an exponent
      | \.[0-9]+
    )""",
    re.VERBOSE,
)
_LONGEST = 200  # digits; longer runs come from degenerate sampling and would cost quadratic time to parse


def last_number(text: str) -> Fraction | None:
    """The last number written in ``text``, exactly; None when there is none.

    Understands signs, decimals, thousands separators, exponents, a/b and a currency sign; not LaTeX.
    """
    matches = list(_NUMBER.finditer(text))
    if not matches or len(matches[-1]["digits"]) > _LONGEST:
        return None
    match = matches[-1]
    value = Fraction(match["digits"].replace(",", ""))
    return value if match["sign"] in (None, "+") else -value


class NumericVerifier:
    """1 when the last number of the response equals the answer's, else 0."""

    def __init__(self, section: NumericReward) -> None:
        self._tolerance = Fraction(section.tolerance)

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """Raises ValueError when the answer holds no number."""
        expected = answer_number(item.prompt.answer)
        found = last_number(item.response)
        if found is None:
            return [Verdict(0.0, "no_number", f"no number in the response; answer {_show(expected)}", answer="")]
        correct = self._equal(found, expected)
        explanation = f"last number {_show(found)}, answer {_show(expected)}"
        return [Verdict(float(correct), "correct" if correct else "wrong", explanation, answer=str(found))]

    def _equal(self, a: Fraction, b: Fraction) -> bool:
        if a.denominator == b.denominator == 1:  # a relative tolerance would accept 1000001 for 1000000
            return a == b
        return abs(a - b) <= self._tolerance * max(abs(a), abs(b))


def answer_number(answer: str | None) -> Fraction:
    """The answer's number: its last, so that "... #### 72" is 72. Raises ValueError when it has none."""
    number = None if answer is None else last_number(answer)
    if number is None:
        raise ValueError(f"answer {answer!r} holds no number")
    return number


def _show(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):.12g}"
