"""Rewards to advantages."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6  # added to the std, not a floor under it


def grpo(rewards: Tensor, groups: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Group-relative advantage, (r - mean_g) / (std_g + 1e-6), std with ddof 1 (arXiv 2402.03300).

    Without the division by std this is Dr.GRPO's (arXiv 2503.20783). rewards [B] float, groups [B] int64 group index ->
    [B] float64. Raises ValueError for a group of one, whose advantage is undefined.
    """
    rewards = rewards.double()
    size = torch.zeros(int(groups.max()) + 1, dtype=torch.float64)
    counts = size.index_add(0, groups, torch.ones_like(rewards))
    if bool((counts == 1).any()):
        raise ValueError(f"group {int((counts == 1).nonzero()[0])} has one rollout; GRPO needs at least two per prompt")
    centred = rewards - (size.index_add(0, groups, rewards) / counts)[groups]
    if not normalize_by_std:
        return centred
    std = (size.index_add(0, groups, centred**2) / (counts - 1)).sqrt()
    return centred / (std[groups] + EPSILON)
