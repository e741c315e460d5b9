"""Policy losses against hand-worked numbers, naive loops, finite differences, and what must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_trainer.algorithms import policy_losses, registry
from core_trainer.algorithms.aggregation import token_weights
from core_trainer.algorithms.registry import TokenLoss

SEEDS = st.integers(0, 2**32 - 1)
# Bounds that random tokens fall on both sides of.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.3}),
    ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.3}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("gmpo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("dppo_tv", {"bound_low": 0.05, "bound_high": 0.1, "max_ratio": 1.2}),
    ("dppo_kl", {"bound_low": 0.02, "bound_high": 0.03, "max_ratio": 1.2}),
    ("dro", {"beta": 0.3}),
    ("gpg", {}),
    ("reinforce", {}),
    ("clip_cov", {"cov_ratio": 0.2, "cov_low": 0.05, "cov_high": 1.0}),
    ("kl_cov", {"cov_ratio": 0.2, "kl_coef": 0.7}),
]
WHOLE_MINI_BATCH = {"clip_cov", "kl_cov"}  # choose tokens by statistics of them all
SPLITTABLE = [(name, options) for name, options in OPTIONS if name not in WHOLE_MINI_BATCH]


def batch(seed: int) -> dict[str, Tensor]:
    """2 to 5 rollouts of 1 to 8 tokens, flat, float64; some tokens masked, one rollout possibly wholly."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(2, 6))
    size = int(lengths.sum())
    old = -rng.exponential(1.0, size) - 0.01
    current = np.minimum(old + rng.normal(0, 0.4, size), -0.001)
    advantages = np.repeat(rng.normal(size=len(lengths)), lengths) + rng.normal(0, 0.1, size)
    mask = rng.random(size) < 0.8
    mask[0] = True
    return {
        "log_probs": torch.from_numpy(current),
        "old_log_probs": torch.from_numpy(old),
        "advantages": torch.from_numpy(advantages),
        "mask": torch.from_numpy(mask),
        "sequences": torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
    }


def gradient(x: dict[str, Tensor], name: str, options: dict[str, Any], weights: Tensor) -> tuple[TokenLoss, Tensor]:
    """The loss of each token, and the gradient of their weighted sum to log_probs."""
    live = x["log_probs"].clone().requires_grad_()
    result = policy_losses.compute(name, {**x, "log_probs": live}, options)
    (result.loss * weights).sum().backward()
    assert live.grad is not None
    return result, live.grad


# Hand-worked numbers -------------------------------------------------------------------------------------------------


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
    x = {
        "log_probs": torch.tensor([math.log(ratio)], dtype=torch.float64),
        "old_log_probs": torch.zeros(1, dtype=torch.float64),
        "advantages": torch.tensor([float(advantage)]),
        "mask": torch.tensor([True]),
    }
    result, grad = gradient(x, "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, torch.ones(1))
    assert result.loss.item() == pytest.approx(loss)
    assert result.ratio.item() == pytest.approx(ratio)
    assert bool(result.clipped) is clipped
    assert (grad.item() == 0) is clipped


def test_dro_reference_number() -> None:
    """Mean over two loss tokens, beta 0.05: 0.126."""
    x = {
        "log_probs": torch.tensor([-0.8, -0.9, -0.1]),
        "old_log_probs": torch.tensor([-1, -0.7, -0.2]),
        "advantages": torch.tensor([2, -1.5, 9]),
        "mask": torch.tensor([True, True, False]),
    }
    loss = policy_losses.compute("dro", x, {"beta": 0.05}).loss
    assert loss.sum().item() / 2 == pytest.approx(0.126, abs=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    """Ratios 2 and 0.5 with bounds 0.9 and 1.2: weights 1.2 and 0.9 on the log-probs' gradient."""
    x = {
        "log_probs": torch.tensor([math.log(2), math.log(0.5)], dtype=torch.float64),
        "old_log_probs": torch.zeros(2, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.tensor([True, True]),
    }
    result, grad = gradient(x, "cispo", {"clip_low": 0.1, "clip_high": 0.2}, torch.ones(2))
    np.testing.assert_allclose(result.loss.detach().numpy(), [-1.2 * math.log(2), 0.9 * math.log(0.5)])
    np.testing.assert_allclose(grad.numpy(), [-1.2, 0.9])
    assert result.clipped.tolist() == [True, True]


def test_gspo_is_one_ratio_a_rollout() -> None:
    """Log ratios 0.3 and 0.1 make the ratio exp(0.2) for both tokens; each token has its gradient by itself."""
    x = {
        "log_probs": torch.tensor([-0.7, -0.9, -1.0], dtype=torch.float64),
        "old_log_probs": torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
        "advantages": torch.tensor([-1.0, -1.0, 1.0]),
        "mask": torch.ones(3, dtype=torch.bool),
        "sequences": torch.tensor([0, 0, 1]),
    }
    result, grad = gradient(x, "gspo", {}, torch.ones(3))
    np.testing.assert_allclose(result.ratio.numpy(), [math.exp(0.2), math.exp(0.2), 1])
    np.testing.assert_allclose(grad.numpy(), [math.exp(0.2), math.exp(0.2), -1])


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    """A 2, log ratios 0.6 (cut to 0.4) and -0.8 (free): the loss of both tokens is -2 exp(-0.2)."""
    x = {
        "log_probs": torch.tensor([-0.4, -1.8], dtype=torch.float64),
        "old_log_probs": torch.tensor([-1.0, -1.0], dtype=torch.float64),
        "advantages": torch.tensor([2.0, 2.0]),
        "mask": torch.ones(2, dtype=torch.bool),
        "sequences": torch.zeros(2, dtype=torch.int64),
    }
    result, grad = gradient(x, "gmpo", {}, torch.full((2,), 0.5))
    np.testing.assert_allclose(result.loss.detach().numpy(), [-2 * math.exp(-0.2)] * 2)
    np.testing.assert_allclose(grad.numpy(), [0, -math.exp(-0.2)])
    assert result.clipped.tolist() == [True, False]


def test_sapo_by_hand() -> None:
    """At ratio 1 the gate is 4 / tau sigmoid(0) = 2, the gradient -A; ratio 2 with A = -1: 4 / 1.05 sigmoid(1.05)."""
    x = {
        "log_probs": torch.tensor([0.5, 0.4], dtype=torch.float64).log(),
        "old_log_probs": torch.tensor([0.5, 0.2], dtype=torch.float64).log(),
        "advantages": torch.tensor([2.0, -1.0]),
        "mask": torch.ones(2, dtype=torch.bool),
    }
    result, grad = gradient(x, "sapo", {}, torch.ones(2))
    np.testing.assert_allclose(result.loss.detach().numpy(), [-4, 2.822000], rtol=0, atol=1e-6)
    np.testing.assert_allclose(grad.numpy(), [-2, 4 * 0.740775 * 0.259225 * 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "current", "old", "advantage", "loss"),
    [
        ("dppo_tv", {}, 0.6, 0.5, 1.0, 0.612991),  # rose by 0.1: -1.2 ln 0.6
        ("dppo_tv", {}, 0.69, 0.5, 1.0, 0.512068),  # by 0.19: -1.38 ln 0.69
        ("dppo_tv", {}, 0.71, 0.5, 1.0, 0.0),  # by 0.21
        ("dppo_tv", {}, 0.8, 0.5, -1.0, -0.357030),  # moves back: 1.6 ln 0.8
        ("dppo_tv", {"max_ratio": 10.0}, 0.2, 0.01, 1.0, 16.094379),  # ratio 20: -10 ln 0.2
        ("dppo_kl", {}, 0.6, 0.5, 1.0, 0.612991),  # 0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4) = 0.0204
        ("dppo_kl", {}, 0.65, 0.5, 1.0, 0.560018),  # 0.0472: -1.3 ln 0.65
        ("dppo_kl", {}, 0.66, 0.5, 1.0, 0.0),  # 0.0540
        ("dppo_kl", {}, 0.66, 0.5, -1.0, -0.548480),  # moves back: 1.32 ln 0.66
    ],
)
def test_dppo_by_hand(
    name: str, options: dict[str, float], current: float, old: float, advantage: float, loss: float
) -> None:
    """One token's probability, by hand: inside its region -A rho log pi, outside nothing."""
    x = {
        "log_probs": torch.tensor([current], dtype=torch.float64).log(),
        "old_log_probs": torch.tensor([old], dtype=torch.float64).log(),
        "advantages": torch.tensor([advantage]),
        "mask": torch.ones(1, dtype=torch.bool),
    }
    assert policy_losses.compute(name, x, options).loss.item() == pytest.approx(loss, abs=1e-6)


def test_dppo_cuts_only_tokens_that_move_away() -> None:
    """Probability 0.5 to 0.8 with A > 0 is cut, with A < 0 it is coming back; and the other way round for a fall."""
    for name in ("dppo_tv", "dppo_kl"):
        x = {
            "log_probs": torch.tensor([0.8, 0.8, 0.2, 0.2], dtype=torch.float64).log(),
            "old_log_probs": torch.full((4,), 0.5, dtype=torch.float64).log(),
            "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
            "mask": torch.ones(4, dtype=torch.bool),
        }
        assert policy_losses.compute(name, x, {}).clipped.tolist() == [True, False, False, True]


def test_clip_cov_cuts_the_highest_of_the_band() -> None:
    """Covariances -1, 1, 4, -1, 1, 4 about mean 0 and a band of 0.5 to 3: one of those of 1 is cut, no other."""
    advantages = torch.tensor([1.0, 1.0, 2.0, -1.0, -1.0, -2.0], dtype=torch.float64)
    log_probs = torch.tensor([-1.0, 1.0, 2.0, 1.0, -1.0, -2.0], dtype=torch.float64)
    x = {"log_probs": log_probs, "old_log_probs": log_probs, "advantages": advantages, "mask": torch.ones(6).bool()}
    options = {"cov_low": 0.5, "cov_high": 3.0}
    result, grad = gradient(x, "clip_cov", options, torch.ones(6))
    assert result.clipped.tolist() == [False, True, False, False, False, False]
    assert grad.tolist() == [-1, 0, -2, 1, 1, 2]
    both = policy_losses.compute("clip_cov", x, {**options, "cov_ratio": 0.5})
    assert both.clipped.tolist() == [False, True, False, False, True, False]


def test_kl_cov_penalises_the_highest_covariance() -> None:
    """One token of two, the one of higher covariance, pays kl_coef |log ratio|."""
    x = {
        "log_probs": torch.tensor([-1.0, -1.0, -3.0], dtype=torch.float64),
        "old_log_probs": torch.tensor([-1.2, -0.9, -3.0], dtype=torch.float64),
        "advantages": torch.tensor([3.0, 0.0, 0.0]),
        "mask": torch.ones(3, dtype=torch.bool),
    }
    result = policy_losses.compute("kl_cov", x, {"kl_coef": 2.0})
    np.testing.assert_allclose(result.loss.numpy(), [-3 * math.exp(0.2) + 2 * 0.2, 0, 0], atol=1e-12)
    assert result.clipped.tolist() == [True, False, False]


# Naive loops: ``x`` is what the gradient flows to, ``f`` is what stop-gradients freeze -------------------------------


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(x: float, old: float, a: float, low: float, high: float) -> float:
    rho = math.exp(x - old)
    return max(-a * rho, -a * clip(rho, 1 - low, 1 + high))


def naive_ppo(i: int, d: Data, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> float:
    loss = ppo(d.x[i], d.old[i], d.a[i], clip_low, clip_high)
    return min(loss, -d.a[i] * dual_clip) if dual_clip is not None and d.a[i] < 0 else loss


def naive_gspo(i: int, d: Data, clip_low: float, clip_high: float) -> float:
    rows = d.rollout(i)
    mean = sum(d.f[j] - d.old[j] for j in rows) / len(rows)
    return ppo(d.x[i] - d.f[i] + mean, 0.0, d.a[i], clip_low, clip_high)


def naive_cispo(i: int, d: Data, clip_low: float, clip_high: float) -> float:
    return -clip(math.exp(d.f[i] - d.old[i]), 1 - clip_low, 1 + clip_high) * d.a[i] * d.x[i]


def naive_gmpo(i: int, d: Data, clip_low: float, clip_high: float) -> float:
    rows, total = d.rollout(i), 0.0
    for j in rows:
        log_ratio = d.x[j] - d.old[j]
        total += min(log_ratio, clip_high) if d.a[j] > 0 else max(log_ratio, -clip_low)
    return -sum(d.a[j] for j in rows) / len(rows) * math.exp(total / len(rows))


def naive_sapo(i: int, d: Data, tau_pos: float, tau_neg: float) -> float:
    tau = tau_pos if d.a[i] > 0 else tau_neg
    return -d.a[i] * 4 / tau / (1 + math.exp(-tau * (math.exp(d.x[i] - d.old[i]) - 1)))


def naive_dppo_tv(i: int, d: Data, bound_low: float, bound_high: float, max_ratio: float) -> float:
    rise = math.exp(d.f[i]) - math.exp(d.old[i])
    inside = rise <= bound_high if d.a[i] > 0 else -rise <= bound_low
    return -d.a[i] * min(math.exp(d.f[i] - d.old[i]), max_ratio) * d.x[i] if inside else 0.0


def naive_dppo_kl(i: int, d: Data, bound_low: float, bound_high: float, max_ratio: float) -> float:
    p, old = math.exp(d.f[i]), math.exp(d.old[i])
    distance = old * (d.old[i] - d.f[i]) + (1 - old) * math.log((1 - old + 1e-8) / (1 - p + 1e-8))
    inside = p <= old or distance <= bound_high if d.a[i] > 0 else p >= old or distance <= bound_low
    return -d.a[i] * min(math.exp(d.f[i] - d.old[i]), max_ratio) * d.x[i] if inside else 0.0


def naive_clip_cov(i: int, d: Data, cov_ratio: float, cov_low: float, cov_high: float) -> float:
    def is_clipped(j: int) -> bool:
        rho = math.exp(d.f[j] - d.old[j])
        return -d.a[j] * clip(rho, 0.8, 1.2) > -d.a[j] * rho

    tokens, covariance = d.loss_tokens(), d.covariance()
    band = [j for j in tokens if not is_clipped(j) and cov_low < covariance[j] < cov_high]
    cut = sorted(band, key=lambda j: -covariance[j])[: max(1, int(cov_ratio * len(tokens)))]
    return 0.0 if i in cut else ppo(d.x[i], d.old[i], d.a[i], 0.2, 0.2)


def naive_kl_cov(i: int, d: Data, cov_ratio: float, kl_coef: float) -> float:
    tokens, covariance = d.loss_tokens(), d.covariance()
    chosen = sorted(tokens, key=lambda j: -covariance[j])[: max(1, int(cov_ratio * len(tokens)))]
    penalty = kl_coef * abs(d.x[i] - d.old[i]) if i in chosen else 0.0
    return -d.a[i] * math.exp(d.x[i] - d.old[i]) + penalty


class Data:
    """A batch as lists, with live (x) and frozen (f) log-probs."""

    def __init__(self, batch: dict[str, Tensor], live: Tensor) -> None:
        self.x, self.f = live.tolist(), batch["log_probs"].tolist()
        self.old, self.a = batch["old_log_probs"].tolist(), batch["advantages"].tolist()
        self.mask, self.sequences = batch["mask"].tolist(), batch["sequences"].tolist()

    def loss_tokens(self) -> list[int]:
        return [j for j, on in enumerate(self.mask) if on]

    def rollout(self, i: int) -> list[int]:
        return [j for j in self.loss_tokens() if self.sequences[j] == self.sequences[i]]

    def covariance(self) -> list[float]:
        tokens = self.loss_tokens()
        mean_x, mean_a = (sum(v[j] for j in tokens) / len(tokens) for v in (self.f, self.a))
        return [(x - mean_x) * (a - mean_a) for x, a in zip(self.f, self.a, strict=True)]


NAIVE: dict[str, Callable[..., float]] = {
    "ppo_clip": naive_ppo,
    "gspo": naive_gspo,
    "cispo": naive_cispo,
    "gmpo": naive_gmpo,
    "sapo": naive_sapo,
    "dppo_tv": naive_dppo_tv,
    "dppo_kl": naive_dppo_kl,
    "dro": lambda i, d, beta: -(d.a[i] * d.x[i] - beta / 2 * (d.x[i] - d.old[i]) ** 2),
    "gpg": lambda i, d: -d.a[i] * d.x[i],
    "reinforce": lambda i, d: -d.a[i] * d.x[i],
    "clip_cov": naive_clip_cov,
    "kl_cov": naive_kl_cov,
}


def naive_losses(x: dict[str, Tensor], live: Tensor, name: str, options: dict[str, Any]) -> np.ndarray:
    """Losses of all tokens with stop-gradients frozen at ``x``."""
    data = Data(x, live)
    return np.array([NAIVE[name](i, data, **options) if on else 0.0 for i, on in enumerate(data.mask)])


def test_every_policy_loss_is_tested() -> None:
    """The lists here name all that are built in."""
    assert set(NAIVE) == {name for name, _ in OPTIONS} == set(registry.names("policy_loss"))


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_equals_a_naive_loop(name: str, options: dict[str, Any], seed: int) -> None:
    """Plain Python, token by token, gives the same losses."""
    x = batch(seed)
    got = policy_losses.compute(name, x, options).loss
    np.testing.assert_allclose(got.numpy(), naive_losses(x, x["log_probs"], name, options), atol=1e-9)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_gradient_by_finite_differences(name: str, options: dict[str, Any], seed: int) -> None:
    """Central differences of the naive loss, stop-gradients held fixed, inside and outside the bounds."""
    x, step = batch(seed), 1e-6
    weights = torch.from_numpy(np.random.default_rng(seed).uniform(0.5, 1.5, len(x["mask"])))
    _, grad = gradient(x, name, options, weights)
    for i in range(len(grad)):
        nudge = torch.zeros_like(grad)
        nudge[i] = step
        up, down = (naive_losses(x, x["log_probs"] + sign * nudge, name, options) for sign in (1, -1))
        assert grad[i].item() == pytest.approx(float(((up - down) * weights.numpy()).sum()) / (2 * step), abs=1e-6)


def test_random_tokens_are_on_both_sides_of_each_bound() -> None:
    """So that the tests above see clipped and free tokens of every loss that has bounds."""
    for name, options in OPTIONS:
        if name in ("sapo", "dro", "gpg", "reinforce"):
            continue
        results = [(policy_losses.compute(name, x, options).clipped, x["mask"]) for x in map(batch, range(5))]
        clipped = torch.cat([cut[mask] for cut, mask in results])
        assert 0 < int(clipped.sum()) < len(clipped), name


WHOLE = 16  # float64 numbers: one turn of torch's loops over two AVX-512 registers

# What must not matter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_masked_tokens_change_no_bit(name: str, options: dict[str, Any], seed: int) -> None:
    """NaN or infinity on every masked position, more of them too: same losses and gradients, 0 on the masked.

    Masked tokens fill up the last vector: of what is left over torch takes exponentials one by one, a bit apart.
    """
    x = batch(seed)
    missing = -len(x["mask"]) % WHOLE
    x = {key: torch.cat([value, value[-1:].expand(missing)]) for key, value in x.items()}
    x["mask"][len(x["mask"]) - missing :] = False
    clean, grad = gradient(x, name, options, torch.ones(len(x["mask"])))
    dirty = dict(x)
    for key, garbage in (("log_probs", math.nan), ("old_log_probs", -math.inf), ("advantages", math.inf)):
        dirty[key] = torch.cat([torch.where(x["mask"], x[key], garbage), torch.tensor([garbage] * 2).double()])
    dirty["mask"] = torch.cat([x["mask"], torch.zeros(2).bool()])
    dirty["sequences"] = torch.cat([x["sequences"], x["sequences"][-1:], x["sequences"][-1:] + 1])
    result, dirty_grad = gradient(dirty, name, options, torch.ones(len(dirty["mask"])))
    assert torch.equal(result.loss[:-2], clean.loss)
    assert torch.equal(result.ratio[:-2], clean.ratio)
    assert torch.equal(result.clipped[:-2], clean.clipped)
    assert torch.equal(dirty_grad[:-2], grad)
    assert not bool(dirty_grad[~dirty["mask"]].any())
    assert not bool(result.loss[~dirty["mask"]].any() or result.clipped[~dirty["mask"]].any())


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_an_empty_mask_gives_zeros(name: str, options: dict[str, Any]) -> None:
    """No loss and no gradient, not NaN."""
    x = batch(0)
    x["mask"] = torch.zeros_like(x["mask"])
    result, grad = gradient(x, name, options, torch.ones(len(x["mask"])))
    assert not bool(result.loss.any() or grad.any() or result.clipped.any())
    assert result.ratio.tolist() == [1.0] * len(x["mask"])


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_no_tokens_at_all(name: str, options: dict[str, Any]) -> None:
    """An empty micro-batch is no error."""
    x = {key: value[:0] for key, value in batch(0).items()}
    assert policy_losses.compute(name, x, options).loss.shape == (0,)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_extreme_ratios_stay_finite(name: str, options: dict[str, Any]) -> None:
    """Log ratios of +-1000 in float32, advantages of both signs."""
    x = {
        "log_probs": torch.tensor([-1000.0, -1000.0, 0.0, 0.0, -1.0]),
        "old_log_probs": torch.tensor([0.0, 0.0, -1000.0, -1000.0, -1.0]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
        "mask": torch.ones(5, dtype=torch.bool),
        "sequences": torch.arange(5),
    }
    result, grad = gradient(x, name, options, torch.ones(5))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (result.loss, result.ratio, grad))


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_order_of_tokens_does_not_matter(name: str, options: dict[str, Any], seed: int) -> None:
    """Shuffled tokens, rollouts renamed, have the same losses and gradients."""
    x = batch(seed)
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(len(x["mask"])))
    shuffled = {key: value[order] for key, value in x.items()}
    names = torch.from_numpy(rng.permutation(int(x["sequences"].max()) + 1))
    shuffled["sequences"] = names[shuffled["sequences"]]
    weights = torch.from_numpy(rng.uniform(size=len(order)))
    result, grad = gradient(x, name, options, weights)
    again, shuffled_grad = gradient(shuffled, name, options, weights[order])
    torch.testing.assert_close(again.loss, result.loss[order])
    torch.testing.assert_close(shuffled_grad, grad[order])


def test_losses_that_do_not_add_up_see_the_whole_mini_batch() -> None:
    """Every other one is tested below over rollouts one by one."""
    names = registry.names("policy_loss")
    assert {name for name in names if registry.find("policy_loss", name).whole_mini_batch} == WHOLE_MINI_BATCH


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(("name", "options"), SPLITTABLE)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_micro_batches_add_up(mode: str, name: str, options: dict[str, Any], seed: int) -> None:
    """Rollout by rollout, with the weights of the whole batch, gives the loss and gradient of the whole."""
    x = batch(seed)
    lengths = torch.zeros(int(x["sequences"].max()) + 1).index_add(0, x["sequences"], x["mask"].float())
    weights = token_weights(lengths.long(), mode)[x["sequences"]]
    whole, grad = gradient(x, name, options, weights)
    total, parts = 0.0, []
    for rollout in range(len(lengths)):
        rows = x["sequences"] == rollout
        part = {key: value[rows] for key, value in x.items()}
        part["sequences"] = torch.zeros_like(part["sequences"])
        result, part_grad = gradient(part, name, options, weights[rows])
        total += float((result.loss.detach() * weights[rows]).sum())
        parts.append(part_grad)
    assert total == pytest.approx(float((whole.loss.detach() * weights).sum()), abs=1e-12)
    torch.testing.assert_close(torch.cat(parts), grad)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_slopes_are_the_gradient_of_the_whole(name: str, options: dict[str, Any], seed: int) -> None:
    """And the loss beside them is the same, without gradient."""
    x = batch(seed)
    weights = torch.from_numpy(np.random.default_rng(seed).uniform(size=len(x["mask"])))
    expected, grad = gradient(x, name, options, weights)
    result, slope = policy_losses.linearized(name, x, options, weights)
    assert torch.equal(slope, grad)
    for mine, theirs in zip(result, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert not mine.requires_grad
    assert not x["log_probs"].requires_grad


def test_slopes_hold_what_a_token_does_to_the_loss_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of (x - mean)^2 of two tokens, weights 1 and 3: d/dx_0 = (1 + 3) (x_0 - x_1) / 2."""

    def spread(log_probs: Tensor, mask: Tensor) -> TokenLoss:
        loss = (log_probs - log_probs.mean()) ** 2
        return TokenLoss(loss, torch.ones_like(loss), ~mask)

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.policy_loss("spread", whole_mini_batch=True)(spread)
    assert registry.find("policy_loss", "spread").whole_mini_batch
    x = {"log_probs": torch.tensor([-1.0, -2.0]), "mask": torch.ones(2, dtype=torch.bool)}
    result, slope = policy_losses.linearized("spread", x, {}, torch.tensor([1.0, 3.0]))
    assert result.loss.tolist() == [0.25, 0.25]
    assert slope.tolist() == [2.0, -2.0]


def test_ratio_carries_no_gradient() -> None:
    """It is for the record."""
    x = batch(0)
    x["log_probs"].requires_grad_()
    for name, options in OPTIONS:
        assert not policy_losses.compute(name, x, options).ratio.requires_grad
