"""What is learnt from the rollouts of a step: presets of named recipes, and every part of them by itself.

A part with a choice (``advantage``, ``policy_loss``) is a section tagged by ``type``, whose other keys are the keyword
options of the function registered under that name in ``core_trainer/algorithms``. A type that is not built in comes
from one of the files in ``plugins``.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from rlinsight.config.base import Section
from rlinsight.config.critic import CriticSection, ModelCritic

PLUGIN = "plugin"  # tag of a section whose type is not built in


class PluginFunction(Section):
    """A function of a file in ``plugins``; every other key is an option of it."""

    model_config = ConfigDict(extra="allow")
    type: str


# Advantages ----------------------------------------------------------------------------------------------------------


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
    """Reward to go against a baseline for each token, weighted by the size of its gradient."""

    type: Literal["optimal_token_baseline"]


# Policy losses -------------------------------------------------------------------------------------------------------


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


class KlCovLoss(Section):
    """Policy gradient with a KL penalty on the tokens of highest covariance (arXiv 2505.22617)."""

    type: Literal["kl_cov"]
    cov_ratio: float = Field(default=2e-4, gt=0, le=1, description="share of tokens with a penalty")
    kl_coef: float = Field(default=1.0, gt=0, description="weight of the penalty")


def _types(variants: tuple[type[Section], ...]) -> tuple[str, ...]:
    return tuple(get_args(variant.model_fields["type"].annotation)[0] for variant in variants)


def _by_type(variants: tuple[type[Section], ...]) -> Any:
    """A union tagged by ``type``; a type none of them has is a plugin's."""
    tags = dict(zip(_types(variants), variants, strict=True))

    def tag(value: Any) -> str | None:
        name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return name if name is None or name in tags else PLUGIN

    union: Any = Annotated[PluginFunction, Tag(PLUGIN)]
    for name, variant in tags.items():
        union = union | Annotated[variant, Tag(name)]  # type: ignore[valid-type]
    return Annotated[union, Discriminator(tag)]


ADVANTAGES: tuple[type[Section], ...] = (
    GaeAdvantage, GrpoAdvantage, RlooAdvantage, ReinforcePlusPlusAdvantage, ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage, OpoAdvantage, GpgAdvantage, GrpoPassAtKAdvantage, GdpoAdvantage, OptimalTokenBaselineAdvantage,
)  # fmt: skip
POLICY_LOSSES: tuple[type[Section], ...] = (
    PpoClipLoss, GspoLoss, CispoLoss, GmpoLoss, SapoLoss, DppoTvLoss, DppoKlLoss, DroLoss, GpgLoss, ReinforceLoss,
    ClipCovLoss, KlCovLoss,
)  # fmt: skip
Advantage: Any = _by_type(ADVANTAGES)
PolicyLoss: Any = _by_type(POLICY_LOSSES)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
GROUP_ADVANTAGES = frozenset(
    {"grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_pass_at_k", "gdpo", "optimal_token_baseline"}
)
# Options of losses that change the gradient even where the ratio is 1.
ACTIVE_ON_POLICY = {"clip_cov": ("cov_ratio", "cov_low", "cov_high")}


# KL, correction, shaping ---------------------------------------------------------------------------------------------


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
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("the gradient of k1 averages to zero as a loss; use k1+, k2 or k3, or where: reward")
        return self


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
Treatment: Any = _by_type(TREATMENTS)


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


class DynamicSamplingSection(Section):
    """Groups whose rollouts all have the same reward are dropped, and others sampled (DAPO, arXiv 2503.14476)."""

    max_rounds: int = Field(
        default=10, ge=1, description="times a step samples; 1 drops without replacing. Then it trains on what it has"
    )


class TooHardFilter(Section):
    """Groups of a low mean reward are dropped."""

    type: Literal["too_hard"]
    min_reward: float = Field(description="smallest mean reward of a group that is kept")


class TooEasyFilter(Section):
    """Groups of a high mean reward are dropped."""

    type: Literal["too_easy"]
    max_reward: float = Field(description="largest mean reward of a group that is kept")


GROUP_FILTERS: tuple[type[Section], ...] = (TooHardFilter, TooEasyFilter)
GroupFilter: Any = _by_type(GROUP_FILTERS)


OVERLONG = "overlong"  # reward component of the penalty


class OverlongSection(Section):
    """A growing penalty on the last tokens before the cap on length (DAPO, arXiv 2503.14476)."""

    buffer: int | None = Field(
        default=None, ge=1, description="tokens before rollout.max_new_tokens where it begins; a fifth of it when unset"
    )
    factor: float = Field(default=1.0, gt=0, description="penalty at the cap")


class ShapingSection(Section):
    """Which rollouts of a step are learnt from, and what their length costs."""

    dynamic_sampling: DynamicSamplingSection | None = Field(default=None, description="off when null")
    group_filters: list[GroupFilter] = Field(  # type: ignore[valid-type]
        default_factory=list, description="which groups are dropped; the first that drops one is the recorded reason"
    )
    overlong: OverlongSection | None = Field(default=None, description="off when null")

    @model_validator(mode="after")
    def _filters_keep_something(self) -> ShapingSection:
        types = [each.type for each in self.group_filters]
        for name in types:
            if types.count(name) > 1:
                raise ValueError(f"two group_filters have type {name}; keep the stricter one")
        bounds = {each.type: each for each in self.group_filters}
        if {"too_hard", "too_easy"} <= set(bounds) and bounds["too_hard"].min_reward > bounds["too_easy"].max_reward:
            raise ValueError(
                f"group_filters keep nothing: min_reward={bounds['too_hard'].min_reward:g} is over "
                f"max_reward={bounds['too_easy'].max_reward:g}"
            )
        return self


# Recipes -------------------------------------------------------------------------------------------------------------

_KL_IN_REWARD = {"coef": 0.05, "estimator": "k1", "where": "reward"}
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, with the token mean and without the KL term that later work dropped (arXiv 2503.14476).
    "grpo": {"advantage": {"type": "grpo"}, "policy_loss": {"type": "ppo_clip"}},
    # arXiv 2503.20783: neither a rollout's length nor its group's std scales its gradient.
    "dr_grpo": {
        "advantage": {"type": "grpo", "normalize_by_std": False},
        "policy_loss": {"type": "ppo_clip"},
        "aggregation": "seq-mean-token-sum-norm",
    },
    # arXiv 2503.14476
    "dapo": {
        "advantage": {"type": "grpo"},
        "policy_loss": {"type": "ppo_clip", "clip_high": 0.28},
        "shaping": {"dynamic_sampling": {"max_rounds": 10}, "overlong": {}},
        "num_mini_batches": 4,
    },
    # arXiv 2507.18071
    "gspo": {
        "advantage": {"type": "grpo"},
        "policy_loss": {"type": "gspo"},
        "aggregation": "seq-mean-token-mean",
        "num_mini_batches": 4,
    },
    # arXiv 2506.13585: the lower bound is left open, the token mean is over the step.
    "cispo": {
        "advantage": {"type": "grpo"},
        "policy_loss": {"type": "cispo", "clip_low": 1.0},
        "num_mini_batches": 4,
    },
    # arXiv 2402.14740
    "rloo": {
        "advantage": {"type": "rloo"},
        "policy_loss": {"type": "reinforce"},
        "aggregation": "seq-mean-token-sum",
        "kl": _KL_IN_REWARD,
    },
    # arXiv 2501.03262
    "reinforce_plus_plus": {
        "advantage": {"type": "reinforce_plus_plus"},
        "policy_loss": {"type": "ppo_clip"},
        "kl": {**_KL_IN_REWARD, "coef": 0.01},
        "num_mini_batches": 4,
    },
    # arXiv 2310.10505
    "remax": {
        "advantage": {"type": "remax"},
        "policy_loss": {"type": "reinforce"},
        "aggregation": "seq-mean-token-sum",
        "kl": _KL_IN_REWARD,
    },
    # arXiv 1707.06347, with the KL of arXiv 2203.02155
    "ppo": {
        "advantage": {"type": "gae"},
        "policy_loss": {"type": "ppo_clip"},
        "kl": _KL_IN_REWARD,
        "critic": {"type": "model"},
        "num_mini_batches": 4,
    },
}  # fmt: skip
Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo"]


def _fill(given: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``preset``, key by key; a section of another type takes nothing from the preset's."""
    filled = dict(given)
    for key, value in preset.items():
        if key not in given:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(given[key], dict):
            of_its_type = given[key].get("type", value.get("type")) == value.get("type")
            filled[key] = _fill(given[key], value) if of_its_type else given[key]
    return filled


class AlgorithmSection(Section):
    """A named recipe, and what is changed in it."""

    name: Preset = Field(default="grpo", description="recipe; fills every key below that is not given")
    advantage: Advantage = Field(  # type: ignore[valid-type]
        description="from rewards to advantages"
    )
    policy_loss: PolicyLoss = Field(  # type: ignore[valid-type]
        description="loss of a token"
    )
    aggregation: str = Field(
        default="token-mean",
        description=f"how losses of tokens become one number: {', '.join(AGGREGATIONS)}, or one of a plugin; over the "
        "whole update, whatever the micro-batches",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    kl: KlSection | None = Field(default=None, description="KL to the frozen reference; null loads no reference")
    critic: CriticSection | None = Field(default=None, description="value function; null has none")
    correction: CorrectionSection | None = Field(
        default=None, description="correction of the mismatch between engine and trainer; off when null"
    )
    shaping: ShapingSection = Field(default=ShapingSection(), description="which rollouts are learnt from")
    num_epochs: int = Field(default=1, ge=1, description="passes over the step's rollouts")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    plugins: list[Path] = Field(
        default_factory=list, description="Python files with decorated functions, whose names are types from then on"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("name", "grpo")
        return _fill(value, PRESETS[name if name in PRESETS else "grpo"])  # an unknown name is refused for itself

    @model_validator(mode="after")
    def _names_exist(self) -> AlgorithmSection:
        named = [
            ("advantage.type", self.advantage.type, _types(ADVANTAGES)),
            ("policy_loss.type", self.policy_loss.type, _types(POLICY_LOSSES)),
            ("aggregation", self.aggregation, AGGREGATIONS),
            *(("shaping.group_filters", each.type, _types(GROUP_FILTERS)) for each in self.shaping.group_filters),
        ]
        if self.kl is not None:
            named.append(("kl.estimator", self.kl.estimator.removesuffix("+"), KL_ESTIMATORS))
        if self.correction is not None and self.correction.importance is not None:
            treatment = self.correction.importance.treatment.type
            named.append(("correction.importance.treatment.type", treatment, _types(TREATMENTS)))
        if self.correction is not None and self.correction.rejection is not None:
            named.append(("correction.rejection.estimator", self.correction.rejection.estimator, KL_ESTIMATORS))
        foreign = [(key, name, known) for key, name, known in named if name not in known]
        if foreign and not self.plugins:
            key, name, known = foreign[0]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)};"
            raise ValueError(f"{key} {name!r} is not built in; {hint} one of your own comes from a file in plugins:")
        if self.plugins and not foreign:
            raise ValueError("plugins have no effect: everything that is named here is built in")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmSection:
        if self.advantage.type == "gae" and self.critic is None:
            raise ValueError("advantage gae needs a critic; set critic: {type: model}")
        if self.critic is not None and self.advantage.type != "gae" and not isinstance(self.advantage, PluginFunction):
            raise ValueError(f"critic has no effect with advantage {self.advantage.type}; remove it or set type: gae")
        if self.policy_loss.type in ("gspo", "gmpo") and self.aggregation != "seq-mean-token-mean":
            raise ValueError(
                f"policy_loss {self.policy_loss.type} has one ratio a sequence, so aggregation={self.aggregation!r} "
                "would weigh it by length; set aggregation: seq-mean-token-mean"
            )
        return self

    @model_validator(mode="after")
    def _no_idle_clips(self) -> AlgorithmSection:
        """With one on-policy update the ratio is always 1. What the recipe itself says is let through."""
        if not self.is_on_policy:
            return self
        if self.critic is not None and self.critic.clip != type(self.critic).model_fields["clip"].default:
            raise ValueError(
                f"critic.clip={self.critic.clip} has no effect with one update per step, where values are still those "
                "before it; raise num_epochs or num_mini_batches, or remove clip"
            )
        if isinstance(self.policy_loss, PluginFunction):
            return self
        usual = PRESETS[self.name]["policy_loss"]
        for option, field in type(self.policy_loss).model_fields.items():
            if option == "type" or option in ACTIVE_ON_POLICY.get(self.policy_loss.type, ()):
                continue
            expected = usual.get(option, field.default) if usual["type"] == self.policy_loss.type else field.default
            if getattr(self.policy_loss, option) != expected:
                raise ValueError(
                    f"policy_loss.{option} has no effect with one update per step, where the ratio is always 1; raise "
                    f"num_epochs or num_mini_batches, or remove {option}"
                )
        return self

    @property
    def is_on_policy(self) -> bool:
        """Whether the only update of a step starts from the weights that its old log-probs are those of."""
        bypass = self.correction is not None and self.correction.mode == "bypass"
        return self.num_epochs == self.num_mini_batches == 1 and not bypass

    @property
    def model_critic(self) -> ModelCritic | None:
        """The critic's section when it is a model of its own."""
        return self.critic if isinstance(self.critic, ModelCritic) else None
