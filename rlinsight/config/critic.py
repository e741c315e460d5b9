"""The value function that token-level advantages are measured from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section
from rlinsight.config.model import ModelSection


class _Critic(Section):
    clip: float | None = Field(
        default=0.5,
        gt=0,
        description="values may move this far from those before the update until their gradient is cut; null is off",
    )


class ModelCritic(_Critic):
    """A critic of its own: a decoder with a value head.

    Precision, optimizer settings that are not here, and the micro-batch budget are the policy's; epochs and
    mini-batches are the algorithm's.
    """

    type: Literal["model"]
    source: str | None = Field(
        default=None,
        description="model the critic starts from, or a critic saved before; the policy's model when unset",
    )
    revision: str | None = Field(default=None, description="hub revision of source; hub ids only")
    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate of the critic's AdamW")
    max_grad_norm: float = Field(default=1.0, gt=0, description="the critic's gradient norm is clipped to this")
    warmup_steps: int = Field(
        default=0, ge=0, description="first steps of the run that train the critic alone and leave the policy as it is"
    )

    @model_validator(mode="after")
    def _no_idle_options(self) -> ModelCritic:
        if self.revision is not None and self.source is None:
            raise ValueError(
                f"revision={self.revision!r} has no effect without source: the critic starts from the policy's model; "
                "set source, or model.revision"
            )
        return self

    def model_section(self, policy: ModelSection) -> ModelSection:
        """What to load: ``source``, or the policy's model; the rest is as for the policy."""
        if self.source is None:
            return policy
        return policy.model_copy(update={"source": self.source, "revision": self.revision})


class SharedCritic(_Critic):
    """A value head on the policy's own backbone, with an optimizer of its own for the head.

    It costs no second model, and the value loss moves the policy's backbone too. Critic warm-up needs a model of its
    own: training the head alone would have to freeze the backbone that the head reads. Schedule, clipping and the other
    settings of the head's AdamW are the policy's.
    """

    type: Literal["shared"]
    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate of the head's AdamW")
    coef: float = Field(
        default=0.1,
        gt=0,
        description="weight of the value loss beside the policy loss: how much of it reaches the backbone; the head "
        "has its own AdamW, whose steps do not depend on the scale of a loss",
    )


CriticSection = Annotated[ModelCritic | SharedCritic, Field(discriminator="type")]
