"""KL estimators per token (joschu.net/blog/kl-approx). d = log_probs - other, sampled from the policy of log_probs."""

from __future__ import annotations

import torch
from torch import Tensor

from core_trainer.algorithms.policy_losses import MAX_LOG_RATIO


def k2(log_probs: Tensor, other: Tensor) -> Tensor:
    """d^2 / 2: biased low variance, and an unbiased gradient of the reverse KL as a loss. [M] -> [M]."""
    return (log_probs - other) ** 2 / 2


def k3(log_probs: Tensor, other: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased and never negative in exact arithmetic. [M] -> [M]. Beyond |d| = 20 it stays finite."""
    d = log_probs - other
    return torch.exp(-d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + d - 1


ESTIMATORS = {"k2": k2, "k3": k3}
