"""What is learnt from the rollouts of a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section


class AlgorithmSection(Section):
    """GRPO: group-normalised advantages, PPO clip (DeepSeekMath, arXiv 2402.03300)."""

    name: Literal["grpo"] = Field(default="grpo", description="algorithm")
    normalize_by_std: bool = Field(
        default=True, description="divide advantages by the group's std; false is Dr.GRPO (arXiv 2503.20783)"
    )
    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="ratio may fall to 1 - clip_low before its gradient is cut"
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="ratio may rise to 1 + clip_high before its gradient is cut"
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="bound on the loss of negative advantages (arXiv 1912.09729)"
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = Field(
        default="token-mean",
        description="how per-token losses become one number; over the whole step, whatever the micro-batches",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL loss to the frozen reference; 0 loads no reference"
    )
    kl_estimator: Literal["k2", "k3"] = Field(
        default="k3", description="KL estimator of the loss (joschu.net/blog/kl-approx)"
    )
    num_epochs: int = Field(default=1, ge=1, description="passes over the step's rollouts")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")

    @model_validator(mode="after")
    def _no_idle_options(self) -> AlgorithmSection:
        # The default is let through, so that a resolved config can be loaded again.
        if self.kl_coef == 0 and self.kl_estimator != type(self).model_fields["kl_estimator"].default:
            raise ValueError("kl_estimator has no effect while kl_coef is 0; set kl_coef > 0 or remove kl_estimator")
        if self.num_epochs == self.num_mini_batches == 1:
            for option in ("clip_low", "clip_high", "dual_clip"):
                if getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(
                        f"{option} has no effect with one update per step, where the ratio is always 1; raise "
                        f"num_epochs or num_mini_batches, or remove {option}"
                    )
        return self
