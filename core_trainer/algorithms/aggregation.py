"""Per-token losses to one number, as a weight per token fixed before any micro-batch is cut.

A loss is then a plain sum of weight x token loss, so how the batch is split, and over how many ranks, changes nothing.
Rollouts without loss tokens do not count. Each function: num_loss_tokens [B] int64, loss tokens of each rollout ->
[B] float64, the weight of each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_trainer.algorithms import registry
from core_trainer.algorithms.numerics import fill
from core_trainer.algorithms.registry import aggregation


def token_weights(num_loss_tokens: Tensor, mode: str, **options: float) -> Tensor:
    """Weight of each loss token of a rollout in the loss of a mini-batch over all ranks. [B] int64 -> [B] float64.

    Raises ConfigError for an unknown mode, and for options it does not have.
    """
    return registry.find("aggregation", mode).call({"num_loss_tokens": num_loss_tokens}, options)


def aggregate(losses: Tensor, mask: Tensor, mode: str, *, num_averaging_ranks: int = 1, **options: float) -> Tensor:
    """The aggregated loss of a padded batch, [B, T], [B, T] bool -> scalar.

    This trainer sums gradients over ranks. Where they are averaged instead, as by DistributedDataParallel, each rank's
    share must be scaled by the number of ranks.
    """
    weights = token_weights(mask.sum(dim=1), mode, **options).to(losses.dtype)
    (losses,) = fill(mask, losses)
    return (losses * weights[:, None]).sum() * num_averaging_ranks


@aggregation("token-mean")
def token_mean(num_loss_tokens: Tensor) -> Tensor:
    """Every token of the batch counts the same (arXiv 2503.14476)."""
    tokens = num_loss_tokens.double()
    return torch.ones_like(tokens) / tokens.sum().clamp(min=1)


@aggregation("token-sum")
def token_sum(num_loss_tokens: Tensor) -> Tensor:
    """The plain sum, which grows with the batch."""
    return torch.ones_like(num_loss_tokens, dtype=torch.float64)


@aggregation("seq-mean-token-mean")
def seq_mean_token_mean(num_loss_tokens: Tensor) -> Tensor:
    """Every rollout counts the same: its mean over tokens, averaged over rollouts (arXiv 2402.03300)."""
    return seq_mean_token_sum(num_loss_tokens) / num_loss_tokens.double().clamp(min=1)


@aggregation("seq-mean-token-sum")
def seq_mean_token_sum(num_loss_tokens: Tensor) -> Tensor:
    """Sums of rollouts, averaged over rollouts."""
    num_rollouts = (num_loss_tokens > 0).sum().clamp(min=1).double()
    return torch.ones_like(num_loss_tokens, dtype=torch.float64) / num_rollouts


@aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(num_loss_tokens: Tensor, *, length: int) -> Tensor:
    """Sums of rollouts over a constant ``length``, averaged over rollouts: Dr.GRPO's (arXiv 2503.20783)."""
    return seq_mean_token_sum(num_loss_tokens) / length
