"""How responses are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section


class _RewardFunction(Section):
    name: str | None = Field(
        default=None, description="component name in the trace; the type (or function name) when unset"
    )
    weight: float = Field(default=1.0, description="weight in the rollout's reward")


class _TimedReward(_RewardFunction):
    timeout_s: float = Field(default=10.0, gt=0, description="longest time one call may take; then it is killed")


class NumericReward(_RewardFunction):
    """1 when the last number in the response equals the answer, else 0."""

    type: Literal["numeric"]
    tolerance: float = Field(default=1e-6, ge=0, description="largest relative difference that still counts as equal")


class MathVerifyReward(_TimedReward):
    """1 when math-verify finds the response's final expression equivalent to the answer, else 0."""

    type: Literal["math_verify"]


class RegexReward(_TimedReward):
    """1 when the pattern is found in the response (format checks), else 0."""

    type: Literal["regex"]
    pattern: str = Field(description="Python regular expression, searched with DOTALL")
    full_match: bool = Field(default=False, description="the whole response must match")

    @model_validator(mode="after")
    def _pattern_compiles(self) -> RegexReward:
        import re

        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from None
        return self


class TaskReward(_TimedReward):
    """The reasoning_gym task's own score of the response, in [0, 1]."""

    type: Literal["reasoning_gym"]


class FunctionReward(_TimedReward):
    """A function of yours: ``def score(prompt, response, answer, **columns) -> float``, plain or async.

    It returns a number, or a mapping of component name to number; the components then stand in the trace by name.
    """

    type: Literal["function"]
    function: str = Field(
        pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$", description="module:function, or path/to/file.py:function"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="extra keyword arguments of every call")


RewardFunction = Annotated[
    NumericReward | MathVerifyReward | RegexReward | TaskReward | FunctionReward, Field(discriminator="type")
]


class RewardSection(Section):
    """How a response is scored."""

    functions: list[RewardFunction] = Field(min_length=1, description="components; the reward is their weighted sum")
    on_error: Literal["fail", "zero"] = Field(
        default="fail",
        description="a component that raises, times out or returns NaN stops the run, or counts as 0 and is recorded",
    )
    concurrency: int = Field(
        default=4, ge=1, description="calls in flight at once; a process each, async functions share one"
    )

    @model_validator(mode="after")
    def _component_names_differ(self) -> RewardSection:
        names = [component_name(function) for function in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward functions are called {name!r}; give each its own name:")
        return self


def component_name(function: RewardFunction) -> str:
    """Name of a reward component in the trace."""
    if function.name:
        return function.name
    return function.function.rsplit(":", 1)[1] if isinstance(function, FunctionReward) else function.type
