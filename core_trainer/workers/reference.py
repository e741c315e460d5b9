"""The reference worker: the frozen policy that the KL loss is measured from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from core_trainer import attention, models
from core_trainer.batching import TrainSample
from core_trainer.forward import sample_log_probs
from core_trainer.job import Job
from core_trainer.workers.base import Place, Worker, use_threads
from rlinsight import names, telemetry
from rlinsight.config import Config


class ReferenceWorker(Worker):
    """One data-parallel rank of the reference, in the compute dtype."""

    BUCKETS: Mapping[str, str] = {"ref_log_probs": "productive"}

    def __init__(self, place: Place, job: Job, config: Config, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.section = config.model
        self.temperature = config.rollout.temperature
        self.micro_batch_tokens = config.trainer.micro_batch_tokens

    def start(self, model_dir: Path) -> None:
        """Load the frozen model."""
        use_threads(self.place.world_size)
        with telemetry.span(names.LOAD_MODEL, {names.PATH: str(model_dir)}):
            self.model = models.load_model(model_dir, models.compute_dtype(self.section.compute_dtype))
            models.to_accelerator(self.model)
            attention.enable(self.model)

    def ref_log_probs(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        """Log-probs [T] of each sample's tokens, by the name of TrainSample's field."""
        return {"ref_log_probs": sample_log_probs(self.model, samples, self.temperature, self.micro_batch_tokens)}
