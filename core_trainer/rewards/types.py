"""What goes into a reward and what comes out of it."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from core_trainer.types import Prompt


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One rollout to score."""

    rollout_id: str
    prompt: Prompt
    response: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says about one response."""

    value: float
    label: str | None = None  # such as correct, wrong, no_number
    explanation: str | None = None  # what the verifier saw, in one line
    part: str | None = None  # set when one function scores several things


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
    latency_s: float
    error: str | None


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one rollout: the weighted sum of its components, failed ones counting 0."""

    rollout_id: str
    reward: float
    components: tuple[Component, ...]
