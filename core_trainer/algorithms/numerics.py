"""What the families share: masks, bounded ratios, whitening."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32 and far beyond any clip
WHITEN_EPSILON = 1e-8  # added to the variance


def fill(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where the mask is false, so that nothing there, NaN and infinity included, reaches a result.

    A gradient to a masked position is exactly 0.
    """
    return tuple(torch.where(mask, tensor, 0) for tensor in tensors)


def ratio(log_probs: Tensor, other: Tensor) -> Tensor:
    """exp(log_probs - other), its logarithm clamped to +-20."""
    return torch.exp((log_probs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, a scalar of the dtype of ``values``; 0 where the mask is empty."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), both over the mask, variance with ddof 1; 0 elsewhere. [B, T] -> [B, T] float64.

    One value alone becomes 0.
    """
    chosen = values.double()[mask]
    whitened = torch.zeros_like(values, dtype=torch.float64)
    if chosen.numel():
        centred = chosen - chosen.mean()
        variance = (centred**2).sum() / max(chosen.numel() - 1, 1)
        whitened[mask] = centred * torch.rsqrt(variance + WHITEN_EPSILON)
    return whitened
