"""The regex verifier: whether a pattern is found in the response."""

from __future__ import annotations

import re

from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import RegexReward


class RegexVerifier:
    """1 when the pattern is found (or, with ``full_match``, matches the whole response), else 0."""

    is_async = False
    required_columns = frozenset[str]()

    def __init__(self, section: RegexReward) -> None:
        pattern = re.compile(section.pattern, re.DOTALL)
        self._match = pattern.fullmatch if section.full_match else pattern.search

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """A pattern that backtracks without end is killed by the caller's timeout."""
        match = self._match(item.response)
        if match is None:
            return [Verdict(0.0, "no_match")]
        return [Verdict(1.0, "match", f"at characters {match.start()} to {match.end()}")]
