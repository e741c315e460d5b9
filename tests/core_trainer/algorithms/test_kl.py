"""KL estimators and controllers."""

from __future__ import annotations

import math

import pytest
import torch

from core_trainer.algorithms import kl
from rlinsight.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", 0.106531, 1 - math.exp(-0.5)),
        ("abs", 0.5, 1.0),
        ("k1+", 0.5, 0.5),
        ("k2+", 0.125, 0.5),
        ("k3+", 0.106531, 0.5),
        ("abs+", 0.5, 0.5),
    ],
)
def test_reference_numbers(name: str, value: float, gradient: float) -> None:
    """At log_probs -1, other -1.5; with + the value is the base's, the gradient k2's."""
    x = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    got = kl.estimate(name, x, torch.tensor([-1.5], dtype=torch.float64))
    got.sum().backward()
    assert got.item() == pytest.approx(value, abs=1e-6)
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_plus_changes_no_bit_of_the_value(name: str) -> None:
    """Only the gradient."""
    a, b = torch.randn(50, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(50).double()
    assert torch.equal(kl.estimate(f"{name}+", a, b), kl.estimate(name, a, b))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_gradient_by_finite_differences(name: str) -> None:
    """In float64, away from the kink of abs."""
    x = torch.linspace(-3, 2.9, 20, dtype=torch.float64).requires_grad_()
    other = torch.full((20,), -0.2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: kl.estimate(name, a, other), (x,))


@pytest.mark.parametrize("name", ["k2", "k3", "abs", "k1+", "k3+"])
def test_as_a_loss_it_pulls_towards_the_other(name: str) -> None:
    """The gradient is zero at equality and points back elsewhere."""
    x = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    kl.estimate(name, x, torch.full((3,), -1.0)).sum().backward()
    assert x.grad is not None
    assert [float(v) for v in torch.sign(x.grad)] == [0.0, 1.0, -1.0]


def test_k3_survives_extremes() -> None:
    """|d| = 1000 stays finite, value and gradient."""
    x = torch.tensor([1000.0, -1000.0], requires_grad=True)
    value = kl.estimate("k3", x, torch.zeros(2))
    value.sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(value).all() and torch.isfinite(x.grad).all())


def test_unknown_estimator_is_refused() -> None:
    """With the closest name."""
    with pytest.raises(ConfigError, match=r"unknown kl estimator 'abss'; did you mean 'abs'"):
        kl.estimate("abss+", torch.zeros(1), torch.zeros(1))


def test_adaptive_controller_follows_its_target() -> None:
    """Error clipped to 0.2, scaled by rollouts over the horizon."""
    controller = kl.AdaptiveController(coef=0.1, target=0.02, horizon=1000)
    controller.update(0.06, 100)  # error 2, clipped to 0.2
    assert controller.coef == pytest.approx(0.1 * 1.02)
    controller.update(0.0, 100)  # error -1, clipped to -0.2
    assert controller.coef == pytest.approx(0.1 * 1.02 * 0.98)
    controller.update(0.022, 1000)  # error 0.1
    assert controller.coef == pytest.approx(0.1 * 1.02 * 0.98 * 1.1)


def test_controllers_resume() -> None:
    """The adaptive one from its coefficient, the fixed one from the config's; neither from the other's state."""
    adapted = kl.AdaptiveController(0.1, 0.02, 1000)
    adapted.update(0.06, 100)
    resumed = kl.AdaptiveController(0.1, 0.02, 1000)
    resumed.load_state_dict(adapted.state_dict())
    assert resumed.coef == adapted.coef
    fixed = kl.FixedController(0.3)
    fixed.update(9.0, 100)
    again = kl.FixedController(0.5)
    again.load_state_dict(fixed.state_dict())
    assert (fixed.coef, again.coef) == (0.3, 0.5)
    with pytest.raises(CheckpointError, match="KL controller is 'fixed', the config's is 'adaptive'"):
        resumed.load_state_dict(fixed.state_dict())
