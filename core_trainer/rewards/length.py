"""The length verifier: a penalty for responses that are not as long as wished. Pure, microseconds."""

from __future__ import annotations

from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import LengthReward


class LengthVerifier:
    """0 where the response is as long as wished, down to -1."""

    def __init__(self, section: LengthReward) -> None:
        self._section = section

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """Counts sampled tokens, the end-of-turn token included."""
        penalty = length_penalty(self._section, item.num_tokens)
        return [Verdict(-penalty, "within" if penalty == 0 else "outside", f"{item.num_tokens} tokens")]


def length_penalty(section: LengthReward, length: int) -> float:
    """In [0, 1]. With over = (length - target) / (max - target): linear clips over, quadratic is its square, deviation
    clips |over|; step is 1 above target.
    """
    if section.form == "step":
        return float(length > section.target)
    assert section.max is not None  # the config requires it
    over = (length - section.target) / (section.max - section.target)
    if section.form == "deviation":
        return min(abs(over), 1.0)
    ramp = min(max(over, 0.0), 1.0)
    return ramp**2 if section.form == "quadratic" else ramp
