"""From a configured reward function to the verifier that scores; imports only what the kind needs."""

from __future__ import annotations

from collections.abc import Sequence

from core_trainer.rewards.function import BatchVerifier, FunctionVerifier
from core_trainer.rewards.types import Verifier
from rlinsight.config import (
    DataSection,
    FunctionReward,
    JudgeReward,
    MathVerifyReward,
    RegexReward,
    RewardFunction,
    TaskReward,
)


def make_verifier(section: RewardFunction, datasets: Sequence[DataSection]) -> Verifier | BatchVerifier:
    """One of those that run in a process of their own. Raises ConfigError when it cannot be used as configured."""
    match section:
        case RegexReward():
            from core_trainer.rewards.regex import RegexVerifier

            return RegexVerifier(section)
        case MathVerifyReward():
            from core_trainer.rewards.math_verify import MathVerifyVerifier

            return MathVerifyVerifier()
        case TaskReward():
            from core_trainer.rewards.task import TaskVerifier

            return TaskVerifier(datasets)
        case FunctionReward(batched=True):
            return BatchVerifier(section)
        case FunctionReward():
            return FunctionVerifier(section)
        case JudgeReward():
            from core_trainer.rewards.judged import JudgedVerifier

            return JudgedVerifier(section)
    raise AssertionError(f"{section.type} runs in the worker itself")
