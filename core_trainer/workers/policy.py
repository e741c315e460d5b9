"""The policy worker: trains the policy and samples from it with a rollout engine in the same process.

``sample``, ``log_probs``, ``forward_backward``, ``optim_step``, ``sync_weights`` and ``save`` are separate calls; the
controller's loop composes them. Ranks are data-parallel: equal weights, gradients summed over ranks in ``optim_step``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from core_trainer import attention, checkpoint, models
from core_trainer.algorithms import kl, policy_losses
from core_trainer.batching import PackedBatch, TrainSample, micro_batches, pack
from core_trainer.forward import log_probs, sample_log_probs
from core_trainer.job import Job
from core_trainer.metrics import TokenStats, token_stats
from core_trainer.optimizer import MasterOptimizer, OptimizerStats
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.sample import Group, sample_rollouts
from core_trainer.types import Rollout, SamplingParams
from core_trainer.workers.base import Place, Worker, use_threads
from rlinsight import names, telemetry
from rlinsight.config import AlgorithmSection, Config

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


class PolicyWorker(Worker):
    """One data-parallel rank of the policy, with its rollout engine."""

    BUCKETS: Mapping[str, str] = {"log_probs": "productive", "save": "overhead"}

    def __init__(self, place: Place, job: Job, config: Config, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.config = config
        self.temperature = config.rollout.temperature
        self.micro_batch_tokens = config.trainer.micro_batch_tokens
        self.model_name = config.model.source
        self.policy_version = 0

    def start(self, model_dir: Path, resume: Path | None, port: int | None) -> None:
        """Load the model, or the checkpoint ``resume``, and meet the other ranks at ``port``."""
        place = self.place
        use_threads(place.world_size)
        if port is not None:
            address = f"tcp://127.0.0.1:{port}"
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, address, RENDEZVOUS_TIMEOUT, place.world_size, place.rank)
        with telemetry.span(names.LOAD_MODEL, {names.PATH: str(resume or model_dir)}):
            self._load(self.config, model_dir, resume)

    def _load(self, config: Config, model_dir: Path, resume: Path | None) -> None:
        """Masters from full-precision weights first, then the model itself in the compute dtype."""
        source = resume or model_dir
        self.model = models.load_model(source, torch.float32)
        models.to_accelerator(self.model)
        compute_dtype = models.compute_dtype(config.model.compute_dtype)
        master_dtype = torch.float32 if config.model.master_dtype == "float32" else compute_dtype
        self.optimizer = MasterOptimizer(self.model, config.trainer, master_dtype)
        for parameter in self.model.parameters():  # not model.to(): rotary tables stay in float32
            parameter.data = parameter.data.to(compute_dtype)
        attention.enable(self.model)
        self.tokenizer = models.load_tokenizer(source)
        self.model_dir = source
        if resume is not None:
            self.policy_version = checkpoint.load_optimizer(resume, self.optimizer)
        self.engine = build_engine(config.rollout, config.data, self.model, self.tokenizer, self.model_dir)

    def sample(self, groups: Sequence[Group], params: SamplingParams) -> list[Rollout]:
        """Sample every rollout of the groups."""
        piece = lru_cache(maxsize=None)(lambda token: models.decode(self.tokenizer, [token], special=True))
        return asyncio.run(sample_rollouts(self.engine, groups, params, piece, self.place.lane, self.model_name))

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probs [T] of each sample's tokens under the current weights."""
        return sample_log_probs(self.model, samples, self.temperature, self.micro_batch_tokens)

    def forward_backward(self, samples: Sequence[TrainSample], algorithm: AlgorithmSection, record: bool) -> TokenStats:
        """Add the loss gradient of ``samples`` to the accumulated one. ``record`` emits what each token went
        through.
        """
        stats = TokenStats()
        for part in micro_batches(samples, self.micro_batch_tokens):
            batch = pack(part, self.model.device)
            size = batch.input_ids.numel()
            with telemetry.span(names.MICRO_BATCH, {names.NUM_TOKENS: size, names.BUCKET: "productive"}):
                stats = stats.merge(self._micro_batch(batch, algorithm, record))
        return stats

    def _micro_batch(self, batch: PackedBatch, algorithm: AlgorithmSection, record: bool) -> TokenStats:
        current, entropy = log_probs(self.model, batch, self.temperature)
        detached = current.detach()
        on_policy = batch.samples[0].old_log_probs is None
        old = detached if on_policy else batch.gather("old_log_probs")
        mask = batch.gather("loss_mask", torch.bool)
        advantages = batch.gather("advantages")
        weights = batch.per_token("token_weight") * mask
        loss, ratio, clipped = policy_losses.ppo_clip(
            current,
            old,
            advantages,
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        policy_loss = total = (loss * weights).sum()
        ref, kl_loss = None, torch.zeros(())
        if algorithm.kl_coef:
            ref = batch.gather("ref_log_probs")
            kl_loss = (kl.estimate(algorithm.kl_estimator, current, ref) * weights).sum()
            total = policy_loss + algorithm.kl_coef * kl_loss
        total.backward()
        self.optimizer.accumulate()
        staleness = self.policy_version - batch.per_token("policy_version")
        rollout = batch.gather("rollout_log_probs")
        stats = token_stats(mask, detached, old, rollout, ref, entropy, ratio, clipped, staleness)
        stats.policy_loss, stats.kl_loss = float(policy_loss.detach()), float(kl_loss.detach())
        if record:
            self._record(batch, old, detached, entropy, clipped)
        return stats

    def _record(self, batch: PackedBatch, old: Tensor, current: Tensor, entropy: Tensor, clipped: Tensor) -> None:
        """One event per turn consumed: its advantage and per-token arrays."""
        columns = zip(batch.samples, *(batch.split(x) for x in (old, current, entropy, clipped)), strict=True)
        for sample, olds, currents, entropies, cuts in columns:
            for index, start, end in sample.turns:
                part = slice(start, end)
                arrays = {
                    names.LOSS_MASK: sample.loss_mask[part].astype("u1"),
                    names.OLD_LOG_PROBS_ARRAY: olds[part].astype("<f4"),
                    names.LOG_PROBS_ARRAY: currents[part].astype("<f4"),
                    names.ENTROPY_ARRAY: entropies[part].astype("<f4"),
                    names.ADVANTAGES_ARRAY: sample.advantages[part].astype("<f4"),
                    names.CLIPPED_ARRAY: cuts[part].astype("u1"),
                }
                if sample.ref_log_probs is not None:
                    arrays[names.REF_LOG_PROBS_ARRAY] = sample.ref_log_probs[part].astype("<f4")
                telemetry.event(
                    names.ROLLOUT_TRAINED,
                    {
                        names.ROLLOUT_ID: sample.rollout_id,
                        names.TURN_INDEX: index,
                        names.POLICY_VERSION: self.policy_version,
                        names.ADVANTAGE: float(sample.advantages[start]),
                        **{name: array.tobytes() for name, array in arrays.items()},
                    },
                    carrier=sample.carrier,
                )

    def optim_step(self, step: int) -> OptimizerStats:
        """Sum gradients over ranks, clip, update. The rollout engine keeps the old weights until ``sync_weights``."""
        with telemetry.span(names.OPTIMIZER, {names.BUCKET: "productive"}):
            stats = self.optimizer.step(step)
        self.policy_version += 1
        return stats

    def sync_weights(self) -> None:
        """Publish the current weights to the rollout engine."""
        attributes = {
            names.POLICY_VERSION: self.policy_version,
            names.ENGINE: self.engine.name,
            names.REPLICA: self.place.lane,
            names.BUCKET: "overhead",
        }
        with telemetry.span(names.WEIGHT_SYNC, attributes) as span:
            synced = self.engine.sync_weights(self.policy_version)
            span.set({names.BYTES: synced.moved, names.REFRESHED_BYTES: synced.refreshed})

    def version(self) -> int:
        """Optimizer steps applied to the weights."""
        return self.policy_version

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint being made; rank 0 only, all ranks hold the same."""
        checkpoint.save_policy(directory, self.model, self.model_dir, self.optimizer, self.policy_version)
