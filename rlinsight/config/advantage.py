"""From rewards to advantages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlinsight.config.base import Section
from rlinsight.config.functions import by_type


class GaeAdvantage(Section):
    """Generalised advantage estimation over a critic's values (arXiv 1506.02438)."""

    type: Literal["gae"]
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of a token's future")
    lam: float = Field(default=0.95, ge=0, le=1, description="1 trusts sampled returns only, 0 the critic only")
    whiten: bool = Field(default=True, description="advantages to mean 0 and variance 1 over the step's tokens")


class GrpoAdvantage(Section):
    """Reward against the group's mean (arXiv 2402.03300)."""

    type: Literal["grpo"]
    normalize_by_std: bool = Field(
        default=True, description="divide by the group's std; false is Dr.GRPO (arXiv 2503.20783)"
    )


class RlooAdvantage(Section):
    """Reward against the mean of the other rollouts of its group (arXiv 2402.14740)."""

    type: Literal["rloo"]


class ReinforcePlusPlusAdvantage(Section):
    """Whitened reward to go (arXiv 2501.03262)."""

    type: Literal["reinforce_plus_plus"]
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of a token's future")


class ReinforcePlusPlusBaselineAdvantage(Section):
    """Reward against the group's mean, whitened over the step (arXiv 2501.03262)."""

    type: Literal["reinforce_plus_plus_baseline"]


class RemaxAdvantage(Section):
    """Reward to go against the reward of the prompt's greedy rollout (arXiv 2310.10505)."""

    type: Literal["remax"]


class OpoAdvantage(Section):
    """Reward against the group's length-weighted mean (arXiv 2505.23585)."""

    type: Literal["opo"]


class GpgAdvantage(Section):
    """Centred rewards, scaled up by the share of rollouts without reward (arXiv 2504.02546)."""

    type: Literal["gpg"]


class GrpoPassAtKAdvantage(Section):
    """Only the best rollout of a group learns, by its distance to the second best (arXiv 2503.19595)."""

    type: Literal["grpo_pass_at_k"]
    normalize_by_std: bool = Field(default=True, description="divide by the group's std")


class GdpoAdvantage(Section):
    """GRPO for each reward component by itself, summed by weight, whitened (arXiv 2601.05242)."""

    type: Literal["gdpo"]


class OptimalTokenBaselineAdvantage(Section):
    """Reward to go against a baseline for each token, weighted by the size of its gradient (arXiv 2602.07078)."""

    type: Literal["optimal_token_baseline"]


ADVANTAGES: tuple[type[Section], ...] = (
    GaeAdvantage,
    GrpoAdvantage,
    RlooAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    OpoAdvantage,
    GpgAdvantage,
    GrpoPassAtKAdvantage,
    GdpoAdvantage,
    OptimalTokenBaselineAdvantage,
)
Advantage: Any = by_type(ADVANTAGES)
# Those that compare the rollouts of a prompt.
GROUP_ADVANTAGES = frozenset(
    {"grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_pass_at_k", "gdpo", "optimal_token_baseline"}
)
