"""How responses are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

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


class LengthReward(_RewardFunction):
    """Shaping by length: 0 where the response is as long as wished, down to -1 where it is not."""

    type: Literal["length"]
    target: int = Field(ge=0, description="sampled tokens that cost nothing")
    max: int | None = Field(default=None, description="tokens from which on the penalty is -1; not with form step")
    form: Literal["linear", "quadratic", "step", "deviation"] = Field(
        default="linear",
        description="between target and max the penalty grows linearly or quadratically; step: -1 above target; "
        "deviation: linear in the distance from target on both sides, -1 at the distance of max",
    )

    @model_validator(mode="after")
    def _max_fits_form(self) -> LengthReward:
        if self.form == "step":
            if self.max is not None:
                raise ValueError(f"max={self.max} has no effect with form step; remove it")
        elif self.max is None or self.max <= self.target:
            raise ValueError(f"max={self.max} with target={self.target} and form {self.form}; set max > target")
        return self


class TaskReward(_TimedReward):
    """The reasoning_gym task's own score of the response, in [0, 1]."""

    type: Literal["reasoning_gym"]


class FunctionReward(_TimedReward):
    """A function of yours: ``def score(prompt, response, answer, **columns) -> float``, plain or async.

    It returns a number, or a mapping of component name to number; the components then stand in the trace by name.
    With ``batched`` it is called once a step: each argument is a list over the rollouts, and so is what it returns.
    A None or NaN in there is a failure of that rollout alone; an exception fails them all.
    """

    type: Literal["function"]
    function: str = Field(
        pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$", description="module:function, or path/to/file.py:function"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="extra keyword arguments of every call")
    batched: bool = Field(
        default=False, description="one call for all rollouts, with lists; timeout_s is then for all of them"
    )


class _ModelReward(_RewardFunction):
    """A model of the reward worker's own."""

    source: str = Field(description="safetensors directory, Hugging Face id, .gguf file, or package:<name>")
    revision: str | None = Field(default=None, description="hub revision; hub ids only")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="precision of forward; auto picks bfloat16 where the processor has it"
    )
    template: str = Field(description="text the model reads, with {prompt}, {response}, {answer}; write {{ for a brace")

    @model_validator(mode="after")
    def _template_has_known_fields(self) -> Self:
        from string import Formatter

        try:
            parts = [part[1:] for part in Formatter().parse(self.template) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"template is malformed: {error}; write {{{{ and }}}} for braces") from None
        for field, *rest in parts:
            if field not in ("prompt", "response", "answer") or any(rest):
                raise ValueError(f"template has {{{field}}}; known: {{prompt}}, {{response}}, {{answer}}, bare")
        if "response" not in [field for field, *_ in parts]:
            raise ValueError("template has no {response}, so every response would score the same; add it")
        return self

    @property
    def needs_answer(self) -> bool:
        """Whether the template shows the answer."""
        return "{answer}" in self.template.replace("{{", "")


class ClassifierReward(_ModelReward):
    """What a sequence-classification model says of the response: its single logit, or the probability of ``label``."""

    type: Literal["sequence_classifier"]
    template: str = Field(
        default="{prompt}{response}", description="text the model reads, with {prompt}, {response}, {answer}"
    )
    label: str | None = Field(default=None, description="class whose probability is the score; not with a single logit")
    max_tokens: int | None = Field(default=None, ge=1, description="longest text; the model's context when unset")
    truncation: Literal["error", "left", "right"] = Field(
        default="error", description="a text over max_tokens fails, or loses its beginning (left) or its end (right)"
    )
    batch_tokens: int = Field(
        default=8192, ge=1, description="tokens of one forward, with padding; memory, not results"
    )


class JudgeReward(_ModelReward):
    """A number that a generative model writes about the response; it is asked as the user of a chat where it has one.

    The last match of ``pattern`` in what it writes counts. No match, or a number outside ``range``, fails that rollout.
    """

    type: Literal["judge"]
    pattern: str = Field(
        default=r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", description="Python regular expression whose only group is the number"
    )
    range: tuple[float, float] = Field(default=(0.0, 1.0), description="smallest and largest score")
    max_new_tokens: int = Field(default=256, ge=1, description="cap on the tokens it writes")
    temperature: float = Field(default=0.0, ge=0, description="its sampling temperature; 0 is greedy")
    max_batch_size: int = Field(default=64, ge=1, description="responses judged at once; memory, not results")
    timeout_s: float = Field(default=10.0, gt=0, description="longest time the search for pattern may take")

    @model_validator(mode="after")
    def _score_can_be_found(self) -> JudgeReward:
        import re

        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"pattern {self.pattern!r} has {groups} groups; put the number, and only it, into (...)")
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range={list(self.range)}: the first must be below the second")
        return self


RewardFunction = Annotated[
    NumericReward
    | MathVerifyReward
    | RegexReward
    | LengthReward
    | TaskReward
    | FunctionReward
    | ClassifierReward
    | JudgeReward,
    Field(discriminator="type"),
]


class RewardSection(Section):
    """How a response is scored."""

    functions: list[RewardFunction] = Field(min_length=1, description="components; the reward is their weighted sum")
    on_error: Literal["fail", "zero", "drop"] = Field(
        default="fail",
        description="a component that raises, times out or returns NaN stops the run, counts as 0, or leaves its "
        "rollout out of the update; recorded in any case",
    )
    concurrency: int = Field(
        default=4, ge=1, description="calls in flight at once; a process each, async functions share one"
    )

    @model_validator(mode="after")
    def _some_call_is_concurrent(self) -> RewardSection:
        timed = any("timeout_s" in type(function).model_fields for function in self.functions)
        if not timed and self.concurrency != type(self).model_fields["concurrency"].default:
            raise ValueError(
                f"concurrency={self.concurrency} has no effect: {', '.join(f.type for f in self.functions)} make no "
                "calls that wait for anything; remove it"
            )
        return self

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
