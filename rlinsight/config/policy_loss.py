"""Loss of a token."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section
from rlinsight.config.functions import by_type


class PpoClipLoss(Section):
    """PPO's clipped surrogate (arXiv 1707.06347)."""

    type: Literal["ppo_clip"]
    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="ratio may fall to 1 - clip_low before its gradient is cut"
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="ratio may rise to 1 + clip_high before its gradient is cut"
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="bound on the loss of negative advantages (arXiv 1912.09729)"
    )


class GspoLoss(Section):
    """The sequence's geometric mean ratio, clipped (arXiv 2507.18071)."""

    type: Literal["gspo"]
    clip_low: float = Field(default=3e-4, gt=0, lt=1, description="ratio may fall to 1 - clip_low")
    clip_high: float = Field(default=4e-4, gt=0, description="ratio may rise to 1 + clip_high")


class CispoLoss(Section):
    """Log-probs weighted by a clipped ratio that carries no gradient (arXiv 2506.13585)."""

    type: Literal["cispo"]
    clip_low: float = Field(default=0.2, gt=0, le=1, description="weight is at least 1 - clip_low; 1 sets no bound")
    clip_high: float = Field(default=0.2, gt=0, description="weight is at most 1 + clip_high")


class GmpoLoss(Section):
    """Geometric mean over a rollout of token ratios clipped in log space (arXiv 2507.20673)."""

    type: Literal["gmpo"]
    clip_low: float = Field(default=0.4, gt=0, description="log ratio of a token is at least -clip_low")
    clip_high: float = Field(default=0.4, gt=0, description="log ratio of a token is at most clip_high")


class SapoLoss(Section):
    """A smooth gate on the ratio instead of a clip (arXiv 2511.20347)."""

    type: Literal["sapo"]
    tau_pos: float = Field(default=1.0, gt=0, description="steepness of the gate for advantages above 0")
    tau_neg: float = Field(default=1.05, gt=0, description="steepness of the gate for other advantages")


class DppoTvLoss(Section):
    """Trust region by the total variation of the token's probability (arXiv 2602.04879)."""

    type: Literal["dppo_tv"]
    bound_low: float = Field(default=0.2, gt=0, description="largest fall of a token's probability")
    bound_high: float = Field(default=0.2, gt=0, description="largest rise of a token's probability")
    max_ratio: float = Field(default=20.0, gt=0, description="ratio is cut there as a weight")


class DppoKlLoss(Section):
    """Trust region by the binary KL of the token's probability (arXiv 2602.04879)."""

    type: Literal["dppo_kl"]
    bound_low: float = Field(default=0.05, gt=0, description="largest KL of a token that got less likely")
    bound_high: float = Field(default=0.05, gt=0, description="largest KL of a token that got likelier")
    max_ratio: float = Field(default=20.0, gt=0, description="ratio is cut there as a weight")


class DroLoss(Section):
    """Quadratic penalty on the log ratio (arXiv 2405.19107)."""

    type: Literal["dro"]
    beta: float = Field(default=0.05, gt=0, description="weight of the penalty")


class GpgLoss(Section):
    """Plain policy gradient, as GPG uses it (arXiv 2504.02546)."""

    type: Literal["gpg"]


class ReinforceLoss(Section):
    """Plain policy gradient."""

    type: Literal["reinforce"]


class ClipCovLoss(Section):
    """PPO, with some of the tokens of highest covariance cut out (arXiv 2505.22617)."""

    type: Literal["clip_cov"]
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="ratio may fall to 1 - clip_low")
    clip_high: float = Field(default=0.2, gt=0, description="ratio may rise to 1 + clip_high")
    cov_ratio: float = Field(default=2e-4, gt=0, le=1, description="share of tokens cut out")
    cov_low: float = Field(default=1.0, description="smallest covariance of a token that may be cut out")
    cov_high: float = Field(default=5.0, description="largest covariance of a token that may be cut out")

    @model_validator(mode="after")
    def _cuts_something(self) -> ClipCovLoss:
        if not self.cov_low < self.cov_high:
            raise ValueError(
                f"cov_low={self.cov_low:g} is not below cov_high={self.cov_high:g}, so no token could be cut out"
            )
        return self


class KlCovLoss(Section):
    """Policy gradient with a KL penalty on the tokens of highest covariance (arXiv 2505.22617)."""

    type: Literal["kl_cov"]
    cov_ratio: float = Field(default=2e-4, gt=0, le=1, description="share of tokens with a penalty")
    kl_coef: float = Field(default=1.0, gt=0, description="weight of the penalty")


POLICY_LOSSES: tuple[type[Section], ...] = (
    PpoClipLoss,
    GspoLoss,
    CispoLoss,
    GmpoLoss,
    SapoLoss,
    DppoTvLoss,
    DppoKlLoss,
    DroLoss,
    GpgLoss,
    ReinforceLoss,
    ClipCovLoss,
    KlCovLoss,
)
PolicyLoss: Any = by_type(POLICY_LOSSES)
# Options of losses that change the gradient even where the ratio is 1.
ACTIVE_ON_POLICY = {"clip_cov": ("cov_ratio", "cov_low", "cov_high")}
