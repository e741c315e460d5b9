"""KL estimators per token (joschu.net/blog/kl-approx), and controllers of the KL's coefficient.

d = log_probs - other, on tokens sampled from the policy of ``log_probs``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from core_trainer.algorithms import registry
from core_trainer.algorithms.numerics import MAX_LOG_RATIO
from core_trainer.algorithms.registry import kl_estimator
from rlinsight.errors import CheckpointError

MAX_ERROR = 0.2  # bound on the relative error the adaptive controller reacts to


def estimate(name: str, log_probs: Tensor, other: Tensor) -> Tensor:
    """KL of each token by the named estimator, [M], [M] -> [M].

    With a ``+`` behind the name it has the value of that estimator and the gradient of k2, which unlike those of k1 and
    k3 is an unbiased one of the KL from on-policy samples (arXiv 2506.09477). Raises ConfigError for an unknown name.
    """
    value = registry.find("kl_estimator", name.removesuffix("+")).call({"log_probs": log_probs, "other": other}, {})
    if not name.endswith("+"):
        return value
    gradient = k2(log_probs, other)
    return value.detach() + (gradient - gradient.detach())


@kl_estimator("k1")
def k1(log_probs: Tensor, other: Tensor) -> Tensor:
    """d: unbiased, of either sign; its gradient as a loss averages to zero on-policy."""
    return log_probs - other


@kl_estimator("k2")
def k2(log_probs: Tensor, other: Tensor) -> Tensor:
    """d^2 / 2: biased low variance, and an unbiased gradient of the reverse KL as a loss."""
    return (log_probs - other) ** 2 / 2


@kl_estimator("k3")
def k3(log_probs: Tensor, other: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased and never negative in exact arithmetic. Beyond |d| = 20 it stays finite."""
    d = log_probs - other
    return torch.exp(-d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + d - 1


@kl_estimator("abs")
def absolute(log_probs: Tensor, other: Tensor) -> Tensor:
    """|d|."""
    return (log_probs - other).abs()


class Controller(Protocol):
    """Holds the coefficient of the KL from step to step."""

    coef: float

    def update(self, kl: float, num_rollouts: int) -> None:
        """Take in the mean KL per token of ``num_rollouts`` rollouts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a kept state. Raises CheckpointError for another controller's."""
        ...


class FixedController:
    """The coefficient stays what the config says, after a resume too."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_rollouts: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """Its type alone."""
        return {"type": "fixed"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the type."""
        _same_type(state, "fixed")


class AdaptiveController:
    """Follows a target (arXiv 1909.08593): coef *= 1 + clip(kl / target - 1, -0.2, 0.2) num_rollouts / horizon."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_rollouts: int) -> None:
        """Raise the coefficient while the KL is above the target, lower it below."""
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * num_rollouts / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The coefficient it has come to."""
        return {"type": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a kept coefficient."""
        _same_type(state, "adaptive")
        self.coef = float(state["coef"])


def _same_type(state: dict[str, Any], expected: str) -> None:
    if state.get("type") != expected:
        raise CheckpointError(
            f"the checkpoint's KL controller is {state.get('type')!r}, the config's is {expected!r}; resume with the "
            "controller it was trained with"
        )
