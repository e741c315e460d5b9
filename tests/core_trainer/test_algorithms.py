"""Algorithms against hand-worked numbers and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_trainer.algorithms import advantages, aggregation, kl, policy_losses


def test_grpo_reference_numbers() -> None:
    """r = 1, 0, 0, 1 gives -+0.866024 with std and -+0.5 without; two groups do not mix."""
    rewards = torch.tensor([1.0, 0, 0, 1])
    groups = torch.zeros(4, dtype=torch.int64)
    expected = torch.tensor([0.866024, -0.866024, -0.866024, 0.866024], dtype=torch.float64)
    torch.testing.assert_close(advantages.grpo(rewards, groups), expected, atol=1e-6, rtol=0)
    plain = advantages.grpo(rewards, groups, normalize_by_std=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_grpo_adds_epsilon_to_the_std() -> None:
    """Rewards 1, 1.00001 | 2, 2.00001 tell an added epsilon from a floored variance."""
    rewards = torch.tensor([1.0, 1.00001, 2.0, 2.00001], dtype=torch.float64)
    got = advantages.grpo(rewards, torch.tensor([0, 0, 1, 1]))
    std = 0.00001 / math.sqrt(2)
    expected = 0.000005 / (std + 1e-6)
    np.testing.assert_allclose(got.numpy(), [-expected, expected, -expected, expected], rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=5), st.randoms())
def test_grpo_equals_a_naive_loop_in_any_order(groups: list[list[float]], random) -> None:
    """Group by group with plain Python gives the same, however the rollouts are shuffled."""
    rows = [(g, reward) for g, rewards in enumerate(groups) for reward in rewards]
    random.shuffle(rows)
    got = advantages.grpo(torch.tensor([r for _, r in rows], dtype=torch.float64), torch.tensor([g for g, _ in rows]))
    for (group, reward), value in zip(rows, got.tolist(), strict=True):
        rewards = groups[group]
        centre = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - centre) ** 2 for r in rewards) / (len(rewards) - 1))
        assert value == pytest.approx((reward - centre) / (std + 1e-6), abs=1e-6)


def test_grpo_refuses_a_group_of_one() -> None:
    """A lone rollout has no advantage."""
    with pytest.raises(ValueError, match="group 1 has one rollout"):
        advantages.grpo(torch.tensor([1.0, 0, 1]), torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped"),
    [
        (1, 1.5, -1.2, True),
        (1, 0.5, -0.5, False),
        (-1, 1.5, 1.5, False),
        (-1, 0.5, 0.8, True),
        (-1, 4, 3, True),
        (1, 1.0, -1.0, False),
    ],
)
def test_ppo_clip_reference_numbers(advantage: float, ratio: float, loss: float, clipped: bool) -> None:
    """(A, rho) to loss with bounds 0.2 and dual clip 3; clipped exactly when the gradient is zero."""
    log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    value, rho, cut = policy_losses.ppo_clip(log_probs, old, torch.tensor([float(advantage)]), 0.2, 0.2, 3.0)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert rho.item() == pytest.approx(ratio)
    assert bool(cut) is clipped
    assert (log_probs.grad.item() == 0) is clipped  # type: ignore[union-attr]


def test_ppo_clip_gradient_by_finite_differences() -> None:
    """The gradient is the loss's own, in float64, on both sides of each bound."""
    rng = np.random.default_rng(0)
    log_probs = torch.tensor(rng.normal(0, 0.5, 40), requires_grad=True)
    old, signs = torch.tensor(rng.normal(0, 0.5, 40)), torch.tensor(rng.normal(size=40))
    assert torch.autograd.gradcheck(
        lambda x: policy_losses.ppo_clip(x, old, signs, 0.2, 0.3, 3.0)[0], (log_probs,), atol=1e-6
    )


def test_ppo_clip_survives_extreme_ratios() -> None:
    """A log ratio of 1000 gives a finite loss and gradient."""
    log_probs = torch.tensor([1000.0, -1000.0], requires_grad=True)
    loss, _, _ = policy_losses.ppo_clip(log_probs, torch.zeros(2), torch.tensor([-1.0, 1.0]), 0.2, 0.2, None)
    loss.sum().backward()
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(log_probs.grad).all())  # type: ignore[arg-type]


def test_kl_reference_numbers() -> None:
    """k2 and k3 at log_probs -1, ref -1.5."""
    a, b = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl.k2(a, b).item() == pytest.approx(0.125)
    assert kl.k3(a, b).item() == pytest.approx(0.106531, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_losses_pull_towards_the_reference(estimator: str) -> None:
    """Both are zero with zero gradient at equality, and their gradient points back to the reference elsewhere."""
    x = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    kl.ESTIMATORS[estimator](x, torch.full((3,), -1.0)).sum().backward()
    assert [float(v) for v in torch.sign(x.grad)] == [0.0, 1.0, -1.0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 30 + 4 + 6) / 5),
        ("seq-mean-token-mean", ((1 + 2 + 30) / 3 + (4 + 6) / 2) / 2),
        ("seq-mean-token-sum", ((1 + 2 + 30) + (4 + 6)) / 2),
    ],
)
def test_aggregation_by_hand(mode: str, expected: float) -> None:
    """Weighted sums over [[1,2,30],[4,6]] equal the definitions; an empty rollout counts for nothing."""
    weights = aggregation.token_weights(torch.tensor([3, 2, 0]), mode)
    total = weights[0] * (1 + 2 + 30) + weights[1] * (4 + 6)
    assert total.item() == pytest.approx(expected)


def test_unknown_aggregation_is_an_error() -> None:
    """No silent default."""
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        aggregation.token_weights(torch.tensor([1]), "mean")
