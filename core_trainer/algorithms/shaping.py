"""Which rollouts of a step are learnt from, and what their length costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core_trainer.algorithms import registry
from core_trainer.algorithms.registry import group_filter
from rlinsight.errors import ConfigError


class Selection(NamedTuple):
    """The rollouts that are kept, and why others are not."""

    keep: Tensor  # [B] bool
    reasons: list[str | None]  # None for a rollout that is kept


def overlong(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft penalty on the last tokens before the cap (arXiv 2503.14476), to be added to the reward.

    min(-(length - (max_length - buffer)) / buffer factor, 0); lengths [B] tokens -> [B] float64.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(f"overlong buffer={buffer} is not between 1 and the cap of {max_length} tokens; change it")
    return (-(lengths.double() - (max_length - buffer)) / buffer * factor).clamp(max=0)


def select(checks: Mapping[str, Tensor]) -> Selection:
    """Keep what passes every check; the first one failed is the reason. Each [B] bool, by its reason, in order."""
    if not checks:
        raise ValueError("no checks to select by")
    keep = torch.stack(list(checks.values())).all(dim=0)
    failed = zip(*(check.tolist() for check in checks.values()), strict=True)
    reasons = [next((name for name, passed in zip(checks, row, strict=True) if not passed), None) for row in failed]
    return Selection(keep, reasons)


def filter_groups(name: str, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """What the named filter keeps, [B] bool; ``inputs`` [B] each, by the names a filter may ask for.

    Raises ConfigError for another shape or dtype, and for a filter that keeps part of a group: a group is learned from
    whole, since an advantage compares its rollouts.
    """
    check = registry.find("group_filter", name)
    groups, keep = inputs["groups"], check.call(inputs, options)
    if keep.shape != groups.shape or keep.dtype != torch.bool:
        got = f"{keep.dtype} of shape {list(keep.shape)}"
        raise ConfigError(f"{check.title} returned {got}; return torch.bool of shape [B]={list(groups.shape)}")
    index, zeros = _index(groups)
    kept = zeros.index_add(0, index, keep.double())
    partly = (kept > 0) & (kept < torch.bincount(index, minlength=len(zeros)))
    if bool(partly.any()):
        raise ConfigError(f"{check.title} keeps some rollouts of a group and not others; return one value for a group")
    return keep


@group_filter("zero_variance")
def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """Groups whose rewards differ at all: others have no signal relative to their group (DAPO, arXiv 2503.14476).

    rewards [B], groups [B] -> [B] bool. Compares lowest and highest, where a std of equal rewards may round above 0. A
    group of one has no signal.
    """
    index, zeros = _index(groups)
    highest = zeros.scatter_reduce(0, index, rewards.double(), "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, rewards.double(), "amin", include_self=False)
    return (highest > lowest)[index]


@group_filter("too_hard")
def too_hard(rewards: Tensor, groups: Tensor, *, min_reward: float) -> Tensor:
    """Groups of mean reward ``min_reward`` or more. rewards [B], groups [B] -> [B] bool."""
    return _means(rewards, groups) >= min_reward


@group_filter("too_easy")
def too_easy(rewards: Tensor, groups: Tensor, *, max_reward: float) -> Tensor:
    """Groups of mean reward ``max_reward`` or less. rewards [B], groups [B] -> [B] bool."""
    return _means(rewards, groups) <= max_reward


@group_filter("stale")
def stale(groups: Tensor, staleness: Tensor, *, max_staleness: int) -> Tensor:
    """Groups none of whose rollouts is staler than ``max_staleness`` updates. groups [B], staleness [B] -> [B] bool."""
    index, zeros = _index(groups)
    return (zeros.index_add(0, index, (staleness > max_staleness).double()) == 0)[index]


@group_filter("too_small")
def too_small(groups: Tensor, *, min_size: int = 2) -> Tensor:
    """Groups of at least ``min_size`` rollouts, when some were lost. groups [B] -> [B] bool."""
    index, zeros = _index(groups)
    return (zeros.index_add(0, index, torch.ones_like(index, dtype=torch.float64)) >= min_size)[index]


def _index(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B] of each rollout's group among G, and zeros [G] float64."""
    names, index = torch.unique(groups, return_inverse=True)
    return index, torch.zeros(len(names), dtype=torch.float64)


def _means(rewards: Tensor, groups: Tensor) -> Tensor:
    index, zeros = _index(groups)
    return zeros.scatter_reduce(0, index, rewards.double(), "mean", include_self=False)[index]
