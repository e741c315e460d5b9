"""What the scorer and its verifier processes say to each other, pickled over a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import DataSection, RewardFunction


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a process: the functions it will be asked for, by index."""

    functions: tuple[RewardFunction, ...]
    data: DataSection


@dataclass(frozen=True, slots=True)
class Traits:
    """What a process found out about one function by loading it."""

    is_async: bool
    required_columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ready:
    """Answer to Setup: every function is loaded."""

    traits: tuple[Traits, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to Setup: a function cannot be used; ``message`` is for the user."""

    message: str


@dataclass(frozen=True, slots=True)
class Call:
    """Score one item with one function."""

    call_id: int
    function: int
    item: RewardInput
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to Call: verdicts, or the error that took their place."""

    call_id: int
    verdicts: tuple[Verdict, ...]
    error: str | None
    latency_s: float
