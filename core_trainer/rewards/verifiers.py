"""From a configured reward function to the verifier that scores; imports only what the kind needs."""

from __future__ import annotations

from core_trainer.rewards.types import Verifier
from rlinsight.config import (
    DataSection,
    FunctionReward,
    MathVerifyReward,
    NumericReward,
    RegexReward,
    RewardFunction,
    TaskReward,
)


def make_verifier(section: RewardFunction, data: DataSection) -> Verifier:
    """Raises ConfigError when the function cannot be used as configured."""
    match section:
        case NumericReward():
            from core_trainer.rewards.numeric import NumericVerifier

            return NumericVerifier(section)
        case RegexReward():
            from core_trainer.rewards.regex import RegexVerifier

            return RegexVerifier(section)
        case MathVerifyReward():
            from core_trainer.rewards.math_verify import MathVerifyVerifier

            return MathVerifyVerifier()
        case TaskReward():
            from core_trainer.rewards.task import TaskVerifier

            return TaskVerifier(data)
        case FunctionReward():
            from core_trainer.rewards.function import FunctionVerifier

            return FunctionVerifier(section)
