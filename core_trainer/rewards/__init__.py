"""Rewards: verifiers score responses, their weighted sum is what a rollout is learned from. Emits no telemetry."""

from __future__ import annotations

from core_trainer.rewards.scorer import RewardScorer
from core_trainer.rewards.types import Component, ComponentFailed, RewardInput, RewardResult

__all__ = ["Component", "ComponentFailed", "RewardInput", "RewardResult", "RewardScorer"]
