"""From scored rollouts to the samples of an update: masks, weights of tokens, mini-batches, and losses that see a whole
mini-batch. Pure, no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_trainer.algorithms import policy_losses, registry
from core_trainer.algorithms.aggregation import token_weights
from core_trainer.batching import TrainSample, token_sample
from core_trainer.partition import balanced
from core_trainer.types import Rollout
from rlinsight.config import AlgorithmSection


def to_samples(rollouts: Sequence[Rollout]) -> list[TrainSample]:
    """Samples in the order of ``rollouts``; every sampled token is trained on.

    A rollout of one turn, which is all there is so far: its tokens follow its prompt.
    """
    samples = []
    for rollout in rollouts:
        (turn,) = rollout.turns
        tokens = token_sample(
            rollout.rollout_id, rollout.group_id, turn.prompt_token_ids, turn.token_ids, turn.rollout_log_probs
        )
        samples.append(
            replace(
                tokens,
                policy_version=rollout.policy_version,
                turns=[(0, 0, tokens.num_tokens)],
                carrier=rollout.carrier,
            )
        )
    return samples


def attach(parts: Sequence[Sequence[TrainSample]], results: Sequence[Mapping[str, Sequence[np.ndarray]]]) -> None:
    """Set per-token arrays of the samples from what the ranks found for their parts: by field, one array a sample."""
    for part, found in zip(parts, results, strict=True):
        for name, arrays in found.items():
            for sample, array in zip(part, arrays, strict=True):
                setattr(sample, name, array)


def balanced_groups(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Share whole groups among ranks so that each has nearly the same number of tokens to compute.

    Samples of a part keep their order, and equal samples are always shared equally. A part is empty when there are
    fewer groups than parts.
    """
    groups = _groups(samples)
    tokens = [len(group[0].prompt_token_ids) + sum(sample.num_tokens for sample in group) for group in groups]
    return [[sample for i in share for sample in groups[i]] for share in balanced(tokens, parts)]


def split_groups(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Cut samples into contiguous parts of whole groups, group counts as equal as they can be."""
    groups = _groups(samples)
    bounds = np.linspace(0, len(groups), parts + 1).round().astype(int)
    return [[s for group in groups[a:b] for s in group] for a, b in itertools.pairwise(bounds)]


def _groups(samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
    """Samples by group, groups in the order of their first sample."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def mini_batches(
    samples: Sequence[TrainSample],
    ranks: int,
    algorithm: AlgorithmSection,
    seed: tuple[int, ...],
    max_length: int,
) -> Iterator[list[list[TrainSample]]]:
    """One list per rank for each optimizer step, with token weights over all ranks set.

    Groups are shuffled by ``seed`` and cut into ``num_mini_batches``, then shared among ranks by their tokens, so that
    the number of ranks changes nothing; with one mini-batch order is kept. There are fewer mini-batches than asked for
    when there are fewer groups. ``max_length`` is the cap on a rollout's tokens.
    """
    takes_length = "length" in registry.find("aggregation", algorithm.aggregation).options
    options = {"length": max_length} if takes_length else {}
    ordered = list(samples)
    if algorithm.num_mini_batches > 1:
        groups = _groups(samples)
        order = np.random.default_rng(seed).permutation(len(groups))
        ordered = [sample for i in order for sample in groups[i]]
    for part in split_groups(ordered, min(algorithm.num_mini_batches, len(_groups(ordered)))):
        lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in part])
        for sample, weight in zip(part, token_weights(lengths, algorithm.aggregation, **options).tolist(), strict=True):
            sample.token_weight = weight
        yield balanced_groups(part, ranks)


def set_losses(
    parts: Sequence[Sequence[TrainSample]],
    log_probs: Sequence[Sequence[np.ndarray]],
    loss: str,
    options: Mapping[str, Any],
    on_policy: bool = False,
) -> None:
    """Set what a policy loss that sees a mini-batch as a whole gives for each token of its samples.

    ``parts`` are the mini-batch by rank; ``log_probs`` [T] of each sample are under the weights that its update starts
    from. In float64, rollouts in the order of their ids: neither the ranks nor the order of samples change a bit.

    ``on_policy``: the old log-probs are of these weights too, so they are taken to be ``log_probs``. They come from a
    pass over other micro-batches, which rounds otherwise (1e-7 in float32), and its sign would be kl_cov's gradient.
    """
    pairs = [pair for part, found in zip(parts, log_probs, strict=True) for pair in zip(part, found, strict=True)]
    pairs.sort(key=lambda pair: pair[0].rollout_id)
    samples = [sample for sample, _ in pairs]
    lengths = torch.tensor([sample.num_tokens for sample in samples])

    def column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples]))

    on_policy = on_policy or samples[0].old_log_probs is None  # their pass was skipped
    current = torch.from_numpy(np.concatenate([found for _, found in pairs])).double()
    mask = column("loss_mask")
    weights = torch.tensor([sample.token_weight for sample in samples], dtype=torch.float64)
    weights = torch.repeat_interleave(weights, lengths) * mask
    if samples[0].weights is not None:
        weights = weights * column("weights")
    inputs = {
        "log_probs": current,
        "old_log_probs": current if on_policy else column("old_log_probs").double(),
        "advantages": column("advantages").double(),
        "mask": mask,
        "sequences": torch.repeat_interleave(torch.arange(len(samples)), lengths),
    }
    token, slope = policy_losses.linearized(loss, inputs, options, weights)
    results = {
        "token_loss": token.loss.float(),
        "loss_slope": slope.float(),
        "ratio": token.ratio.float(),
        "clipped": token.clipped,
    }
    for name, tensor in results.items():
        for sample, values in zip(samples, torch.split(tensor, lengths.tolist()), strict=True):
            setattr(sample, name, values.numpy())
