"""What goes into a reward and what comes out of it."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from core_trainer.types import Prompt
from rlinsight.errors import RewardError


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One rollout to score."""

    rollout_id: str
    prompt: Prompt
    response: str
    num_tokens: int  # sampled tokens of the response
    dataset: int = 0  # which of the scorer's datasets the prompt is from


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says about one response."""

    value: float
    label: str | None = None  # such as correct, wrong, no_number
    explanation: str | None = None  # what the verifier saw, in one line
    part: str | None = None  # set when one function scores several things
    answer: str | None = None  # final answer it read in the response, "" when there is none; None when it reads none


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one function on one response: verdicts, or the error that took their place."""

    verdicts: tuple[Verdict, ...] = ()
    error: str | None = None


class Verifier(Protocol):
    """Scores one response. Raises when it cannot; the message is for the user."""

    is_async: bool
    required_columns: frozenset[str]  # dataset columns it cannot do without

    def __call__(self, item: RewardInput) -> list[Verdict] | Awaitable[list[Verdict]]: ...


@dataclass(frozen=True, slots=True)
class Component:
    """One reward component of one rollout. ``value`` is None exactly when ``error`` is set."""

    name: str
    weight: float
    value: float | None  # before its weight
    label: str | None
    explanation: str | None
    latency_s: float  # of one call for many rollouts: this one's share
    error: str | None
    answer: str | None = None  # as in Verdict


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one rollout: the weighted sum of its components.

    None where a component failed, unless ``on_error`` is zero: nothing can be learned from the rollout then.
    """

    rollout_id: str
    reward: float | None
    components: tuple[Component, ...]

    @property
    def error(self) -> str | None:
        """The first component that failed, and why."""
        failed = [component for component in self.components if component.error is not None]
        return f"{failed[0].name}: {failed[0].error}" if failed else None

    @property
    def answer(self) -> str | None:
        """Final answer that the first component which reads one found; None when none of them reads any."""
        return next((component.answer for component in self.components if component.answer is not None), None)


class ComponentFailed(RewardError):
    """A component failed while ``on_error`` is fail. ``results``: what was scored until then, the failed included."""

    def __init__(self, message: str, results: list[RewardResult]) -> None:
        super().__init__(message)
        self.results = results
