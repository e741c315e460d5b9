"""The critic worker: a value model of its own, trained beside the policy.

``values``, ``forward_backward``, ``optim_step`` and ``save`` are separate calls, as the policy's are. Ranks are
data-parallel: equal weights, gradients summed over ranks in ``optim_step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from core_trainer import attention, checkpoint, models, value_model
from core_trainer.batching import TrainSample, micro_batches, pack
from core_trainer.forward import checkpoint_layers
from core_trainer.job import Job
from core_trainer.optimizer import MasterOptimizer, OptimizerStats
from core_trainer.value_model import ValueStats
from core_trainer.workers.base import Place, Worker, meet, use_threads
from core_trainer.workers.recording import record_trained
from rlinsight import names, telemetry
from rlinsight.config import Config
from rlinsight.config.critic import ModelCritic


class CriticWorker(Worker):
    """One data-parallel rank of the critic."""

    BUCKETS: Mapping[str, str] = {"values": "productive", "save": "overhead"}

    def __init__(self, place: Place, job: Job, config: Config, section: ModelCritic, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.section = section
        self.model_section = config.model
        own = {"learning_rate": section.learning_rate, "max_grad_norm": section.max_grad_norm}
        self.trainer = config.trainer.model_copy(update=own)
        self.seed = config.run.seed

    def start(self, model_dir: Path, resume: Path | None, port: int | None) -> None:
        """Load the critic saved in ``resume``, or begin one from the model or critic in ``model_dir``, and meet the
        other ranks at ``port``.
        """
        place = self.place
        use_threads(place.world_size)
        meet(place, port)
        with telemetry.span(names.LOAD_MODEL, {names.PATH: str(resume or model_dir)}):
            self._load(model_dir, resume)

    def _load(self, model_dir: Path, resume: Path | None) -> None:
        """Masters from full-precision weights first, then the decoder in the compute dtype; the head stays float32."""
        self.source = resume or model_dir
        self.model = value_model.load(self.source, None if resume else self.seed)
        self.decoder, self.head = self.model.decoder, self.model.value_head
        if torch.cuda.is_available():  # untested
            self.model.cuda()
        compute_dtype = models.compute_dtype(self.model_section.compute_dtype)
        master_dtype = torch.float32 if self.model_section.master_dtype == "float32" else compute_dtype
        self.optimizer = MasterOptimizer(self.model, self.trainer, master_dtype)
        for parameter in self.decoder.parameters():  # not model.to(): rotary tables stay in float32
            parameter.data = parameter.data.to(compute_dtype)
        attention.enable(self.decoder)
        if self.trainer.gradient_checkpointing:
            checkpoint_layers(self.decoder)
        if resume is not None:
            checkpoint.load_optimizer(resume, self.optimizer)

    def values(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        """Values [T] of each sample's tokens under the current weights, by the name of TrainSample's field."""
        budget = self.trainer.micro_batch_tokens
        return {"values": value_model.sample_values(self.decoder, self.head, samples, budget)}

    def forward_backward(self, samples: Sequence[TrainSample], record: bool = False) -> ValueStats:
        """Add the value loss gradient of ``samples``, whose values and returns are set, to the accumulated one.

        ``record`` emits what each token went through, in a step that leaves the policy as it sampled them.
        """
        stats = ValueStats()
        for part in micro_batches(samples, self.trainer.micro_batch_tokens):
            batch = pack(part, self.decoder.device)
            size = batch.input_ids.numel()
            with telemetry.span(names.MICRO_BATCH, {names.NUM_TOKENS: size, names.BUCKET: "productive"}):
                current = value_model.values(self.decoder, self.head, batch)
                loss, found = value_model.weighted_value_loss(current, batch, self.section.clip)
                loss.backward()
                self.optimizer.accumulate()
            stats = stats.merge(found)
            for sample in part if record else ():
                record_trained(sample, sample.policy_version)
        return stats

    def optim_step(self, step: int) -> OptimizerStats:
        """Sum gradients over ranks, clip, update."""
        with telemetry.span(names.OPTIMIZER, {names.BUCKET: "productive"}):
            return self.optimizer.step(step)

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into the critic's part of a checkpoint; rank 0 only, all ranks hold the same."""
        value_model.save(directory, self.model, self.source, self.optimizer)
