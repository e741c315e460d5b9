"""Which rollouts of a step are learnt from, and what their length costs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section
from rlinsight.config.functions import by_type


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


class StaleFilter(Section):
    """Groups with a rollout that old weights sampled are dropped."""

    type: Literal["stale"]
    max_staleness: int = Field(ge=0, description="most updates since the weights that sampled a token of a rollout")


GROUP_FILTERS: tuple[type[Section], ...] = (TooHardFilter, TooEasyFilter, StaleFilter)
GroupFilter: Any = by_type(GROUP_FILTERS)


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
