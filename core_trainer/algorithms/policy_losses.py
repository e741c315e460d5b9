"""Policy losses per token, before aggregation.

All tensors are flat, [M], over the tokens of a micro-batch that holds whole rollouts, or of the whole mini-batch where
a loss is registered so. Tokens off the mask influence nothing: their loss is 0, and so is the gradient to them,
whatever stands there. rho = exp(log_probs - old_log_probs), its logarithm clamped to +-20. ``clipped`` marks tokens
whose gradient a bound cut, unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core_trainer.algorithms import registry
from core_trainer.algorithms.numerics import MAX_LOG_RATIO, fill, masked_mean
from core_trainer.algorithms.numerics import ratio as bounded_ratio
from core_trainer.algorithms.registry import TokenLoss, policy_loss
from rlinsight.errors import ConfigError

BINARY_KL_EPSILON = 1e-8  # added to the probabilities of all other tokens


def compute(name: str, available: Mapping[str, Tensor], options: Mapping[str, Any]) -> TokenLoss:
    """Loss of the named function. Raises ConfigError when it returns something else than TokenLoss of [M] tensors."""
    algorithm, shape = registry.find("policy_loss", name), available["mask"].shape
    result = algorithm.call(available, options)
    if not isinstance(result, TokenLoss):
        raise ConfigError(f"{algorithm.title} returned {type(result).__name__}; return TokenLoss(loss, ratio, clipped)")
    for field, tensor in zip(TokenLoss._fields, result, strict=True):
        if tensor.shape != shape:
            raise ConfigError(f"{algorithm.title} returned {field} of shape {list(tensor.shape)}; return {list(shape)}")
    return result


def linearized(
    name: str, available: Mapping[str, Tensor], options: Mapping[str, Any], weights: Tensor
) -> tuple[TokenLoss, Tensor]:
    """What ``compute`` gives, without gradient, and the slope [M]: the gradient of sum(weights x loss) to log_probs.

    sum(slope x log_probs) has that gradient in the model too, and adds up over any split of the tokens.
    """
    log_probs = available["log_probs"].detach().requires_grad_()
    result = compute(name, {**available, "log_probs": log_probs}, options)
    (slope,) = torch.autograd.grad((result.loss * weights).sum(), log_probs)
    return TokenLoss(*(tensor.detach() for tensor in result)), slope


@policy_loss("ppo_clip")
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347), with separate bounds and optional dual clip (arXiv 1912.09729).

    max(-A rho, -A clip(rho, 1 - low, 1 + high)); for A < 0 at most -A dual_clip.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    ratio = bounded_ratio(log_probs, old_log_probs)
    loss, clipped = _clip(advantages, ratio, clip_low, clip_high)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return _result(mask, loss, ratio, clipped)


@policy_loss("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """PPO's clip on the geometric mean of a rollout's ratios (arXiv 2507.18071, the token form); ratio is that mean.

    s_t = exp(log_probs_t - sg(log_probs_t) + sg(mean over the rollout of (log_probs - old))): the value of the
    rollout's ratio, the gradient of the token's. Meant for seq-mean-token-mean.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    mean = _sequence_mean((log_probs - old_log_probs).detach(), mask, sequences)
    ratio = torch.exp(log_probs - log_probs.detach() + mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss, clipped = _clip(advantages, ratio, clip_low, clip_high)
    return _result(mask, loss, ratio, clipped)


@policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """-sg(clip(rho, 1 - low, 1 + high)) A log_probs (arXiv 2506.13585). clip_low >= 1 sets no lower bound.

    ``clipped`` marks tokens whose weight was clipped; all keep a gradient.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    ratio = bounded_ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return _result(mask, -weight * advantages * log_probs, ratio, weight != ratio)


@policy_loss("gmpo")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """-A s, s the geometric mean of a rollout's clipped ratios (arXiv 2507.20673); ratio is s.

    Each log ratio is clipped on the side its advantage pushes to: at most ``high`` for A > 0, at least -``low`` for
    A < 0. A is the mean over the rollout. Every token of a rollout has the same loss, so seq-mean-token-mean is the
    mean over rollouts of the paper.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clipped = ((advantages > 0) & (log_ratio > clip_high)) | ((advantages < 0) & (log_ratio < -clip_low))
    kept = torch.where(clipped, log_ratio.detach().clamp(-clip_low, clip_high), log_ratio)
    (kept,) = fill(advantages != 0, kept)
    ratio = torch.exp(_sequence_mean(kept, mask, sequences))
    return _result(mask, -_sequence_mean(advantages, mask, sequences) * ratio, ratio, clipped)


@policy_loss("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """-A sigmoid(tau (rho - 1)) 4 / tau, tau by the sign of A (arXiv 2511.20347): a soft gate, nothing is clipped."""
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    ratio = bounded_ratio(log_probs, old_log_probs)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return _result(mask, loss, ratio, torch.zeros_like(mask))


@policy_loss("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bound_low: float = 0.2,
    bound_high: float = 0.2,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """-A sg(min(rho, max_ratio)) log_probs while the token's probability is in its trust region (arXiv 2602.04879).

    For A > 0 it may have risen by ``high``, else fallen by ``low``, in total variation |pi - old|; a token that moves
    back is never cut.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    rise = (log_probs.exp() - old_log_probs.exp()).detach()
    inside = torch.where(advantages > 0, rise <= bound_high, rise >= -bound_low)
    return _trust_region(log_probs, old_log_probs, advantages, mask, inside, max_ratio)


@policy_loss("dppo_kl")
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bound_low: float = 0.05,
    bound_high: float = 0.05,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """``dppo_tv`` with the binary KL of the token against all others, KL(old || pi), as distance (arXiv 2602.04879)."""
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    current, old = log_probs.detach().exp(), old_log_probs.exp()
    others = torch.log((1 - old + BINARY_KL_EPSILON) / (1 - current + BINARY_KL_EPSILON))
    distance = old * (old_log_probs - log_probs.detach()) + (1 - old) * others
    up = (distance <= bound_high) | (current <= old)
    down = (distance <= bound_low) | (current >= old)
    return _trust_region(log_probs, old_log_probs, advantages, mask, torch.where(advantages > 0, up, down), max_ratio)


@policy_loss("dro")
def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, beta: float = 0.05) -> TokenLoss:
    """-(A log_probs - beta / 2 (log_probs - old)^2), a quadratic pull to the old policy (arXiv 2405.19107)."""
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    loss = -(advantages * log_probs - beta / 2 * (log_probs - old_log_probs) ** 2)
    return _result(mask, loss, bounded_ratio(log_probs, old_log_probs), torch.zeros_like(mask))


@policy_loss("gpg")
@policy_loss("reinforce")
def reinforce(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """-A log_probs: the plain policy gradient, as REINFORCE and GPG (arXiv 2504.02546) use it. rho is only reported."""
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    return _result(mask, -advantages * log_probs, bounded_ratio(log_probs, old_log_probs), torch.zeros_like(mask))


@policy_loss("clip_cov", whole_mini_batch=True)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """PPO's clip, and tokens of high covariance between log-prob and advantage cut out (arXiv 2505.22617).

    Of the tokens PPO did not clip whose covariance is between ``cov_low`` and ``cov_high``, the highest are cut, at
    most max(1, cov_ratio x loss tokens). Covariance and count are those of the mini-batch; published code takes a
    micro-batch's, and draws the tokens of the band at random.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    ratio = bounded_ratio(log_probs, old_log_probs)
    loss, clipped = _clip(advantages, ratio, clip_low, clip_high)
    covariance = _covariance(log_probs, advantages, mask)
    band = mask & ~clipped & (covariance > cov_low) & (covariance < cov_high)
    cut = _highest(covariance, band, max(1, int(cov_ratio * int(mask.sum()))))
    return _result(mask, torch.where(cut, 0, loss), ratio, clipped | cut)


@policy_loss("kl_cov", whole_mini_batch=True)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_ratio: float = 2e-4,
    kl_coef: float = 1.0,
) -> TokenLoss:
    """-A rho, plus kl_coef |log_probs - old| on the tokens of highest covariance (arXiv 2505.22617).

    Covariance of log-prob and advantage over the mini-batch, as in ``clip_cov``; max(1, cov_ratio x loss tokens) are
    penalised. ``clipped`` marks them.
    """
    log_probs, old_log_probs, advantages = fill(mask, log_probs, old_log_probs, advantages)
    ratio = bounded_ratio(log_probs, old_log_probs)
    penalised = _highest(_covariance(log_probs, advantages, mask), mask, max(1, int(cov_ratio * int(mask.sum()))))
    penalty = torch.where(penalised, kl_coef * (log_probs - old_log_probs).abs(), 0)
    return _result(mask, -advantages * ratio + penalty, ratio, penalised)


def _clip(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A ratio, -A clip(ratio)), and where the bound was the larger."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def _trust_region(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, inside: Tensor, max_ratio: float
) -> TokenLoss:
    ratio = bounded_ratio(log_probs, old_log_probs).detach()
    loss = -advantages * ratio.clamp(max=max_ratio) * log_probs
    return _result(mask, torch.where(inside, loss, 0), ratio, ~inside)


def _sequence_mean(values: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """Mean over the loss tokens of each rollout, at each of its tokens, [M]. ``values`` are 0 off the mask."""
    zeros = values.new_zeros(int(sequences.max()) + 1 if sequences.numel() else 0)
    totals = zeros.index_add(0, sequences, values)
    counts = zeros.index_add(0, sequences, mask.to(values.dtype))
    return (totals / counts.clamp(min=1))[sequences]


def _covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log_prob - mean)(A - mean) of each token, means over the mask, without gradient."""
    log_probs = log_probs.detach()
    return (log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask))


def _highest(values: Tensor, among: Tensor, count: int) -> Tensor:
    """[M] bool: the ``count`` highest ``values`` among a mask; of equal ones the first."""
    candidates = among.nonzero()[:, 0]
    order = torch.argsort(values[candidates], descending=True, stable=True)
    chosen = torch.zeros_like(among)
    chosen[candidates[order[:count]]] = True
    return chosen


def _result(mask: Tensor, loss: Tensor, ratio: Tensor, clipped: Tensor) -> TokenLoss:
    """0, 1 and False off the mask."""
    return TokenLoss(fill(mask, loss)[0], torch.where(mask, ratio.detach(), 1), clipped & mask)
