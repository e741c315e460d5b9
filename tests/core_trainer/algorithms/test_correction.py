"""Rollout correction against hand-worked numbers and naive loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_trainer.algorithms import correction
from rlinsight.errors import ConfigError

SEEDS = st.integers(0, 2**32 - 1)
WEIGHTS: list[dict[str, Any]] = [
    {"level": level, "normalize": normalize, **treatment}
    for level in ("token", "sequence")
    for normalize in (False, True)
    for treatment in ({"treatment": "truncate", "high": 1.2}, {"treatment": "mask", "low": 0.8, "high": 1.3})
]
REJECTIONS: list[dict[str, Any]] = [
    {"level": "token", "estimator": "k1", "low": -0.1, "high": 0.2},
    {"level": "token", "estimator": "k2", "high": 0.02},
    {"level": "token", "estimator": "k3", "high": 0.02},
    *(
        {"level": "sequence", "estimator": estimator, "reduction": reduction, "high": high}
        for estimator, high in (("k1", 0.1), ("k2", 0.05), ("k3", 0.05))
        for reduction in ("sum", "mean", "max")
    ),
    {"level": "sequence", "estimator": "k1", "reduction": "mean", "low": -0.05, "high": 0.05},
    {"level": "sequence", "estimator": "k1", "reduction": "max", "high": -0.05},  # below 0: masked tokens are no 0
]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """old_log_probs, rollout_log_probs and mask, [B, T]; one rollout may have no loss token."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    old = -rng.exponential(1.0, shape)
    rollout = old + rng.normal(0, 0.3, shape)
    mask = rng.random(shape) < 0.7
    mask[0, 0] = True
    return torch.from_numpy(old), torch.from_numpy(rollout), torch.from_numpy(mask)


def rows(seed: int) -> list[list[float | None]]:
    """Log ratios of the loss tokens; None off the mask."""
    old, rollout, mask = (x.tolist() for x in batch(seed))
    return [
        [o - r if on else None for o, r, on in zip(os, rs, ms, strict=True)]
        for os, rs, ms in zip(old, rollout, mask, strict=True)
    ]


def naive_weights(
    seed: int, level: str, normalize: bool, treatment: str, high: float, low: float = 0.0
) -> list[list[float]]:
    """Rollout by rollout."""
    out, counted = [], []
    for row in rows(seed):
        ratios = [None if d is None else math.exp(d) for d in row]
        if level == "sequence":
            product = math.prod(r for r in ratios if r is not None)
            ratios = [None if r is None else product for r in ratios]
        weights = [
            None if r is None else min(r, high) if treatment == "truncate" else r if low <= r <= high else 0.0
            for r in ratios
        ]
        here = [w for w in weights if w is not None]
        counted += here if level == "token" else here[:1]
        out.append([w or 0.0 for w in weights])
    mean = sum(counted) / len(counted) if normalize else 1.0
    return [[w / mean for w in row] for row in out] if mean > 1e-8 else out


def test_masked_importance_by_hand() -> None:
    """Ratios 0.4, 0.6 | 1.5, 1.5 in [0.5, 2]: by token only 0.4 is outside, by rollout, in [0.2, 2], only 2.25."""
    old = torch.tensor([[0.4, 0.6], [1.5, 1.5]], dtype=torch.float64).log()
    inputs = old, torch.zeros_like(old), torch.ones(2, 2, dtype=torch.bool)
    by_token = correction.importance_weights(*inputs, treatment="mask", low=0.5, high=2.0)
    np.testing.assert_allclose(by_token.weights.numpy(), [[0, 0.6], [1.5, 1.5]], rtol=1e-12)
    assert by_token.metrics["weight_bounded_fraction"] == 1 / 4
    by_rollout = correction.importance_weights(*inputs, level="sequence", treatment="mask", low=0.2, high=2.0)
    np.testing.assert_allclose(by_rollout.weights.numpy(), [[0.24, 0.24], [0, 0]], rtol=1e-12)


@pytest.mark.parametrize("options", WEIGHTS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_weights_equal_a_naive_loop(options: dict[str, Any], seed: int) -> None:
    """By token and by rollout, truncated and masked, normalised and not."""
    got = correction.importance_weights(*batch(seed), **options)
    np.testing.assert_allclose(got.weights.numpy(), naive_weights(seed, **options), atol=1e-12)


def naive_rejection(
    seed: int, level: str, estimator: str, high: float, low: float = -math.inf, reduction: str = "mean"
) -> list[list[bool]]:
    """Rollout by rollout."""
    measure = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[estimator]
    out = []
    for row in rows(seed):
        values = [None if d is None else measure(d) for d in row]
        here = [v for v in values if v is not None]
        if level == "sequence" and here:
            one = {"sum": sum(here), "mean": sum(here) / len(here), "max": max(here)}[reduction]
            values = [None if v is None else one for v in values]
        out.append([v is not None and low <= v <= high for v in values])
    return out


@pytest.mark.parametrize("options", REJECTIONS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_rejection_equals_a_naive_loop(options: dict[str, Any], seed: int) -> None:
    """Every estimator, level and reduction; nothing off the mask is kept."""
    got, expected = correction.reject(*batch(seed), **options), naive_rejection(seed, **options)
    assert got.keep.tolist() == expected
    mask = batch(seed)[2]
    lost = mask & ~got.keep
    assert got.metrics["rejected_token_fraction"] == pytest.approx(float(lost.sum() / mask.sum()))
    assert got.metrics["rejected_rollout_fraction"] == pytest.approx(
        int(lost.any(dim=1).sum()) / int(mask.any(dim=1).sum())
    )


def test_random_rollouts_are_on_both_sides_of_each_bound() -> None:
    """So that the tests above see kept and rejected ones."""
    for options in REJECTIONS:
        results = [(correction.reject(*batch(seed), **options).keep, batch(seed)[2]) for seed in range(20)]
        kept = torch.cat([keep[mask] for keep, mask in results])
        assert 0 < int(kept.sum()) < len(kept), options


def test_metrics_by_hand() -> None:
    """Ratios 2 and 1/2 in one rollout, 1 in another."""
    old = torch.tensor([[math.log(2), -math.log(2)], [-1.0, 0.0]], dtype=torch.float64)
    rollout = torch.tensor([[0.0, 0.0], [-1.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    got = correction.mismatch(old, rollout, mask)
    expected = {
        "k1": 0.0,
        "k3": (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 3,
        "chi2_token": (4 + 0.25 + 1) / 3 - 1,
        "chi2_sequence": 0.0,
        "effective_sample_size": 3.5**2 / (3 * 5.25),
        "perplexity_ratio": 1.0,
    }
    assert got == pytest.approx(expected)
    weights = correction.importance_weights(old, rollout, mask, high=1.5)
    assert weights.weights.tolist() == [[1.5, pytest.approx(0.5)], [1.0, 0.0]]
    assert weights.metrics == pytest.approx(
        {
            "weight_mean": 1.0,
            "weight_bounded_fraction": 1 / 3,
            "weight_effective_sample_size": 9 / (3 * (2.25 + 0.25 + 1)),
        }
    )


def test_no_mismatch_changes_nothing() -> None:
    """Equal log-probs give weights 1, keep all, and measure nothing."""
    old, _, mask = batch(3)
    got = correction.importance_weights(old, old, mask, level="sequence", treatment="mask", normalize=True)
    assert torch.equal(got.weights, mask.double())
    assert torch.equal(correction.reject(old, old, mask, high=0.0).keep, mask)
    measures = correction.mismatch(old, old, mask)
    assert measures == {**dict.fromkeys(measures, 0.0), "effective_sample_size": 1.0, "perplexity_ratio": 1.0}


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_masked_values_change_no_bit(seed: int) -> None:
    """NaN and infinities off the mask are never seen."""
    old, rollout, mask = batch(seed)
    dirty = torch.where(mask, old, math.nan), torch.where(mask, rollout, math.inf), mask
    for level in ("token", "sequence"):
        a = correction.importance_weights(old, rollout, mask, level=level)
        assert torch.equal(correction.importance_weights(*dirty, level=level).weights, a.weights)
        b = correction.reject(old, rollout, mask, level=level, high=0.05)
        assert torch.equal(correction.reject(*dirty, level=level, high=0.05).keep, b.keep)
    assert correction.mismatch(*dirty) == correction.mismatch(old, rollout, mask)


def test_extremes_stay_finite_and_nan_is_rejected() -> None:
    """Log ratios of +-1000 and infinities keep finite weights; a token without a log-prob is not trained on."""
    old = torch.tensor([[0.0, -1000.0, math.nan], [-1000.0, -math.inf, 0.0]])
    rollout = torch.tensor([[-1000.0, 0.0, 0.0], [0.0, 0.0, -math.inf]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert bool(torch.isfinite(correction.importance_weights(old[1:], rollout[1:], mask[1:]).weights).all())
    kept = correction.reject(old, rollout, mask, level="token", estimator="k1", low=-30, high=30).keep
    assert kept.tolist() == [[True, True, False], [True, True, True]]
    assert correction.reject(old, rollout, mask, level="token", high=1.0).keep.tolist() == [[False] * 3] * 2


def test_no_loss_tokens() -> None:
    """Nothing to weigh: zeros, and measures that are unknown rather than 0."""
    old = torch.zeros(2, 3)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert not bool(correction.importance_weights(old, old, mask, normalize=True).weights.any())
    assert not bool(correction.reject(old, old, mask, high=1.0).keep.any())
    assert all(math.isnan(value) for value in correction.mismatch(old, old, mask).values())


def test_bounds_and_options_are_checked() -> None:
    """Bounds that keep nothing, and options a treatment does not have."""
    x = batch(0)
    with pytest.raises(ConfigError, match="keeps nothing between low=1 and high=0"):
        correction.reject(*x, low=1.0, high=0.0)
    with pytest.raises(ConfigError, match="importance 'truncate' has no option 'low'"):
        correction.importance_weights(*x, low=0.5)
