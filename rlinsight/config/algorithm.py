"""What is learnt from the rollouts of a step: a named recipe, and every part of it by itself.

A part with a choice (``advantage``, ``policy_loss``) is a section tagged by ``type``, whose other keys are the keyword
options of the function registered under that name in ``core_trainer/algorithms``. A type that is not built in comes
from one of the files in ``plugins``.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rlinsight.config.advantage import ADVANTAGES, Advantage
from rlinsight.config.base import Section
from rlinsight.config.correction import TREATMENTS, CorrectionSection
from rlinsight.config.critic import CriticSection, ModelCritic
from rlinsight.config.functions import PluginFunction, types_of
from rlinsight.config.kl import KL_ESTIMATORS, KlSection
from rlinsight.config.policy_loss import ACTIVE_ON_POLICY, POLICY_LOSSES, PolicyLoss
from rlinsight.config.presets import PRESETS, Preset, fill
from rlinsight.config.shaping import GROUP_FILTERS, ShapingSection

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


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
        return fill(value, PRESETS[name if name in PRESETS else "grpo"])  # an unknown name is refused for itself

    @model_validator(mode="after")
    def _names_exist(self) -> AlgorithmSection:
        named = [
            ("advantage.type", self.advantage.type, types_of(ADVANTAGES)),
            ("policy_loss.type", self.policy_loss.type, types_of(POLICY_LOSSES)),
            ("aggregation", self.aggregation, AGGREGATIONS),
            *(("shaping.group_filters", each.type, types_of(GROUP_FILTERS)) for each in self.shaping.group_filters),
        ]
        if self.kl is not None:
            named.append(("kl.estimator", self.kl.estimator.removesuffix("+"), KL_ESTIMATORS))
        if self.correction is not None and self.correction.importance is not None:
            treatment = self.correction.importance.treatment.type
            named.append(("correction.importance.treatment.type", treatment, types_of(TREATMENTS)))
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
        """With one on-policy update the ratio is always 1, and the critic's values before one are those it learns from.
        What the recipe itself says is let through.
        """
        one_update = self.num_epochs == self.num_mini_batches == 1
        clips = self.critic is not None and self.critic.clip != type(self.critic).model_fields["clip"].default
        if self.critic is not None and one_update and clips:
            raise ValueError(
                f"critic.clip={self.critic.clip} has no effect with one update per step, where values are still those "
                "before it; raise num_epochs or num_mini_batches, or remove clip"
            )
        if not self.is_on_policy or isinstance(self.policy_loss, PluginFunction):
            return self
        if self.policy_loss.type == "kl_cov":
            raise ValueError(
                "policy_loss kl_cov penalises the distance to the old log-probs, which is 0 with one update per step; "
                "raise num_epochs or num_mini_batches, or set type: reinforce, which has the same gradient then"
            )
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
        return self.num_epochs == self.num_mini_batches == 1 and not self.bypasses

    @property
    def bypasses(self) -> bool:
        """Whether the engine's log-probs stand for the old ones."""
        return self.correction is not None and self.correction.mode == "bypass"

    @property
    def model_critic(self) -> ModelCritic | None:
        """The critic's section when it is a model of its own."""
        return self.critic if isinstance(self.critic, ModelCritic) else None
