"""The worker of a supervised run: one data-parallel rank of the model, without a rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from core_trainer import attention, checkpoint
from core_trainer.batching import TrainSample, micro_batches, pack
from core_trainer.forward import checkpoint_layers, log_probs
from core_trainer.job import Job
from core_trainer.optimizer import OptimizerStats
from core_trainer.workers.base import Place, Worker, meet, use_threads
from rlinsight import names, telemetry
from rlinsight.config import SftConfig


class SftWorker(Worker):
    """Trains on responses; ranks hold equal weights, gradients are summed over them in ``optim_step``."""

    BUCKETS: Mapping[str, str] = {"loss": "productive", "save": "overhead"}

    def __init__(self, place: Place, job: Job, config: SftConfig, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.config, self.trainer = config, config.trainer

    def start(self, model_dir: Path, resume: Path | None, port: int | None) -> None:
        """Load the model, or the checkpoint ``resume``, and meet the other ranks at ``port``."""
        place, section = self.place, self.config.model
        use_threads(place.world_size)
        meet(place, port)
        with telemetry.span(names.LOAD_MODEL, {names.PATH: str(resume or model_dir)}):
            self.model_dir = model_dir
            self.model, self.optimizer, _ = checkpoint.load_policy(
                section, self.trainer, model_dir, resume, self.config.run.seed
            )
            attention.enable(self.model)
            if self.trainer.gradient_checkpointing:
                checkpoint_layers(self.model)

    def forward_backward(self, samples: Sequence[TrainSample]) -> float:
        """Add the gradient of sum(token_weight * -log_prob) to the accumulated one; returns that sum."""
        total = 0.0
        for part in micro_batches(samples, self.trainer.micro_batch_tokens):
            batch = pack(part, self.model.device)
            size = batch.input_ids.numel()
            with telemetry.span(names.MICRO_BATCH, {names.NUM_TOKENS: size, names.BUCKET: "productive"}):
                current, _ = log_probs(self.model, batch, 1.0)
                loss = -(current * batch.per_token("token_weight")).sum()
                loss.backward()
                self.optimizer.accumulate()
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def loss(self, samples: Sequence[TrainSample]) -> float:
        """Sum of -log_prob over the response tokens of ``samples``, in float64; no gradient."""
        total = 0.0
        for part in micro_batches(samples, self.trainer.micro_batch_tokens):
            current, _ = log_probs(self.model, pack(part, self.model.device), 1.0)
            total -= float(current.double().sum())
        return total

    def optim_step(self, step: int) -> OptimizerStats:
        """Sum gradients over ranks, clip, update."""
        with telemetry.span(names.OPTIMIZER, {names.BUCKET: "productive"}):
            return self.optimizer.step(step)

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint being made; rank 0 only, all ranks hold the same."""
        checkpoint.save_policy(directory, self.model, self.model_dir, self.optimizer, self.optimizer.num_updates)
