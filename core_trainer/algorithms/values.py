"""Loss of a value function."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss per token, 0.5 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2); all [M].

    Returns the loss, and bool where the clip cut the token's gradient. Without ``clip`` it is half the squared error.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), bounded > plain
