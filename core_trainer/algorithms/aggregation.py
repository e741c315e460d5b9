"""Per-token losses to one number, as a weight per token fixed before any micro-batch is cut.

A loss is then a plain sum of weight x token loss, so how the batch is split, and over how many ranks, changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(num_loss_tokens: Tensor, mode: str) -> Tensor:
    """Weight of each loss token of a rollout in the loss of a mini-batch over all ranks.

    num_loss_tokens [B] int64, loss tokens of each rollout -> [B] float64. token-mean: every token counts the same;
    seq-mean-token-mean: every rollout counts the same; seq-mean-token-sum: sums of rollouts averaged. Rollouts without
    loss tokens do not count.
    """
    tokens = num_loss_tokens.double()
    num_rollouts = (tokens > 0).sum().clamp(min=1).double()
    if mode == "token-mean":
        return torch.full_like(tokens, 1.0) / tokens.sum().clamp(min=1)
    if mode == "seq-mean-token-mean":
        return 1.0 / (num_rollouts * tokens.clamp(min=1))
    if mode == "seq-mean-token-sum":
        return torch.full_like(tokens, 1.0) / num_rollouts
    raise ValueError(f"unknown aggregation {mode!r}")
