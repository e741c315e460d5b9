"""Correction of the mismatch between rollout engine and trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section
from rlinsight.config.functions import by_type


class TruncateTreatment(Section):
    """Weights are cut at a bound: truncated importance sampling (fengyao.notion.site/off-policy-rl)."""

    type: Literal["truncate"]
    high: float = Field(default=2.0, gt=0, description="largest weight")


class MaskTreatment(Section):
    """Weights outside the bounds are 0: IcePop, masked importance sampling (arXiv 2510.18855)."""

    type: Literal["mask"]
    low: float = Field(default=0.5, ge=0, description="smallest ratio with a weight")
    high: float = Field(default=2.0, gt=0, description="largest ratio with a weight")

    @model_validator(mode="after")
    def _keeps_something(self) -> MaskTreatment:
        if not self.low < self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}, so every weight would be 0")
        return self


TREATMENTS: tuple[type[Section], ...] = (TruncateTreatment, MaskTreatment)
Treatment: Any = by_type(TREATMENTS)


class ImportanceSection(Section):
    """Weights for tokens the engine sampled with other probabilities than the trainer gives them."""

    level: Literal["token", "sequence"] = Field(default="token", description="ratio of a token, or of its rollout")
    treatment: Treatment = Field(  # type: ignore[valid-type]
        default=TruncateTreatment(type="truncate"), description="from ratios to weights"
    )
    normalize: bool = Field(default=False, description="divide by the mean weight of the step")


class RejectionSection(Section):
    """Tokens left out where engine and trainer disagree too much; they leave the normaliser too."""

    level: Literal["token", "sequence"] = Field(default="sequence", description="what is judged and left out")
    estimator: str = Field(
        default="k3", description="k1, k2, k3 or abs of each token, or one of a plugin: measure of the disagreement"
    )
    reduction: Literal["sum", "mean", "max"] | None = Field(
        default=None, description="from tokens to a rollout, of level sequence; mean when unset"
    )
    low: float | None = Field(default=None, description="smallest value kept; of k1, which has a sign")
    high: float = Field(description="largest value kept")

    @model_validator(mode="after")
    def _no_idle_options(self) -> RejectionSection:
        if self.level == "token" and self.reduction is not None:
            raise ValueError("reduction has no effect with level token; remove it")
        never_negative = self.estimator in ("k2", "k3", "abs")
        if self.low is not None and never_negative:
            raise ValueError(f"low has no effect with {self.estimator}, which is never negative; remove low")
        if never_negative and self.high < 0:
            raise ValueError(f"high={self.high:g} rejects everything: {self.estimator} is never negative; raise high")
        if self.low is not None and not self.low < self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}, so everything would be rejected")
        return self


class CorrectionSection(Section):
    """Correction of the mismatch between rollout engine and trainer."""

    mode: Literal["decoupled", "bypass"] = Field(
        default="decoupled",
        description="bypass takes the engine's log-probs for the old ones and saves their pass",
    )
    importance: ImportanceSection | None = Field(default=None, description="importance weights; off when null")
    rejection: RejectionSection | None = Field(default=None, description="rejection; off when null")

    @model_validator(mode="after")
    def _has_an_effect(self) -> CorrectionSection:
        corrects = self.importance is not None or self.rejection is not None
        if self.mode == "decoupled" and not corrects:
            raise ValueError("correction without importance or rejection corrects nothing; add one, or remove it")
        if self.mode == "bypass" and corrects:
            raise ValueError(
                "mode bypass takes the engine's log-probs for the old ones, so that their ratio, which importance and "
                "rejection look at, is 1; set mode: decoupled or remove them"
            )
        return self
