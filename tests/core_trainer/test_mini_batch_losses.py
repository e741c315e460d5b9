"""Losses that see a whole mini-batch: neither order, ranks nor padding change what its tokens are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_trainer.algorithms import policy_losses
from core_trainer.batch import set_losses, to_samples
from core_trainer.batching import TrainSample
from tests.core_trainer.test_batch import make_rollouts

CHOOSING: list[tuple[str, dict[str, Any]]] = [
    ("clip_cov", {"clip_low": 0.2, "clip_high": 0.2, "cov_ratio": 0.2, "cov_low": 0.05, "cov_high": 2.0}),
    ("kl_cov", {"cov_ratio": 0.2, "kl_coef": 0.7}),
]
LOSS_FIELDS = ("token_loss", "loss_slope", "ratio", "clipped")


def off_policy_samples(seed: int, tied: bool) -> tuple[list[TrainSample], dict[str, np.ndarray]]:
    """Samples of 12 rollouts and their current log-probs by rollout; some tokens are masked, with NaN on them.

    ``tied`` makes numbers few, so that many tokens have equal covariances.
    """
    rng = np.random.default_rng(seed)
    samples, current = to_samples(make_rollouts(4, 3, seed)), {}
    for sample in samples:
        size = sample.num_tokens
        sample.loss_mask = rng.random(size) < 0.8
        sample.token_weight = float(rng.uniform(0.01, 0.1))
        sample.weights = rng.uniform(0.5, 1.5, size).astype(np.float32)
        sample.advantages = np.full(size, rng.choice([-1.0, 0.5, 1.0]), dtype=np.float32)
        old, moved = rng.choice([-2.0, -1.0, -0.1], size), rng.choice([-0.3, 0.0, 0.1], size)
        if not tied:
            old, moved = -rng.exponential(1.0, size), rng.normal(0, 0.2, size)
        sample.old_log_probs, log_probs = old.astype(np.float32), (old + moved).astype(np.float32)
        for array in (sample.old_log_probs, sample.advantages, log_probs):
            array[~sample.loss_mask] = np.nan
        current[sample.rollout_id] = log_probs
    return samples, current


def losses_of(
    parts: list[list[TrainSample]], current: dict[str, np.ndarray], name: str, options: dict[str, Any]
) -> dict[str, list[np.ndarray]]:
    """What ``set_losses`` gives each rollout, by its id."""
    set_losses(parts, [[current[s.rollout_id] for s in part] for part in parts], name, options)
    return {s.rollout_id: [getattr(s, field) for field in LOSS_FIELDS] for part in parts for s in part}


def assert_same_bits(one: dict[str, list[np.ndarray]], other: dict[str, list[np.ndarray]]) -> None:
    assert one.keys() == other.keys()
    for rollout_id, arrays in one.items():
        for field, mine, theirs in zip(LOSS_FIELDS, arrays, other[rollout_id], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=f"{rollout_id} {field}", strict=True)


@pytest.mark.parametrize(("name", "options"), CHOOSING)
def test_losses_of_a_mini_batch_are_those_of_the_function(name: str, options: dict[str, Any]) -> None:
    """Of all its tokens at once; some are chosen, and slopes carry both kinds of weights."""
    samples, current = off_policy_samples(0, tied=False)
    found = losses_of([samples], current, name, options)
    columns = {
        "log_probs": np.concatenate([current[s.rollout_id] for s in samples]).astype(np.float64),
        **{
            field: np.concatenate([getattr(s, field) for s in samples]).astype(np.float64)
            for field in ("old_log_probs", "advantages")
        },
        "mask": np.concatenate([s.loss_mask for s in samples]),
    }
    tensors = {key: torch.from_numpy(column) for key, column in columns.items()}
    tensors["log_probs"].requires_grad_()
    expected = policy_losses.compute(name, tensors, options)
    weights = np.concatenate([s.token_weight * s.weights for s in samples])  # type: ignore[operator]
    (expected.loss * torch.from_numpy(weights)).sum().backward()
    loss, slope, ratio, clipped = (np.concatenate([found[s.rollout_id][i] for s in samples]) for i in range(4))
    np.testing.assert_allclose(loss, expected.loss.detach(), rtol=1e-6)
    np.testing.assert_allclose(slope, tensors["log_probs"].grad, rtol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(ratio, expected.ratio, rtol=1e-6)
    np.testing.assert_array_equal(clipped, expected.clipped)
    assert 1 < clipped.sum() < columns["mask"].sum()
    assert loss.dtype == slope.dtype == ratio.dtype == np.float32


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("name", "options"), CHOOSING)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_neither_order_nor_ranks_change_a_bit_of_a_mini_batch_s_losses(
    name: str, options: dict[str, Any], ranks: int, seed: int
) -> None:
    """Whole groups in any order on any rank: also of tokens of equal covariance the same are chosen."""
    samples, current = off_policy_samples(seed, tied=True)
    expected = losses_of([samples], current, name, options)
    rng = np.random.default_rng(seed)
    shuffled = [samples[i] for i in rng.permutation(len(samples))]
    parts = [[s for s in shuffled if int(s.group_id[1:]) % ranks == rank] for rank in range(ranks)]
    assert_same_bits(losses_of(parts, current, name, options), expected)
    assert_same_bits(losses_of([*parts, []], current, name, options), expected)


@pytest.mark.parametrize(("name", "options"), CHOOSING)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_masked_tokens_change_no_loss_of_a_mini_batch(name: str, options: dict[str, Any], seed: int) -> None:
    """Padding: more of them behind each response, and a rollout of nothing else."""
    samples, current = off_policy_samples(seed, tied=False)
    expected = losses_of([samples], current, name, options)
    rng = np.random.default_rng(seed)
    padded = []
    for sample in [*samples, replace(samples[0], rollout_id="g0-pad", loss_mask=samples[0].loss_mask & False)]:
        more = int(rng.integers(1, 5))
        garbage = {
            field: np.concatenate([getattr(sample, field), np.full(more, np.nan, dtype=np.float32)])
            for field in ("old_log_probs", "advantages")
        }
        garbage["weights"] = np.concatenate([sample.weights, np.ones(more, dtype=np.float32)])  # type: ignore[list-item]
        tokens = np.concatenate([sample.token_ids, np.zeros(more, dtype=np.int64)])
        mask = np.concatenate([sample.loss_mask, np.zeros(more, dtype=bool)])
        padded.append(replace(sample, token_ids=tokens, loss_mask=mask, **garbage))
        known = current.get(sample.rollout_id, np.zeros(sample.num_tokens, dtype=np.float32))
        current[sample.rollout_id] = np.concatenate([known, np.full(more, np.inf, dtype=np.float32)])
    found = losses_of([padded], current, name, options)
    for sample in padded:
        loss, slope, _, clipped = (array[~sample.loss_mask] for array in found[sample.rollout_id])
        assert not any(array.any() for array in (loss, slope, clipped))
    for sample in samples:
        for mine, theirs in zip(found[sample.rollout_id], expected[sample.rollout_id], strict=True):
            np.testing.assert_allclose(mine[: sample.num_tokens], theirs, rtol=1e-6)


@pytest.mark.parametrize("noise", [1e-7, -1e-7])
def test_on_policy_the_rounding_of_a_pass_is_no_distance(noise: float) -> None:
    """Old log-probs that another pass over the same weights gave: kl_cov's slope is the policy gradient's alone."""
    samples, current = off_policy_samples(0, tied=False)
    for sample in samples:
        sample.old_log_probs = (current[sample.rollout_id] * (1 + noise)).astype(np.float32)
    log_probs = [[current[sample.rollout_id] for sample in samples]]
    set_losses([samples], log_probs, "kl_cov", {"cov_ratio": 0.2, "kl_coef": 10.0}, on_policy=True)
    for sample in samples:
        expected = np.where(sample.loss_mask, -sample.advantages * sample.weights * sample.token_weight, 0)  # type: ignore[operator]
        np.testing.assert_allclose(sample.loss_slope, expected, rtol=1e-6)  # type: ignore[arg-type]
    assert sum(int(sample.clipped.sum()) for sample in samples) > 1  # type: ignore[union-attr]


def test_on_policy_the_old_log_probs_of_a_mini_batch_are_its_current_ones() -> None:
    """Where their pass was skipped the ratio is 1."""
    samples, current = off_policy_samples(0, tied=False)
    for sample in samples:
        sample.old_log_probs = sample.weights = None
    found = losses_of([samples], current, *CHOOSING[0])
    assert all((ratio == 1).all() for _, _, ratio, _ in found.values())
