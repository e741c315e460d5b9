"""Aggregations and the value loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_trainer.algorithms import aggregation, registry, values
from rlinsight.errors import ConfigError

LOSSES = torch.tensor([[1.0, 2, 30], [4, 50, 6], [7, 8, 9]])
MASK = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
BY_HAND: dict[str, float] = {
    "token-mean": 13 / 4,
    "token-sum": 13,
    "seq-mean-token-sum": (3 + 10) / 2,
    "seq-mean-token-sum-norm": (3 + 10) / 2 / 5,
    "seq-mean-token-mean": (3 / 2 + 10 / 2) / 2,
}


def options_of(mode: str) -> dict[str, Any]:
    """The constant length where there is one."""
    return {"length": 5} if mode == "seq-mean-token-sum-norm" else {}


@pytest.mark.parametrize("mode", registry.names("aggregation"))
def test_by_hand(mode: str) -> None:
    """The definitions; a rollout without loss tokens counts for nothing."""
    assert aggregation.aggregate(LOSSES, MASK, mode, **options_of(mode)).item() == pytest.approx(BY_HAND[mode])


def test_reference_number_of_averaging_ranks() -> None:
    """token-sum of [[1,2,30],[4,50,6]] on one of 4 ranks whose gradients are averaged: 52."""
    got = aggregation.aggregate(LOSSES[:2], MASK[:2], "token-sum", num_averaging_ranks=4)
    assert got.item() == 52


@pytest.mark.parametrize("mode", registry.names("aggregation"))
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 8))
def test_a_split_changes_nothing(mode: str, lengths: list[int], cut: int) -> None:
    """Weights are fixed over the whole batch, so losses of parts add up to the whole one."""
    rng = np.random.default_rng(len(lengths))
    losses = torch.from_numpy(rng.normal(size=(len(lengths), 6)))
    counts = torch.tensor(lengths)
    mask = torch.arange(6) < counts[:, None]
    weights = aggregation.token_weights(counts, mode, **options_of(mode))
    part = [(losses * mask * weights[:, None])[rows].sum() for rows in (slice(None, cut), slice(cut, None))]
    whole = aggregation.aggregate(losses, mask, mode, **options_of(mode))
    torch.testing.assert_close(part[0] + part[1], whole)


@pytest.mark.parametrize("mode", registry.names("aggregation"))
def test_no_loss_tokens_give_zero(mode: str) -> None:
    """And NaN off the mask is not seen."""
    losses = torch.full((2, 3), math.nan)
    assert aggregation.aggregate(losses, torch.zeros(2, 3, dtype=torch.bool), mode, **options_of(mode)).item() == 0


def test_unknown_modes_and_idle_options_are_refused() -> None:
    """With what there is."""
    with pytest.raises(ConfigError, match="unknown aggregation 'token-men'; did you mean 'token-mean'"):
        aggregation.token_weights(torch.tensor([1]), "token-men")
    with pytest.raises(ConfigError, match="aggregation 'token-mean' has no option 'length'"):
        aggregation.token_weights(torch.tensor([1]), "token-mean", length=3)
    with pytest.raises(ConfigError, match="'seq-mean-token-sum-norm' needs the option 'length'"):
        aggregation.token_weights(torch.tensor([1]), "seq-mean-token-sum-norm")


def test_value_loss_by_hand() -> None:
    """Old 0, clip 0.2: inside, beyond on the far side of the return (cut), beyond on its near side (kept)."""
    new = torch.tensor([0.1, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3), torch.tensor([1.0, 1.0, 0.0])
    loss, clipped = values.value_loss(new, old, returns, clip=0.2)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach().numpy(), [0.5 * 0.81, 0.5 * 0.64, 0.5 * 0.25])
    assert clipped.tolist() == [False, True, False]
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), [-0.9, 0, 0.5], rtol=1e-6)
    plain, none = values.value_loss(new, old, returns, clip=None)
    np.testing.assert_allclose(plain.detach().numpy(), [0.5 * 0.81, 0.5 * 0.25, 0.5 * 0.25])
    assert not bool(none.any())


def test_value_loss_gradient_by_finite_differences() -> None:
    """On both sides of the clip."""
    rng = np.random.default_rng(0)
    new = torch.tensor(rng.normal(size=40), requires_grad=True)
    old, returns = torch.tensor(rng.normal(size=40)), torch.tensor(rng.normal(size=40))
    assert torch.autograd.gradcheck(lambda v: values.value_loss(v, old, returns, clip=0.3)[0], (new,))
