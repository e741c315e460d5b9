"""One device, two users: a rollout engine and the trainer of its weights in the same process.

Owns whose turn it is in device memory, and the ledger of weight syncs. Does not own what an engine gives up when it
sleeps, nor how it takes weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from core_trainer import lora
from core_trainer.optimizer import MasterOptimizer
from core_trainer.rollout import checksum
from core_trainer.rollout.engine import RolloutEngine, WeightSync
from rlinsight import names, telemetry

User = Literal["generating", "training"]


@dataclass(frozen=True, slots=True)
class Published:
    """A ledger entry: what one replica was given, and what it has."""

    policy_version: int
    checksum_trained: str
    sync: WeightSync

    @property
    def is_stale(self) -> bool:
        """Whether the replica is known to serve other weights than these."""
        served = self.sync.checksum_served
        return served is not None and served != self.checksum_trained


class HybridEngine:
    """A rollout engine with its trainer. Generating needs the engine awake, training needs the optimizers' state.

    Whoever does either enters its context; memory changes hands only where the last user was the other one, in one
    span. On a CPU both have all of it at all times, and the span says 0 bytes.
    """

    def __init__(self, engine: RolloutEngine, model: PreTrainedModel, optimizers: Sequence[MasterOptimizer]) -> None:
        self.engine = engine
        self._model, self._optimizers = model, optimizers
        self._user: User | None = None  # None: both were just built and have what they need

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The engine has the device."""
        self._hand_over("generating")
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer has the device."""
        self._hand_over("training")
        yield

    def _hand_over(self, user: User) -> None:
        if self._user == user:
            return
        attributes = {names.HANDOVER_TO: user, names.ENGINE: self.engine.name, names.BUCKET: "overhead"}
        with telemetry.span(names.HANDOVER, attributes) as span:
            # What is given up goes first: the two need not fit beside each other.
            if user == "generating":
                moved = sum(optimizer.offload() for optimizer in self._optimizers) + self.engine.wake()
            else:
                moved = self.engine.sleep() + sum(optimizer.reload() for optimizer in self._optimizers)
            span.set({names.HANDOVER_BYTES: moved})
        self._user = user

    def publish(self, policy_version: int) -> list[Published]:
        """Have every replica serve the model's current weights: one ledger entry and one span each.

        Raises EngineError when a replica did not take them.
        """
        with self.generating(), checksum.weights_at_rest():
            start_ns = time.time_ns()
            facts = {names.POLICY_VERSION: policy_version, names.ENGINE: self.engine.name, names.BUCKET: "overhead"}
            trained = checksum.of(lora.merged_state(self._model).items())
            try:
                syncs = self.engine.sync_weights(policy_version)
            except Exception as error:  # whatever it is, the ledger's span says that no weights were taken
                failed = {names.CHECKSUM_TRAINED: trained, names.ERROR_TYPE: type(error).__name__}
                facts |= {names.REPLICA: self.engine.replica} | failed
                telemetry.record_span(names.WEIGHT_SYNC, start_ns, time.time_ns(), facts, error=error)
                raise
            end_ns = time.time_ns()
            ledger = [Published(policy_version, trained, sync) for sync in syncs]
            for entry in ledger:
                began, ended = entry.sync.start_ns or start_ns, entry.sync.end_ns or end_ns
                telemetry.record_span(names.WEIGHT_SYNC, began, ended, facts | _facts(entry))
        return ledger

    def close(self) -> None:
        """Release what the engine holds."""
        self.engine.close()


def _facts(entry: Published) -> dict[str, str | int | None]:
    sync = entry.sync
    return {
        names.REPLICA: sync.replica,
        names.BYTES: sync.moved,
        names.REFRESHED_BYTES: sync.refreshed,
        names.PAUSE_MODE: sync.pause_mode,
        names.SYNC_IN_FLIGHT: sync.in_flight,
        names.SYNC_ABORTED: sync.aborted,
        names.CHECKSUM_TRAINED: entry.checksum_trained,
        names.CHECKSUM_SERVED: sync.checksum_served,
    }
