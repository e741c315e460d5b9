"""Rewards: verifiers score responses, their weighted sum is what a rollout is learned from. Emits no telemetry."""

from __future__ import annotations

from core_trainer.rewards.scorer import RewardScorer
from core_trainer.rewards.types import Component, RewardInput, RewardResult
from rlinsight.config import DataSection, RewardSection

__all__ = ["Component", "RewardInput", "RewardResult", "RewardScorer", "build"]


def build(section: RewardSection, data: DataSection) -> RewardScorer:
    """Scorer of ``section``; ``data`` tells the reasoning_gym reward its task. Raises ConfigError when unusable."""
    return RewardScorer(section, data)
