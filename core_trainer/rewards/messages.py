"""What the scorer and its verifier processes say to each other, pickled over a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from core_trainer.rewards.types import Outcome, RewardInput
from rlinsight.config import DataSection, RewardFunction


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a process: the functions it will be asked for, by index."""

    functions: tuple[RewardFunction, ...]
    datasets: tuple[DataSection, ...]


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
    """Score items with one function: several when it is batched, else one."""

    call_id: int
    function: int
    items: tuple[RewardInput, ...]
    timeout_s: float

    def failed(self, error: str, latency_s: float) -> Reply:
        """The reply to a call that failed as a whole."""
        return Reply(self.call_id, tuple(Outcome(error=error) for _ in self.items), latency_s)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to Call: an outcome for each item."""

    call_id: int
    outcomes: tuple[Outcome, ...]
    latency_s: float

    @property
    def has_failed(self) -> bool:
        """Whether any of the items could not be scored."""
        return any(outcome.error is not None for outcome in self.outcomes)
