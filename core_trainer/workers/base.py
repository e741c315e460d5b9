"""What every worker process has: its place in the group, telemetry, threads, and one entry point for remote calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from core_trainer.job import Job
from rlinsight import names, store, telemetry
from rlinsight.config import TelemetrySection

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its group."""

    role: str
    rank: int
    world_size: int

    @property
    def lane(self) -> str:
        """Row of the timeline."""
        return f"{self.role}/{self.rank}"


class Worker:
    """Base of the Ray actors. What can fail belongs in ``start``: Ray buries the errors of constructors.

    ``BUCKETS`` says what the time of a method counts as, of those whose work has no spans of its own.
    """

    BUCKETS: Mapping[str, str] = {}

    def __init__(self, place: Place, job: Job, section: TelemetrySection, resource: dict[str, str]) -> None:
        self.place = place
        if not section.enabled:
            return
        telemetry.setup(
            place.role,
            spool_dir=job.spool_dir,
            run_id=job.run_id,
            attempt=job.attempt,
            endpoint=job.collector,
            token=job.token,
            locate=partial(store.locate, job.store) if job.store else None,
            rank=place.rank,
            world_size=place.world_size,
            text=section.text,
            token_arrays=section.token_arrays,
            token_decimals=section.token_decimals,
            spool_bytes=section.spool_bytes,
            metrics_interval_s=section.metrics_interval_s,
            system=section.system_metrics,
            resource=resource,
        )

    def execute(self, method: str, carrier: dict[str, str], step: int | None, args: tuple[Any, ...]) -> Any:
        """Run one method as a span under the caller's."""
        attributes = {names.METHOD: method, names.BUCKET: self.BUCKETS.get(method)}
        call = telemetry.span(names.WORKER_CALL, attributes, carrier=carrier, announce=True)
        with telemetry.step_context(step), call:
            return getattr(self, method)(*args)

    def close(self) -> bool:
        """Deliver what is recorded; True if the collector has all of it."""
        return telemetry.shutdown()


def meet(place: Place, port: int | None) -> None:
    """Join the process group of the ranks at ``port``; a group of one has none to join."""
    if port is None:
        return
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", RENDEZVOUS_TIMEOUT, place.world_size, place.rank
    )


def use_threads(world_size: int) -> None:
    """Share the machine's cores among the ranks on it. Ray starts workers with one thread each."""
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
