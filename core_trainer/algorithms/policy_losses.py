"""Policy losses per token, before aggregation."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32 and far beyond any clip


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347), with separate bounds and optional dual clip (arXiv 1912.09729).

    max(-A rho, -A clip(rho, 1 - low, 1 + high)), rho = exp(log_probs - old); for A < 0 at most -A dual_clip. All [M] ->
    loss [M], ratio [M] (detached), clipped [M] bool: true where the bound cut the token's gradient.
    """
    ratio = torch.exp((log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return loss, ratio.detach(), clipped.detach()
