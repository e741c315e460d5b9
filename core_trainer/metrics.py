"""Step metrics: sums that merge over micro-batches, mini-batches and ranks, and their reduction to names.METRICS.

Every mean here is weighted by what it says it counts (tokens, rollouts or groups), never a mean of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_trainer.types import Rollout
from rlinsight import names, telemetry
from rlinsight.config import AlgorithmSection


@dataclass(slots=True)
class TokenStats:
    """Sums over loss tokens of an update; ``merge`` adds two."""

    num_tokens: int = 0
    num_measured: int = 0  # of those, compared with the engine: what rollout_* and num_mismatched are of
    loss: float = 0.0  # already weighted, as are its terms
    policy_loss: float = 0.0
    kl_loss: float = 0.0
    entropy_loss: float = 0.0
    entropy: float = 0.0
    policy_kl: float = 0.0
    ref_kl: float = 0.0
    rollout_kl: float = 0.0
    rollout_gap: float = 0.0
    num_clipped: int = 0
    num_mismatched: int = 0
    staleness: float = 0.0
    ratio_max: float = 0.0
    rollout_gap_max: float = 0.0

    def merge(self, other: TokenStats) -> TokenStats:
        """Sum of sums, maximum of maxima."""
        merged = {}
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            merged[item.name] = max(mine, theirs) if item.name.endswith("_max") else mine + theirs
        return TokenStats(**merged)

    def gaps(self) -> TokenStats:
        """What says how far engine and trainer are apart, and nothing else."""
        return TokenStats(
            num_measured=self.num_measured,
            rollout_kl=self.rollout_kl,
            rollout_gap=self.rollout_gap,
            num_mismatched=self.num_mismatched,
            rollout_gap_max=self.rollout_gap_max,
        )

    def metrics(self, algorithm: AlgorithmSection, num_updates: int) -> dict[str, float | None]:
        """Means per loss token, losses per optimizer step; None where there is none."""

        def mean(total: float) -> float | None:
            return total / self.num_tokens if self.num_tokens else None

        def gap(value: float, count: int = 1) -> float | None:
            return value / count if self.num_measured else None

        kl, updates, measured = algorithm.kl, max(num_updates, 1), self.num_measured
        return {
            names.M_LOSS: self.loss / updates,
            names.M_POLICY_LOSS: self.policy_loss / updates,
            names.M_KL_LOSS: self.kl_loss / updates if kl is not None and kl.where == "loss" else None,
            names.M_ENTROPY_LOSS: self.entropy_loss / updates if algorithm.entropy_coef else None,
            names.M_ENTROPY: mean(self.entropy),
            names.M_POLICY_KL: mean(self.policy_kl),
            names.M_REF_KL: mean(self.ref_kl) if kl is not None else None,
            names.M_ROLLOUT_KL: gap(self.rollout_kl, measured),
            names.M_ROLLOUT_ABS: gap(self.rollout_gap, measured),
            names.M_ROLLOUT_MAX: gap(self.rollout_gap_max),
            names.M_MISMATCHED: gap(self.num_mismatched),
            names.M_CLIP_FRACTION: mean(self.num_clipped),
            names.M_RATIO_MAX: self.ratio_max if self.num_tokens else None,
            names.M_STALENESS: mean(self.staleness),
        }


def token_stats(
    mask: Tensor,
    log_probs: Tensor,
    old: Tensor,
    rollout: Tensor,
    ref: Tensor | None,
    entropy: Tensor,
    ratio: Tensor,
    clipped: Tensor,
    staleness: Tensor,
    own: Tensor | None = None,
    measured: Tensor | None = None,
) -> TokenStats:
    """Sums over the tokens where ``mask`` [M] is true; all other arguments [M], detached.

    ``own`` are the trainer's log-probs of what was sampled where ``old`` are taken from the engine, ``measured`` the
    tokens where those are known; all, when None.
    KLs are k3 in float64: in float32 k3 of nearly equal log-probs can come out negative.
    """
    if not bool(mask.any()):
        return TokenStats()
    measured = mask if measured is None else mask & measured
    rollout_gap = (old if own is None else own)[measured].double() - rollout[measured].double()
    log_probs, old = log_probs[mask].double(), old[mask].double()
    policy_gap = log_probs - old
    ref_kl = 0.0
    if ref is not None:
        d = log_probs - ref[mask].double()
        ref_kl = float((torch.exp(-d) + d - 1).sum())
    return TokenStats(
        num_tokens=int(mask.sum()),
        num_measured=len(rollout_gap),
        entropy=float(entropy[mask].double().sum()),
        policy_kl=float((torch.exp(policy_gap) - policy_gap - 1).sum()),
        ref_kl=ref_kl,
        rollout_kl=float((torch.exp(rollout_gap) - rollout_gap - 1).sum()),
        rollout_gap=float(rollout_gap.abs().sum()),
        num_clipped=int(clipped[mask].sum()),
        num_mismatched=int((rollout_gap != 0).sum()),
        staleness=float(staleness[mask].double().sum()),
        ratio_max=float(ratio[mask].max()),
        rollout_gap_max=float(rollout_gap.abs().max()) if len(rollout_gap) else 0.0,
    )


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """Lengths of everything a step sampled, learned from or not; rewards and group signal of what could be scored."""
    lengths = np.array([rollout.num_response_tokens for rollout in rollouts])
    groups: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            groups.setdefault(rollout.group_id, []).append(rollout.reward)
    rewards = np.array([reward for group in groups.values() for reward in group])
    return {
        names.M_REWARD_MEAN: _mean(rewards),
        names.M_REWARD_STD: float(rewards.std(ddof=1)) if len(rewards) > 1 else None,
        names.M_REWARD_MAX: float(rewards.max()) if len(rewards) else None,
        names.M_REWARD_MIN: float(rewards.min()) if len(rewards) else None,
        names.M_ZERO_VARIANCE: _mean([len(set(group)) == 1 for group in groups.values()]),
        names.M_LENGTH_MEAN: _mean(lengths),
        names.M_LENGTH_MAX: float(lengths.max()) if len(lengths) else None,
        names.M_TRUNCATED: _mean([rollout.finish_reason == "length" for rollout in rollouts]),
        names.M_PROMPT_LENGTH: _mean([len(rollout.prompt.token_ids) for rollout in rollouts]),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


WEIGHTS = {  # what each mean or sum counted; the rest are per step
    **dict.fromkeys(
        (m for m in names.METRICS if m.startswith(("reward/", "response_length/", "prompt_length/"))), "rollout"
    ),
    **dict.fromkeys((m for m in names.METRICS if m.startswith("policy/")), "token"),
    **dict.fromkeys((m for m in names.METRICS if m.startswith("correction/")), "token"),
    **{
        names.M_CORRECTION[name]: "rollout"
        for name in ("chi2_sequence", "perplexity_ratio", "rejected_rollout_fraction")
    },
    **dict.fromkeys((m for m in names.METRICS if m.startswith("critic/")), "token"),
    **dict.fromkeys((names.M_VALUE_LOSS, names.M_CRITIC_GRAD_NORM, names.M_CRITIC_LR), "step"),
    **dict.fromkeys(names.M_CRITIC_GRAD_NORM_GROUPS.values(), "step"),
    names.M_KL_REWARD: "rollout",
    names.M_ADVANTAGE_ABS: "token",
    names.M_ZERO_VARIANCE: "group",
}


def emit(name: str, value: float | None) -> None:
    """One step metric, its reduction stated. An undefined value is absent, not 0.

    A name of the user's own, which the registry does not know, counts as a dimensionless mean.
    """
    registered = names.METRICS.get(name)
    attributes: dict[str, Any] = {
        names.METRIC_NAME: name,
        names.METRIC_AGG: registered.agg if registered else "mean",
        names.METRIC_UNIT: registered.unit if registered else "1",
        names.METRIC_WEIGHT: WEIGHTS.get(name, "step"),
    }
    if value is not None:
        attributes[names.METRIC_VALUE] = value
    telemetry.event(names.STEP_METRIC, attributes)
