"""A group of equal workers behind one object: spawn, dispatch by rank, collect.

The controller calls ``group.call("method", ...)`` on all ranks or ``group.scatter("method", parts)`` with one part per
rank, and gets results in rank order. World size 1 takes the same path.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

from core_trainer.batch import balanced_groups
from core_trainer.batching import TrainSample
from core_trainer.workers.base import Place, Worker
from rlinsight import telemetry
from rlinsight.errors import RlinsightError, WorkerError

ANSI = re.compile(r"\x1b\[[0-9;]*m")  # Ray colours its messages


class WorkerGroup:
    """``world_size`` Ray actors of one role."""

    def __init__(self, worker: type[Worker], role: str, world_size: int, *args: Any, num_gpus: float = 0) -> None:
        self.role = role
        self.world_size = world_size
        self._hung: WorkerError | None = None  # a worker that hangs answers nothing any more
        # Workers of all roles take turns on the same cores (colocated), so none of them reserves any.
        actor = ray.remote(worker).options(num_cpus=0, num_gpus=num_gpus, max_concurrency=1)  # type: ignore[attr-defined]
        self._actors = [actor.remote(Place(role, rank, world_size), *args) for rank in range(world_size)]

    def call(self, method: str, *args: Any, step: int | None = None, timeout_s: float | None = None) -> list[Any]:
        """Same arguments to every rank; results in rank order.

        Raises WorkerError, as does every later call, when a rank has not answered after ``timeout_s``: it hangs.
        """
        return self._dispatch(method, [args] * self.world_size, step, timeout_s)

    def scatter(
        self, method: str, parts: Sequence[Any], *args: Any, step: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """``parts[rank]`` as the first argument of each rank; results in rank order. ``timeout_s`` as in ``call``."""
        return self._dispatch(method, [(part, *args) for part in parts], step, timeout_s)

    def call_rank(self, rank: int, method: str, *args: Any, step: int | None = None) -> Any:
        """One rank alone."""
        carrier = telemetry.inject()
        return self._collect(method, [self._actors[rank].execute.remote(method, carrier, step, args)])[0]

    def split_groups(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """One part per rank, groups kept whole, tokens balanced; ``batch.attach`` puts results back."""
        return balanced_groups(samples, self.world_size)

    def split(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Cut items into one contiguous part per rank, sizes as equal as they can be."""
        size, extra = divmod(len(items), self.world_size)
        bounds = [rank * size + min(rank, extra) for rank in range(self.world_size + 1)]
        return [items[start:end] for start, end in itertools.pairwise(bounds)]

    def close(self, timeout_s: float) -> None:
        """Let workers deliver their telemetry, then end them. Never raises: a dead worker is already closed."""
        with suppress(Exception):  # a dead or hung worker has nothing more to say; its spool is delivered later
            ray.get([actor.close.remote() for actor in self._actors], timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)  # type: ignore[arg-type]  # an actor handle, by another name

    def _dispatch(
        self, method: str, args: Sequence[tuple[Any, ...]], step: int | None, timeout_s: float | None = None
    ) -> list[Any]:
        carrier = telemetry.inject()
        calls = zip(self._actors, args, strict=True)
        references = [actor.execute.remote(method, carrier, step, each) for actor, each in calls]
        return self._collect(method, references, timeout_s)

    def _collect(self, method: str, references: list[Any], timeout_s: float | None = None) -> list[Any]:
        if self._hung is not None:
            raise self._hung
        try:
            return ray.get(references, timeout=timeout_s)
        except GetTimeoutError:
            self._hung = WorkerError(
                f"a {self.role} worker has not answered {method} for {timeout_s:g} s: it hangs; go on from the last "
                "checkpoint with --resume"
            )
            raise self._hung from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RlinsightError):
                raise cause from None
            raise
        except OutOfMemoryError:
            raise WorkerError(
                f"a {self.role} worker was killed for lack of memory; lower trainer.micro_batch_tokens or "
                "rollout.max_batch_size and go on with --resume"
            ) from None
        except RayError as error:
            reason = ANSI.sub("", str(error)).split("\n")[0]
            raise WorkerError(
                f"a {self.role} worker died ({reason}); go on from the last checkpoint with --resume"
            ) from None


def free_port() -> int:
    """A TCP port nobody listens on, for the ranks to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
