"""Distance to the frozen reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")


class FixedController(Section):
    """The coefficient stays what it is."""

    type: Literal["fixed"]


class AdaptiveController(Section):
    """The coefficient follows the measured KL towards a target (arXiv 1909.08593)."""

    type: Literal["adaptive"]
    target: float = Field(gt=0, description="KL per token to hold")
    horizon: int = Field(default=10_000, ge=1, description="rollouts over which the coefficient adapts")


class KlSection(Section):
    """Distance to the frozen reference."""

    coef: float = Field(default=0.001, gt=0, description="weight of the KL; the first one, if the controller adapts it")
    estimator: str = Field(
        default="k3",
        description="k1, k2, k3 or abs of each token (joschu.net/blog/kl-approx), or one of a plugin; with + behind "
        "it, its value and the gradient of k2",
    )
    where: Literal["loss", "reward"] = Field(
        default="loss", description="a term of the loss, or taken off the reward of each token"
    )
    controller: Annotated[FixedController | AdaptiveController, Field(discriminator="type")] = Field(
        default=FixedController(type="fixed"), description="how the weight changes from step to step"
    )

    @model_validator(mode="after")
    def _estimator_has_an_effect(self) -> KlSection:
        if self.where == "reward" and self.estimator.endswith("+"):
            plain = self.estimator.removesuffix("+")
            raise ValueError(f"estimator {self.estimator} only changes a gradient, and a reward has none; use {plain}")
        if self.estimator == "k2+":
            raise ValueError("estimator k2+ is k2, value and gradient; use k2")
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("the gradient of k1 averages to zero as a loss; use k1+, k2 or k3, or where: reward")
        return self
