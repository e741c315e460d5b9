"""Rewards to advantages, over all rollouts of a step at once.

B rollouts of T tokens, right-padded; ``mask`` marks loss tokens, and tokens off it (padding, what tools answered) are
skipped. Everything is float64. Functions that compare rollouts of a group refuse a group of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core_trainer.algorithms import registry
from core_trainer.algorithms.numerics import fill
from core_trainer.algorithms.numerics import whiten as whitened
from core_trainer.algorithms.registry import advantage
from rlinsight.errors import ConfigError, TrainingError

EPSILON = 1e-6  # added to the std, not a floor under it
BASELINE_EPSILON = 1e-8  # added to the sum of weights of the optimal token baseline


def compute(name: str, available: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Advantages of the named function, and its returns where it has any; both [B, T] float64, 0 off the mask.

    ``available`` holds ``mask`` beside what the function asks for. Raises ConfigError for another shape, TrainingError
    for advantages that are not finite.
    """
    algorithm, mask = registry.find("advantage", name), available["mask"]
    result = algorithm.call(available, options)
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        got, wanted = list(advantages.shape), list(mask.shape)
        raise ConfigError(f"{algorithm.title} returned shape {got}; return [B, T]={wanted}, or [B]={wanted[:1]}")
    if returns is not None and returns.shape != mask.shape:
        got, wanted = list(returns.shape), list(mask.shape)
        raise ConfigError(f"{algorithm.title} returned returns of shape {got}; return [B, T]={wanted}")
    columns = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
    (spread,) = fill(mask, columns.double())
    if not bool(torch.isfinite(spread).all()):
        row = int((~torch.isfinite(spread)).any(dim=1).nonzero()[0])
        raise TrainingError(f"{algorithm.title} gave rollout {row} an advantage that is not finite; look at its reward")
    return spread, None if returns is None else fill(mask, returns.double())[0]


# Over the rewards of a group ----------------------------------------------------------------------------------------


@advantage("grpo")
def grpo(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True) -> Tensor:
    """(r - mean_g) / (std_g + 1e-6), std with ddof 1 (arXiv 2402.03300); undivided it is Dr.GRPO's (2503.20783).

    rewards [B], groups [B] int64 -> [B].
    """
    index, counts = _groups(groups)
    centred = _centre(rewards, index, counts)
    return centred / (_std(centred, index, counts) + EPSILON)[index] if normalize_by_std else centred


@advantage("rloo")
def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus the mean of the group's others, (n r - sum_g) / (n - 1) (arXiv 2402.14740). [B], [B] -> [B]."""
    index, counts = _groups(groups)
    rewards = rewards.double()
    return ((counts[index] * rewards) - _sum(rewards, index, counts)[index]) / (counts - 1)[index]


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """r - mean_g, whitened over the loss tokens of the batch, so long rollouts weigh more (arXiv 2501.03262).

    rewards [B], groups [B], mask [B, T] -> [B, T].
    """
    index, counts = _groups(groups)
    return whitened(_centre(rewards, index, counts)[:, None].expand(mask.shape), mask)


@advantage("opo")
def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """r - sum_g(len r) / sum_g(len), the optimal baseline for gradients that grow with length (arXiv 2505.23585).

    rewards [B], groups [B], lengths [B] loss tokens -> [B]. A group without loss tokens has baseline 0.
    """
    index, counts = _groups(groups)
    rewards, lengths = rewards.double(), lengths.double()
    baseline = _sum(lengths * rewards, index, counts) / _sum(lengths, index, counts).clamp(min=1)
    return rewards - baseline[index]


@advantage("gpg")
def gpg(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B / number of non-zero rewards) (r - mean_g) (arXiv 2504.02546). [B], [B] -> [B]."""
    index, counts = _groups(groups)
    scale = rewards.numel() / max(int((rewards != 0).sum()), 1)
    return scale * _centre(rewards, index, counts)


@advantage("grpo_pass_at_k")
def grpo_pass_at_k(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True) -> Tensor:
    """(best - second best) / (std_g + 1e-6) for the best of a group, 0 for the rest (arXiv 2503.19595).

    rewards [B], groups [B] -> [B]. Two that are best leave a group without signal.
    """
    index, counts = _groups(groups)
    rewards = rewards.double()
    order = torch.argsort(rewards, descending=True)
    order = order[torch.argsort(index[order], stable=True)]  # group by group, each from its best down
    best = torch.cumsum(counts, 0).long() - counts.long()
    lead = torch.zeros_like(rewards)
    lead[order[best]] = rewards[order[best]] - rewards[order[best + 1]]
    if not normalize_by_std:
        return lead
    return lead / (_std(_centre(rewards, index, counts), index, counts) + EPSILON)[index]


@advantage("gdpo")
def gdpo(components: Tensor, component_weights: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """GRPO of each reward component by itself, summed by weight, whitened over loss tokens (arXiv 2601.05242).

    components [B, K], component_weights [K], groups [B], mask [B, T] -> [B, T].
    """
    weighted = [weight * grpo(scores, groups) for weight, scores in zip(component_weights, components.T, strict=True)]
    return whitened(torch.stack(weighted).sum(dim=0)[:, None].expand(mask.shape), mask)


# Over the tokens of a rollout ---------------------------------------------------------------------------------------


@advantage("gae")
def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages and returns, both [B, T], 0 off the mask.

    d_t = r_t + gamma V_{t+1} - V_t; A_t = d_t + gamma lam A_{t+1}; returns = A + V. Tokens off the mask hand V_{t+1}
    and A_{t+1} through, undiscounted. Advantages are whitened over the mask, after the returns.
    """
    rewards, values = fill(mask, token_rewards.double(), values.double())
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    (advantages,) = fill(mask, advantages)
    return whitened(advantages, mask) if whiten else advantages, advantages + values


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Discounted reward to go, whitened over the loss tokens of the batch (arXiv 2501.03262).

    token_rewards [B, T], mask [B, T] -> advantages and returns, both [B, T].
    """
    returns = reward_to_go(token_rewards, mask, gamma)
    return whitened(returns, mask), returns


@advantage("remax")
def remax(token_rewards: Tensor, greedy_rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Reward to go minus the reward of the greedy rollout of the same prompt (arXiv 2310.10505).

    token_rewards [B, T], greedy_rewards [B], mask [B, T] -> advantages and returns, both [B, T].
    """
    returns = reward_to_go(token_rewards, mask, 1.0)
    return fill(mask, returns - greedy_rewards.double()[:, None])[0], returns


@advantage("optimal_token_baseline")
def optimal_token_baseline(
    token_rewards: Tensor, mask: Tensor, groups: Tensor, old_log_probs: Tensor, sum_pi_squared: Tensor
) -> tuple[Tensor, Tensor]:
    """Reward to go G_t minus a baseline of its own for each position t, sum_g(G_t W_t) / (sum_g W_t + 1e-8) (arXiv
    2602.07078).

    W_t = sum over loss tokens up to t of 1 - 2 pi + sum pi^2, the squared gradient norm of the logits. Where only one
    rollout of the group still goes on, the baseline would be its own return; it is 0 there. All [B, T] but groups [B]
    -> advantages and returns, both [B, T].
    """
    index, counts = _groups(groups)
    returns = reward_to_go(token_rewards, mask, 1.0)
    old, squared = fill(mask, old_log_probs.double(), sum_pi_squared.double())
    (norms,) = fill(mask, 1 - 2 * old.exp() + squared)
    (weights,) = fill(mask, norms.cumsum(dim=1))
    zeros = torch.zeros(len(counts), mask.shape[1], dtype=torch.float64)
    baseline = zeros.index_add(0, index, returns * weights) / (zeros.index_add(0, index, weights) + BASELINE_EPSILON)
    goes_on = mask.flip(1).cumsum(dim=1).flip(1) > 0
    alone = zeros.index_add(0, index, goes_on.double()) < 2
    baseline = torch.where(alone, 0, baseline)
    return fill(mask, returns - baseline[index])[0], returns


def reward_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over loss tokens; others are skipped without discount and 0. [B, T] -> [B, T]."""
    (rewards,) = fill(mask, token_rewards.double())
    returns = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(mask.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return fill(mask, returns)[0]


def _groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B] of each rollout's group among G, and rollouts of each [G] float64. Refuses a group of one."""
    names, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    if bool((counts == 1).any()):
        raise ConfigError(
            f"group {int(names[counts == 1][0])} has one rollout, so there is nothing to compare it with; set "
            "rollout.group_size >= 2, or leave groups of one out"
        )
    return index, counts.double()


def _sum(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros_like(counts).index_add(0, index, values)


def _centre(rewards: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    rewards = rewards.double()
    return rewards - (_sum(rewards, index, counts) / counts)[index]


def _std(centred: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """Sample std of each group [G] from centred rewards."""
    return (_sum(centred**2, index, counts) / (counts - 1)).sqrt()
