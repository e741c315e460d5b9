"""From a step's scored rollouts to advantages: what a function may ask for, KL in the reward, rollout correction.

Tensors are padded, [B, T] over the step's samples in order, and float64. Pure, no I/O. The functions themselves are in
``core_trainer/algorithms``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core_trainer.algorithms import advantages as functions
from core_trainer.algorithms import correction, kl, registry
from core_trainer.algorithms.numerics import fill
from core_trainer.batching import TrainSample
from rlinsight import names
from rlinsight.config.algorithm import AlgorithmSection
from rlinsight.config.correction import CorrectionSection
from rlinsight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepRewards:
    """Rewards of a step, in the order of its samples."""

    rewards: Tensor  # [B] float64
    components: Tensor | None = None  # [B, K] float64, each before its weight
    component_weights: Tensor | None = None  # [K] float64
    greedy_rewards: Tensor | None = None  # [B] float64, of the greedy rollout of the same prompt


def check_algorithm(algorithm: AlgorithmSection, group_size: int) -> None:
    """Load the plugins and check that the functions named exist, take their options, and can be given what they ask
    for. Raises ConfigError.
    """
    registry.load_plugins(algorithm.plugins)
    named = [("advantage", algorithm.advantage), ("policy_loss", algorithm.policy_loss)]
    named += [("group_filter", section) for section in algorithm.shaping.group_filters]
    estimators = [algorithm.kl.estimator.removesuffix("+")] if algorithm.kl is not None else []
    if algorithm.correction is not None and algorithm.correction.importance is not None:
        named.append(("importance", algorithm.correction.importance.treatment))
    if algorithm.correction is not None and algorithm.correction.rejection is not None:
        estimators.append(algorithm.correction.rejection.estimator)
    for kind, section in named:
        registry.find(kind, section.type).resolve(section.model_dump(exclude={"type"}))
    for estimator in estimators:
        registry.find("kl_estimator", estimator).resolve({})
    aggregation = registry.find("aggregation", algorithm.aggregation)
    aggregation.resolve({"length": 1} if "length" in aggregation.options else {})
    used = {(kind, section.type) for kind, section in named} | {("aggregation", algorithm.aggregation)}
    used |= {("kl_estimator", estimator) for estimator in estimators}
    for path in algorithm.plugins:
        if used.isdisjoint(made := registry.registered_by(path)):
            known = ", ".join(f"{kind} {name!r}" for kind, name in sorted(made))
            raise ConfigError(f"plugin {path} has no effect: the config names none of its functions ({known})")
    name, wanted = algorithm.advantage.type, registry.find("advantage", algorithm.advantage.type).inputs
    if "groups" in wanted and group_size < 2:
        raise ConfigError(
            f"rollout.group_size={group_size} with algorithm.advantage {name}, which asks for groups, leaves a rollout "
            "nothing to be compared with; set rollout.group_size >= 2"
        )
    if "values" in wanted and algorithm.critic is None:
        raise ConfigError(f"algorithm.advantage {name} asks for values; set critic: {{type: model}}")
    if algorithm.critic is not None and "values" not in wanted:
        raise ConfigError(f"advantage {name} asks for no values; remove algorithm.critic")
    in_reward = algorithm.kl is not None and algorithm.kl.where == "reward"
    if in_reward and {"rewards", "token_rewards"}.isdisjoint(wanted):
        raise ConfigError(f"kl.where=reward has no effect with advantage {name}, which asks for no rewards; set loss")
    if algorithm.bypasses:
        same_pass = "the values of critic type shared come" if algorithm.critic and not algorithm.model_critic else None
        if "sum_pi_squared" in wanted:
            same_pass = f"sum_pi_squared, which advantage {name} asks for, comes"
        if same_pass is not None:
            raise ConfigError(
                f"correction.mode=bypass saves the pass of old log-probs, but {same_pass} from it; set mode: decoupled"
            )


def estimate(
    samples: Sequence[TrainSample], rewards: StepRewards, algorithm: AlgorithmSection, kl_coef: float
) -> dict[str, float | None]:
    """Set the samples' ``advantages``, and their ``returns`` where the function has any. Returns step metrics."""
    inputs, metrics = _inputs(samples, rewards, algorithm, kl_coef)
    options = algorithm.advantage.model_dump(exclude={"type"})
    advantages, returns = functions.compute(algorithm.advantage.type, inputs, options)
    _set(samples, "advantages", advantages)
    if returns is not None:
        _set(samples, "returns", returns)
    in_loss = advantages[inputs["mask"]]
    return {**metrics, names.M_ADVANTAGE_ABS: float(in_loss.abs().mean()) if len(in_loss) else None}


def reference_kl(samples: Sequence[TrainSample]) -> float | None:
    """Mean k3 over loss tokens of the old log-probs to the reference's; None without a loss token."""
    mask, old, ref = (_padded(samples, name) for name in ("loss_mask", "old_log_probs", "ref_log_probs"))
    return float(kl.k3(old[mask], ref[mask]).mean()) if bool(mask.any()) else None


def correct(samples: Sequence[TrainSample], section: CorrectionSection) -> dict[str, float | None]:
    """Rollout correction: set the samples' ``weights`` and take rejected tokens out of their ``loss_mask``.

    Returns step metrics of the mismatch, as it was before, and of what was done about it.
    """
    old, rollout, mask = (_padded(samples, name) for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
    measured = correction.mismatch(old, rollout, mask)
    weights, kept = torch.ones_like(old), mask
    if section.importance is not None:
        importance = section.importance
        weights, found = correction.importance_weights(
            old,
            rollout,
            mask,
            level=importance.level,
            treatment=importance.treatment.type,
            normalize=importance.normalize,
            **importance.treatment.model_dump(exclude={"type"}),
        )
        measured |= found
    if section.rejection is not None:
        kept, found = correction.reject(old, rollout, mask, **section.rejection.model_dump(exclude_none=True))
        measured |= found
    _set(samples, "weights", torch.where(mask, weights * kept, 1.0))  # 0 is what was rejected
    _set(samples, "loss_mask", kept)
    return {names.M_CORRECTION[name]: value if math.isfinite(value) else None for name, value in measured.items()}


def _inputs(
    samples: Sequence[TrainSample], rewards: StepRewards, algorithm: AlgorithmSection, kl_coef: float
) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """Everything an advantage function may ask for, by name. With KL in the reward, it is taken off each token's."""
    index = {group: i for i, group in enumerate(dict.fromkeys(sample.group_id for sample in samples))}
    mask = _padded(samples, "loss_mask")
    token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(samples)), _last_tokens(samples)] = rewards.rewards
    metrics: dict[str, float | None] = {}
    if algorithm.kl is not None and algorithm.kl.where == "reward":
        old, ref = fill(mask, _padded(samples, "old_log_probs"), _padded(samples, "ref_log_probs"))
        (distance,) = fill(mask, kl.estimate(algorithm.kl.estimator, old, ref))
        token_rewards = token_rewards - kl_coef * distance
        metrics[names.M_KL_REWARD] = float(distance.sum(1).mean())
    inputs = {
        "rewards": token_rewards.sum(1),
        "token_rewards": token_rewards,
        "mask": mask,
        "groups": torch.tensor([index[sample.group_id] for sample in samples]),
        "lengths": mask.sum(1),
    }
    for name in ("components", "component_weights", "greedy_rewards"):
        if (value := getattr(rewards, name)) is not None:
            inputs[name] = value
    for name in ("values", "old_log_probs", "sum_pi_squared"):
        if getattr(samples[0], name) is not None:
            inputs[name] = _padded(samples, name)
    return inputs, metrics


def _padded(samples: Sequence[TrainSample], name: str) -> Tensor:
    """A per-token array of the samples: [B, T] float64, or bool, with 0 behind each sample's end."""
    arrays = [getattr(sample, name) for sample in samples]
    padded = np.zeros((len(samples), max(map(len, arrays))), dtype=bool if arrays[0].dtype == bool else np.float64)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


def _set(samples: Sequence[TrainSample], name: str, values: Tensor) -> None:
    """The reverse; numbers are kept as float32."""
    array = values.numpy() if values.dtype == torch.bool else values.float().numpy()
    for sample, row in zip(samples, array, strict=True):
        setattr(sample, name, row[: sample.num_tokens].copy())


def _last_tokens(samples: Sequence[TrainSample]) -> Tensor:
    """Token that carries each rollout's reward: the last one in the loss, or the last sampled when none is."""
    last = []
    for sample in samples:
        in_loss = np.flatnonzero(sample.loss_mask)
        last.append(int(in_loss[-1]) if len(in_loss) else sample.num_tokens - 1)
    return torch.tensor(last)
