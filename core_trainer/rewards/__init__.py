"""Rewards: verifiers score responses, their weighted sum is what a rollout is learned from. Emits no telemetry."""

from __future__ import annotations

from core_trainer.rewards.scorer import RewardScorer
from core_trainer.rewards.types import Component, RewardInput, RewardResult

__all__ = ["Component", "RewardInput", "RewardResult", "RewardScorer"]
