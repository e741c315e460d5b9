"""Advantages against hand-worked numbers, naive loops, and what must not matter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_trainer.algorithms import advantages, registry
from core_trainer.algorithms.numerics import whiten
from rlinsight.errors import ConfigError, TrainingError

SEEDS = st.integers(0, 2**32 - 1)
PER_TOKEN = {"token_rewards", "mask", "values", "old_log_probs", "sum_pi_squared"}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("gae", {"gamma": 0.9, "lam": 0.8}),
    ("gae", {"gamma": 0.9, "lam": 0.8, "whiten": False}),
    ("grpo", {}),
    ("grpo", {"normalize_by_std": False}),
    ("rloo", {}),
    ("reinforce_plus_plus", {"gamma": 0.7}),
    ("reinforce_plus_plus_baseline", {}),
    ("remax", {}),
    ("opo", {}),
    ("gpg", {}),
    ("grpo_pass_at_k", {}),
    ("grpo_pass_at_k", {"normalize_by_std": False}),
    ("gdpo", {}),
    ("optimal_token_baseline", {}),
]


def batch(seed: int) -> dict[str, Tensor]:
    """Every input: 2 to 4 groups of 2 to 4 rollouts, shuffled, of 1 to 7 tokens with gaps in the mask."""
    rng = np.random.default_rng(seed)
    groups = np.concatenate([[name] * rng.integers(2, 5) for name in rng.permutation(9)[: rng.integers(2, 5)]])
    rng.shuffle(groups)
    size, longest = len(groups), int(rng.integers(1, 8))
    mask = rng.random((size, longest)) < 0.7
    mask[np.arange(size), rng.integers(0, longest, size)] = True  # at least one loss token each
    token_rewards = rng.normal(size=(size, longest)) * mask
    pi = rng.uniform(0.05, 0.95, (size, longest))
    inputs = {
        "token_rewards": token_rewards,
        "mask": mask,
        "groups": groups,
        "rewards": np.round(token_rewards.sum(axis=1), 1) * (rng.random(size) < 0.8),
        "values": rng.normal(size=(size, longest)),
        "greedy_rewards": rng.normal(size=size),
        "components": rng.normal(size=(size, 3)),
        "component_weights": np.array([1.0, 0.5, 2.0]),
        "lengths": mask.sum(axis=1),
        "old_log_probs": np.log(pi),
        "sum_pi_squared": pi**2 + rng.uniform(0, 1, (size, longest)) * (1 - pi) ** 2,
    }
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in inputs.items()}


# Hand-worked numbers -------------------------------------------------------------------------------------------------


def test_reference_numbers_of_a_group() -> None:
    """Rewards 1, 0, 0, 1."""
    rewards, groups = torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64)
    for name, options, expected in [
        ("grpo", {}, 0.866024),
        ("grpo", {"normalize_by_std": False}, 0.5),
        ("rloo", {}, 2 / 3),
        ("gpg", {}, 1.0),
    ]:
        got = registry.find("advantage", name).call({"rewards": rewards, "groups": groups}, options)
        wanted = torch.tensor([expected, -expected, -expected, expected], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_grpo_adds_epsilon_to_the_std() -> None:
    """Rewards 1, 1.00001 | 2, 2.00001 tell an added epsilon from a floored variance."""
    rewards = torch.tensor([1.0, 1.00001, 2.0, 2.00001], dtype=torch.float64)
    got = advantages.grpo(rewards, torch.tensor([0, 0, 1, 1]))
    expected = 0.000005 / (0.00001 / math.sqrt(2) + 1e-6)
    np.testing.assert_allclose(got.numpy(), [-expected, expected, -expected, expected], rtol=0, atol=1e-6)


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    """Rewards 1, 0 | 3, 1 are +-0.5 and +-1 about their means, of variance 2.5 / 3 over the four tokens."""
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 1, dtype=torch.bool)
    inputs = {"rewards": rewards, "groups": groups, "mask": mask}
    got = registry.find("advantage", "reinforce_plus_plus_baseline").call(inputs, {})
    np.testing.assert_allclose(got[:, 0].numpy(), [0.547723, -0.547723, 1.095445, -1.095445], rtol=0, atol=1e-6)


def test_reinforce_plus_plus_skips_masked_tokens_without_discount() -> None:
    """gamma 0.5, mask 1, 1, 0, 0, 1, reward 2 on the last token: returns 0.5, 1, 0, 0, 2, then whitened."""
    mask = torch.tensor([[True, True, False, False, True]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 2]])
    got, returns = advantages.reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 1, 0, 0, 2]]
    mean, std = 3.5 / 3, math.sqrt(sum((x - 3.5 / 3) ** 2 for x in (0.5, 1, 2)) / 2 + 1e-8)
    np.testing.assert_allclose(got[0].numpy(), [(0.5 - mean) / std, (1 - mean) / std, 0, 0, (2 - mean) / std])


def test_gae_by_hand() -> None:
    """gamma 0.5, lam 0.5, rewards 0, 1, values 1, 2: d = 0.5 2 - 1 = 0 and 1 - 2 = -1; A = 0.25 (-1) and -1."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]]), mask
    got, returns = advantages.gae(*inputs, gamma=0.5, lam=0.5, whiten=False)
    assert got.tolist() == [[-0.25, -1.0]]
    assert returns.tolist() == [[0.75, 1.0]]
    white, same_returns = advantages.gae(*inputs, gamma=0.5, lam=0.5)
    root = 0.375 / math.sqrt(2 * 0.375**2 + 1e-8)
    np.testing.assert_allclose(white[0].numpy(), [root, -root])
    assert torch.equal(returns, same_returns)


def test_remax_by_hand() -> None:
    """Reward to go 3, 2 against a greedy reward of 1."""
    got, returns = advantages.remax(torch.tensor([[1.0, 2.0]]), torch.tensor([1.0]), torch.ones(1, 2, dtype=torch.bool))
    assert (got.tolist(), returns.tolist()) == ([[2.0, 1.0]], [[3.0, 2.0]])


def test_opo_by_hand() -> None:
    """Rewards 1, 0 of lengths 1, 3: baseline 1/4."""
    got = advantages.opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3]))
    assert got.tolist() == [0.75, -0.25]


def test_pass_at_k_by_hand() -> None:
    """Rewards 3, 1, 0: only the best learns, by 2 over the std of 1.527525; a tie for best leaves nothing."""
    rewards = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    got = advantages.grpo_pass_at_k(rewards, groups)
    np.testing.assert_allclose(got.numpy(), [0, 2 / (1.527525231651947 + 1e-6), 0, 0, 0, 0])
    assert advantages.grpo_pass_at_k(rewards, groups, normalize_by_std=False).tolist() == [0, 2, 0, 0, 0, 0]


def test_optimal_token_baseline_by_hand() -> None:
    """Two rollouts of rewards 1 and 0, gradient norms 1, 1 and 1, 3; the third token has no peer, so no baseline."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5]])
    old = torch.full((2, 3), math.log(0.5), dtype=torch.float64)  # 1 - 2 pi = 0, so the norms are sum_pi_squared
    squared = torch.tensor([[1.0, 1.0, 9.0], [1.0, 3.0, 1.0]])
    got, returns = advantages.optimal_token_baseline(rewards, mask, torch.tensor([4, 4]), old, squared)
    assert returns.tolist() == [[1, 1, 0], [0.5, 0.5, 0.5]]
    first, second = (1 + 0.5) / 2, (2 * 1 + 4 * 0.5) / 6
    expected = [[1 - first, 1 - second, 0], [0.5 - first, 0.5 - second, 0.5]]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-8)


def test_whiten_of_one_value_and_of_none() -> None:
    """One value alone becomes 0, and an empty mask gives zeros."""
    assert whiten(torch.tensor([[3.0, 7.0]]), torch.tensor([[True, False]])).tolist() == [[0, 0]]
    assert whiten(torch.tensor([[3.0, 7.0]]), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0, 0]]


# Naive loops ---------------------------------------------------------------------------------------------------------


def members(x: dict[str, Tensor]) -> dict[int, list[int]]:
    """Rows of each group."""
    rows = defaultdict(list)
    for row, group in enumerate(x["groups"].tolist()):
        rows[group].append(row)
    return rows


def std(values: list[float]) -> float:
    """Sample std."""
    centre = sum(values) / len(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def per_group(x: dict[str, Tensor], rule: Callable[[list[float], int, list[int]], float]) -> list[float]:
    """rule(rewards of the group, index in it, rows of the group) for every rollout."""
    rewards, out = x["rewards"].tolist(), [0.0] * len(x["rewards"])
    for rows in members(x).values():
        for i, row in enumerate(rows):
            out[row] = rule([rewards[r] for r in rows], i, rows)
    return out


def over_tokens(x: dict[str, Tensor], row_values: list[float]) -> list[list[float]]:
    """A value of each rollout at its loss tokens."""
    return [[v if on else 0.0 for on in row] for v, row in zip(row_values, x["mask"].tolist(), strict=True)]


def white(x: dict[str, Tensor], values: list[list[float]]) -> list[list[float]]:
    """Whitened over the mask."""
    mask = x["mask"].tolist()
    chosen = [v for vs, ms in zip(values, mask, strict=True) for v, m in zip(vs, ms, strict=True) if m]
    centre = sum(chosen) / len(chosen)
    scale = math.sqrt(sum((v - centre) ** 2 for v in chosen) / (len(chosen) - 1) + 1e-8)
    return [
        [(v - centre) / scale if m else 0.0 for v, m in zip(vs, ms, strict=True)]
        for vs, ms in zip(values, mask, strict=True)
    ]


def to_go(x: dict[str, Tensor], gamma: float) -> list[list[float]]:
    """Discounted sum of what the loss tokens from here on got."""
    out = []
    for rewards, mask in zip(x["token_rewards"].tolist(), x["mask"].tolist(), strict=True):
        positions = [t for t, on in enumerate(mask) if on]
        row = [0.0] * len(mask)
        for i, t in enumerate(positions):
            row[t] = sum(gamma ** (j - i) * rewards[positions[j]] for j in range(i, len(positions)))
        out.append(row)
    return out


def naive_gae(x: dict[str, Tensor], gamma: float, lam: float, whiten: bool = True) -> tuple[Any, Any]:
    """The sum over future errors, written out."""
    got, returns = [], []
    for rewards, values, mask in zip(*(x[k].tolist() for k in ("token_rewards", "values", "mask")), strict=True):
        positions = [t for t, on in enumerate(mask) if on]
        v = [values[t] for t in positions] + [0.0]
        deltas = [rewards[t] + gamma * v[i + 1] - v[i] for i, t in enumerate(positions)]
        row, back = [0.0] * len(mask), [0.0] * len(mask)
        for i, t in enumerate(positions):
            row[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas)))
            back[t] = row[t] + values[t]
        got.append(row)
        returns.append(back)
    return (white(x, got) if whiten else got), returns


def naive_grpo(rewards: list[float], i: int, normalize_by_std: bool = True) -> float:
    centred = rewards[i] - sum(rewards) / len(rewards)
    return centred / (std(rewards) + 1e-6) if normalize_by_std else centred


def naive_pass_at_k(rewards: list[float], i: int, normalize_by_std: bool = True) -> float:
    best, second = sorted(rewards, reverse=True)[:2]
    if rewards[i] < best or best == second:
        return 0.0
    return (best - second) / (std(rewards) + 1e-6) if normalize_by_std else best - second


def naive_gdpo(x: dict[str, Tensor]) -> list[list[float]]:
    total = [0.0] * len(x["groups"])
    for weight, scores in zip(x["component_weights"].tolist(), x["components"].T.tolist(), strict=True):
        for rows in members(x).values():
            for i, row in enumerate(rows):
                total[row] += weight * naive_grpo([scores[r] for r in rows], i)
    return white(x, over_tokens(x, total))


def naive_otb(x: dict[str, Tensor]) -> tuple[Any, Any]:
    """Position by position of each group."""
    returns, mask = to_go(x, 1.0), x["mask"].tolist()
    out = [[0.0] * len(row) for row in mask]
    norms = (1 - 2 * x["old_log_probs"].exp() + x["sum_pi_squared"]).tolist()
    weight = [
        [sum(n for n, on in zip(ns[: t + 1], ms[: t + 1], strict=True) if on) for t in range(len(ms))]
        for ns, ms in zip(norms, mask, strict=True)
    ]
    for rows in members(x).values():
        for t in range(len(mask[0])):
            here = [r for r in rows if mask[r][t]]
            going_on = [r for r in rows if any(mask[r][t:])]
            baseline = 0.0
            if len(going_on) > 1:
                baseline = sum(returns[r][t] * weight[r][t] for r in here) / (sum(weight[r][t] for r in here) + 1e-8)
            for r in here:
                out[r][t] = returns[r][t] - baseline
    return out, returns


NAIVE: dict[str, Callable[..., Any]] = {
    "gae": naive_gae,
    "grpo": lambda x, **o: per_group(x, lambda r, i, _: naive_grpo(r, i, **o)),
    "rloo": lambda x: per_group(x, lambda r, i, _: r[i] - (sum(r) - r[i]) / (len(r) - 1)),
    "reinforce_plus_plus": lambda x, gamma: (white(x, to_go(x, gamma)), to_go(x, gamma)),
    "reinforce_plus_plus_baseline": lambda x: white(
        x, over_tokens(x, per_group(x, lambda r, i, _: r[i] - sum(r) / len(r)))
    ),
    "remax": lambda x: (
        [
            [g - greedy if on else 0.0 for g, on in zip(gs, ms, strict=True)]
            for gs, ms, greedy in zip(to_go(x, 1.0), x["mask"].tolist(), x["greedy_rewards"].tolist(), strict=True)
        ],
        to_go(x, 1.0),
    ),
    "opo": lambda x: per_group(
        x,
        lambda r, i, rows: (
            r[i]
            - sum(float(x["lengths"][row]) * v for row, v in zip(rows, r, strict=True))
            / sum(float(x["lengths"][row]) for row in rows)
        ),
    ),
    "gpg": lambda x: per_group(
        x,
        lambda r, i, _: (
            len(x["rewards"]) / max(sum(v != 0 for v in x["rewards"].tolist()), 1) * (r[i] - sum(r) / len(r))
        ),
    ),
    "grpo_pass_at_k": lambda x, **o: per_group(x, lambda r, i, _: naive_pass_at_k(r, i, **o)),
    "gdpo": naive_gdpo,
    "optimal_token_baseline": naive_otb,
}


def test_every_advantage_is_tested() -> None:
    """The lists here name all that are built in."""
    assert set(NAIVE) == {name for name, _ in OPTIONS} == set(registry.names("advantage"))


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_equals_a_naive_loop(name: str, options: dict[str, Any], seed: int) -> None:
    """Plain Python, rollout by rollout, gives the same advantages and returns."""
    x = batch(seed)
    got, returns = advantages.compute(name, x, options)
    expected = NAIVE[name](x, **options)
    expected, naive_returns = expected if isinstance(expected, tuple) else (expected, None)
    if not isinstance(expected[0], list):
        expected = over_tokens(x, expected)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-9)
    assert (returns is None) == (naive_returns is None)
    if returns is not None and naive_returns is not None:
        np.testing.assert_allclose(returns.numpy(), naive_returns, atol=1e-9)


# What must not matter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_order_of_rollouts_does_not_matter(name: str, options: dict[str, Any], seed: int) -> None:
    """Shuffled rollouts get the same advantages."""
    x = batch(seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x["groups"])))
    shuffled = {k: v if k == "component_weights" else v[order] for k, v in x.items()}
    torch.testing.assert_close(
        advantages.compute(name, shuffled, options)[0], advantages.compute(name, x, options)[0][order]
    )


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_padding_and_masked_values_change_no_bit(name: str, options: dict[str, Any], seed: int) -> None:
    """More columns of padding, and NaN or anything else on every position off the mask, change nothing at all."""
    x = batch(seed)
    width = x["mask"].shape[1]
    got, returns = advantages.compute(name, x, options)
    wider = {}
    for key, value in x.items():
        wider[key] = value
        if key in PER_TOKEN:
            garbage = torch.full((len(value), 3), math.nan if value.is_floating_point() else 0).to(value.dtype)
            wider[key] = torch.cat([value, garbage], dim=1)
            if value.is_floating_point():
                wider[key][:, :width][~x["mask"]] = math.inf
    padded, padded_returns = advantages.compute(name, wider, options)
    assert torch.equal(padded[:, :width], got)
    assert bool((padded[:, width:] == 0).all())
    if returns is not None and padded_returns is not None:
        assert torch.equal(padded_returns[:, :width], returns)


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_pass_at_k", "gdpo"]
)
def test_a_group_of_one_is_refused(name: str) -> None:
    """A lone rollout has nothing to be compared with; the message names its group."""
    x = batch(1)
    x["groups"] = x["groups"].clone()
    x["groups"][0] = 77
    with pytest.raises(ConfigError, match=r"group 77 has one rollout.*group_size >= 2"):
        advantages.compute(name, x, {})


def test_equal_rewards_have_no_advantage() -> None:
    """A group without variance gives next to nothing rather than an infinity."""
    got = advantages.grpo(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64))
    assert float(got.abs().max()) < 1e-9


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    """The message names the function and the rollout."""
    x = batch(2)
    x["rewards"][1] = math.nan
    with pytest.raises(TrainingError, match="advantage 'grpo' gave rollout"):
        advantages.compute("grpo", x, {})
