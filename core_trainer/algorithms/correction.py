"""Correction of the mismatch between the engine that sampled and the trainer, and its measures.

log r = old_log_probs - rollout_log_probs, clamped to +-20. A reweighted loss token counts ``weight`` times; a rejected
one leaves the loss mask, and with it the normaliser. B rollouts, T tokens, everything float64 and without gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from core_trainer.algorithms import kl, registry
from core_trainer.algorithms.numerics import MAX_LOG_RATIO, fill
from core_trainer.algorithms.registry import importance
from rlinsight.errors import ConfigError

Level = Literal["token", "sequence"]
MIN_MEAN_WEIGHT = 1e-8  # below it weights are not normalised


class Weights(NamedTuple):
    """Importance weights, and what became of the ratios."""

    weights: Tensor  # [B, T], 0 off the mask
    metrics: dict[str, float]  # mean weight, share of tokens a bound changed, effective sample size of the weights


class Rejection(NamedTuple):
    """Which loss tokens are left."""

    keep: Tensor  # [B, T] bool, within the mask
    metrics: dict[str, float]  # shares of tokens, and of rollouts that lost one, over those with loss tokens


@importance("truncate")
def truncate(ratio: Tensor, *, high: float = 2.0) -> Tensor:
    """min(r, high): truncated importance sampling (fengyao.notion.site/off-policy-rl)."""
    return ratio.clamp(max=high)


@importance("mask")
def zero_outside(ratio: Tensor, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """r where low <= r <= high, else 0: masked importance sampling, IcePop (arXiv 2510.18855)."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    treatment: str = "truncate",
    normalize: bool = False,
    **options: float,
) -> Weights:
    """Weights of the loss tokens, [B, T] each -> [B, T]; ``options`` are those of the treatment.

    The ratio is the token's, or the product over its rollout's loss tokens. ``normalize`` divides by the mean weight,
    over tokens or over rollouts after the level.
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand(mask.shape)
    ratio = log_ratio.exp()
    weights = registry.find("importance", treatment).call({"ratio": ratio}, options)
    counted = mask if level == "token" else mask.any(dim=1)
    mean = weights[mask].mean() if level == "token" else fill(mask, weights)[0].amax(dim=1)[counted].mean()
    metrics = {
        "weight_mean": _mean(weights[mask]),
        "weight_bounded_fraction": _mean(weights[mask] != ratio[mask]),
        "weight_effective_sample_size": _effective_sample_size(weights[mask]),
    }
    if normalize and float(mean) > MIN_MEAN_WEIGHT:
        weights = weights / mean
    return Weights(fill(mask, weights)[0], metrics)


def reject(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: Level = "sequence",
    estimator: str = "k3",
    reduction: Literal["sum", "mean", "max"] = "mean",
    low: float | None = None,
    high: float,
) -> Rejection:
    """Loss tokens whose divergence of engine from trainer is in [low, high], by token or by rollout. [B, T] each.

    ``estimator`` is a KL estimator of (rollout_log_probs, old_log_probs): k1 = -log r, which alone can be too low as
    well; k2; k3. ``reduction`` makes one value of a rollout's loss tokens at level sequence. NaN is rejected.
    """
    if low is not None and low > high:
        raise ConfigError(f"rejection keeps nothing between low={low:g} and high={high:g}; set low below high")
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    (values,) = fill(mask, kl.estimate(estimator, torch.zeros_like(log_ratio), log_ratio))
    if level == "sequence":
        if reduction == "max":
            values = torch.where(mask, values, -torch.inf).amax(dim=1, keepdim=True)
        else:
            totals = values.sum(dim=1, keepdim=True)
            values = totals if reduction == "sum" else totals / mask.sum(dim=1, keepdim=True).clamp(min=1)
    keep = mask & (values <= high) & (values >= (-torch.inf if low is None else low))
    rows = mask.any(dim=1)
    metrics = {
        "rejected_token_fraction": _mean(~keep[mask]),
        "rejected_rollout_fraction": _mean((mask & ~keep).any(dim=1)[rows]),
    }
    return Rejection(keep, metrics)


def mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far engine and trainer are apart on the loss tokens, before any correction. NaN without loss tokens.

    k1, k3: KL(engine || trainer) per token. chi2_token, chi2_sequence: mean r^2 - 1 of tokens, of rollouts.
    effective_sample_size: (sum r)^2 / (n sum r^2) over tokens, 1 without mismatch. perplexity_ratio: trainer's over
    engine's, mean over rollouts.
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    tokens, rows = log_ratio[mask], mask.any(dim=1)
    totals, counts = log_ratio.sum(dim=1)[rows], mask.sum(dim=1)[rows]
    zeros = torch.zeros_like(tokens)
    return {
        "k1": _mean(kl.k1(zeros, tokens)),
        "k3": _mean(kl.k3(zeros, tokens)),
        "chi2_token": _mean((2 * tokens).exp()) - 1,
        "chi2_sequence": _mean((2 * totals.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()) - 1,
        "effective_sample_size": _effective_sample_size(tokens.exp()),
        "perplexity_ratio": _mean((-totals / counts).exp()),
    }


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    old, rollout = fill(mask, old_log_probs.detach().double(), rollout_log_probs.detach().double())
    return (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2), as a share of the n samples."""
    return float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))
