"""What launch hands the trainer and what it gets back. Loads no torch and no ray, so launch can import it early."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Job:
    """Identity and places of one attempt of a run."""

    run_id: str
    attempt: int  # 1 for the first start, +1 per resume
    run_dir: Path  # checkpoints/ live here
    spool_dir: Path  # undelivered telemetry of every process of the run
    collector: str | None  # base URL of the collector's OTLP/HTTP endpoint; None records to the spool only
    resume: Path | None = None  # checkpoint directory to start from
    token: str | None = field(default=None, repr=False)  # the collector's; it asks for it beyond loopback
    store: Path | None = None  # absolute; tells where the collector is when another one has taken over


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step, for people watching."""

    step: int
    total_steps: int
    seconds: float
    metrics: dict[str, float | None]  # by the names of rlinsight.names.METRICS


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How the attempt went."""

    status: Literal["finished", "interrupted"]
    step: int  # last finished step
    curve: list[float]  # of each step of this attempt the number it is about: mean reward, or loss of a supervised run
    checkpoint: Path | None  # newest resumable checkpoint


class Reporter(Protocol):
    """Where progress goes."""

    def stage(self, text: str) -> None:
        """Say what is happening before the first step or after the last."""

    def step(self, report: StepReport) -> None:
        """Say that a step is done."""

    def stop_requested(self) -> bool:
        """True once the user asked for a stop: the loop finishes its step, writes a checkpoint and returns."""
        ...
