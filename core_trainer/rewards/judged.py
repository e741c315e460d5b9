"""The score in what a judge wrote. Runs in a process that can be killed, since a pattern may backtrack without end."""

from __future__ import annotations

import re

from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import JudgeReward


class JudgedVerifier:
    """Reads the number in the last match of the pattern. ``item.response`` is the judge's text, not the policy's."""

    is_async = False
    required_columns = frozenset[str]()

    def __init__(self, section: JudgeReward) -> None:
        self._pattern = re.compile(section.pattern, re.DOTALL)
        self._low, self._high = section.range

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """Raises ValueError when there is no number, or one outside the range."""
        said = " ".join(item.response.split())
        matches = self._pattern.findall(item.response)
        if not matches:
            raise ValueError(f"the judge gave no score; it said: {said[-200:]!r}")
        try:
            score = float(matches[-1])
        except ValueError:
            raise ValueError(f"the judge's score {matches[-1]!r} is no number; change pattern") from None
        if not self._low <= score <= self._high:
            raise ValueError(f"the judge's score {score:g} is outside range [{self._low:g}, {self._high:g}]")
        return [Verdict(score, explanation=said[-300:])]
