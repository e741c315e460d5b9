"""The policy worker: trains the policy and samples from it with a rollout engine in the same process.

``sample``, ``log_probs``, ``forward_backward``, ``optim_step``, ``sync_weights`` and ``save`` are separate calls; the
controller's loop composes them. Ranks are data-parallel: equal weights, gradients summed over ranks in ``optim_step``.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from core_trainer import attention, checkpoint, lora, models, value_model
from core_trainer.algorithms import kl, policy_losses, registry
from core_trainer.algorithms.numerics import fill
from core_trainer.algorithms.registry import TokenLoss
from core_trainer.batching import PackedBatch, TrainSample, micro_batches, pack
from core_trainer.exact import level
from core_trainer.forward import checkpoint_layers, sample_log_probs, sample_scores, scores
from core_trainer.job import Job
from core_trainer.metrics import TokenStats, token_stats
from core_trainer.optimizer import MasterOptimizer, OptimizerStats, step_together
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.hybrid import HybridEngine, Published
from core_trainer.rollout.router import Router
from core_trainer.rollout.sample import Group, Sampler
from core_trainer.types import Rollout, SamplingParams
from core_trainer.value_model import ValueHead, ValueStats
from core_trainer.workers.base import Place, Worker, meet, use_threads
from core_trainer.workers.recording import record_trained
from rlinsight import names, telemetry
from rlinsight.config import Config
from rlinsight.config.critic import SharedCritic

if TYPE_CHECKING:
    from core_trainer.rollout.vllm.servers import Address

CRITIC = "critic"  # the critic's part of a checkpoint


class PolicyWorker(Worker):
    """One data-parallel rank of the policy, with its rollout engine."""

    BUCKETS: Mapping[str, str] = {
        "log_probs": "productive",
        "current_log_probs": "productive",
        "ref_log_probs": "productive",
        "save": "overhead",
        "save_value_head": "overhead",
    }

    hybrid: HybridEngine  # with the rollout engine, once started

    def __init__(self, place: Place, job: Job, config: Config, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        if config.rollout.exact != "off":
            level.prepare(config.rollout.exact)
        self.config, self.run_id = config, job.run_id
        self.temperature = config.rollout.temperature
        self.micro_batch_tokens = config.trainer.micro_batch_tokens
        critic = config.algorithm.model_critic
        self.first_step = 1 if critic is None else critic.warmup_steps + 1  # that trains the policy
        self.policy_version = 0
        self.synced: int | None = None  # policy_version of the weights the rollout engine has
        self.head: ValueHead | None = None  # of a critic that shares this model

    def start(
        self, model_dir: Path, resume: Path | None, port: int | None, servers: Sequence[Address] = ()
    ) -> list[str]:
        """Load the model, or the checkpoint ``resume``, and meet the other ranks at ``port``; the names of the replicas
        that this rank samples with.

        ``servers`` are those that the run has started, for all ranks.
        """
        place, algorithm = self.place, self.config.algorithm
        registry.load_plugins(algorithm.plugins)
        self.wants_sum_pi_squared = "sum_pi_squared" in registry.find("advantage", algorithm.advantage.type).inputs
        self.policy_loss = registry.find("policy_loss", algorithm.policy_loss.type)
        use_threads(place.world_size)
        meet(place, port)
        with telemetry.span(names.LOAD_MODEL, {names.PATH: str(resume or model_dir)}):
            self._load(self.config, model_dir, resume, servers)
        gc.collect()
        gc.freeze()  # what is loaded stays, and is not walked through in the middle of a step, which takes 0.2 s
        engine = self.hybrid.engine
        return [replica.name for replica in engine.replicas] if isinstance(engine, Router) else [engine.replica]

    def _load(self, config: Config, model_dir: Path, resume: Path | None, servers: Sequence[Address]) -> None:
        self.model_dir = model_dir
        self.model, self.optimizer, self.policy_version = checkpoint.load_policy(
            config.model, config.trainer, model_dir, resume, config.run.seed
        )
        attention.enable(self.model)
        if config.trainer.gradient_checkpointing:
            checkpoint_layers(self.model)
        if isinstance(config.algorithm.critic, SharedCritic):
            self._load_value_head(config.algorithm.critic, resume / CRITIC if resume else None)
        self.tokenizer = models.load_tokenizer(model_dir)
        merge = config.model.lora is None or config.model.lora.sync == "merged"
        rollout = config.rollout.model_copy(update={"max_new_tokens": config.longest_response})
        place = self.place
        engine = build_engine(
            rollout,
            config.data,
            self.model,
            self.tokenizer,
            model_dir,
            merge,
            place.lane,
            rank=place.rank,
            world_size=place.world_size,
            servers=servers,
            run_id=self.run_id,
        )
        optimizers = [self.optimizer] if self.head is None else [self.optimizer, self.head_optimizer]
        self.hybrid = HybridEngine(engine, self.model, optimizers)
        piece = lru_cache(maxsize=None)(lambda token: models.decode(self.tokenizer, [token], special=True))
        words = self.model.get_input_embeddings()
        assert isinstance(words, nn.Embedding), "a causal model looks its words up"
        self.sampler = Sampler(engine, rollout, config.model.source, words.num_embeddings, piece)

    def _load_value_head(self, section: SharedCritic, resume: Path | None) -> None:
        """A head on the policy's hidden states. It has an optimizer of its own, so that its gradient's size does not
        decide how far the policy's is clipped, and it may learn faster than the backbone.
        """
        width = self.model.config.hidden_size
        self.head = value_model.load_head(resume or self.model_dir, width, None if resume else self.config.run.seed)
        self.head.to(self.model.device)
        trainer = self.config.trainer.model_copy(update={"learning_rate": section.learning_rate})
        self.head_optimizer = MasterOptimizer(self.head, trainer, torch.float32)
        if resume is not None:
            checkpoint.load_optimizer(resume, self.head_optimizer)

    def sample(self, groups: Sequence[Group], params: SamplingParams) -> list[Rollout]:
        """Sample every rollout of the groups.

        Nothing sampled before shows: a prefix from the engine's cache is computed in other shapes than one that is not
        there, and a run that validates, or resumes, would go on with other bits than one that does not.
        """
        self.hybrid.engine.forget()
        with self.hybrid.generating():
            return asyncio.run(self.sampler.sample(groups, params))

    def log_probs(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        """Under the current weights, arrays [T] of each sample's tokens by the name of TrainSample's field: their
        log-probs, the values of a head on this model, and the sum of squared probabilities where an advantage asks.
        """
        how = (samples, self.temperature, self.micro_batch_tokens)
        wanted = self.wants_sum_pi_squared
        with self.hybrid.training():
            if self.head is not None:
                scored = value_model.sample_scores_and_values(self.model, self.head, *how, sum_pi_squared=wanted)
            else:
                scored = sample_scores(self.model, *how, sum_pi_squared=wanted)
        kept = {"log_probs": "old_log_probs", "values": "values", "sum_pi_squared": "sum_pi_squared"}
        return {kept[name]: arrays for name, arrays in scored.items() if name in kept}

    def current_log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probs [T] of each sample's tokens under the current weights, for ``batch.set_losses``."""
        with self.hybrid.training():
            return sample_log_probs(self.model, samples, self.temperature, self.micro_batch_tokens)

    def ref_log_probs(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        """Log-probs [T] under the model without its adapters, which is the reference of a policy that trains only
        those.
        """
        with self.hybrid.training(), lora.disabled(self.model):
            return {"ref_log_probs": sample_log_probs(self.model, samples, self.temperature, self.micro_batch_tokens)}

    def forward_backward(
        self, samples: Sequence[TrainSample], kl_coef: float, record: bool
    ) -> tuple[TokenStats, ValueStats]:
        """Add the loss gradient of ``samples`` to the accumulated one. ``record`` emits what each token went
        through. A loss of the whole mini-batch is one that ``batch.set_losses`` has set.
        """
        stats, values = TokenStats(), ValueStats()
        with self.hybrid.training():
            for part in micro_batches(samples, self.micro_batch_tokens):
                batch = pack(part, self.model.device)
                size = batch.input_ids.numel()
                with telemetry.span(names.MICRO_BATCH, {names.NUM_TOKENS: size, names.BUCKET: "productive"}):
                    found = self._micro_batch(batch, kl_coef, record)
                stats, values = stats.merge(found[0]), values.merge(found[1])
        return stats, values

    def _micro_batch(self, batch: PackedBatch, kl_coef: float, record: bool) -> tuple[TokenStats, ValueStats]:
        section = self.config.algorithm
        wants_entropy = section.entropy_coef > 0
        values, value_stats = None, ValueStats()
        if self.head is not None:
            found, values = value_model.scores_and_values(
                self.model, self.head, batch, self.temperature, entropy_gradient=wants_entropy
            )
        else:
            found = scores(self.model, batch, self.temperature, entropy_gradient=wants_entropy)
        current, entropy = found.log_probs, found.entropy
        detached = current.detach()
        on_policy = batch.samples[0].old_log_probs is None
        old = detached if on_policy else batch.gather("old_log_probs")
        mask = batch.gather("loss_mask", torch.bool)
        weights = batch.per_token("token_weight") * mask
        token = self._token_loss(batch, current, old, mask)
        # Importance weights correct the policy gradient; entropy and KL are of the policy as it is.
        importance = batch.gather("weights") if batch.samples[0].weights is not None else None
        policy_loss = total = (token.loss * weights * (1 if importance is None else importance)).sum()
        if self.policy_loss.whole_mini_batch:  # its gradient is in the slopes, weights and all
            linear = (batch.gather("loss_slope") * fill(mask, current)[0]).sum()
            total = total + (linear - linear.detach())  # exactly 0: the slopes' sum must not round the value
        entropy_loss = (fill(mask, entropy)[0] * weights).sum()
        if section.entropy_coef:
            total = total - section.entropy_coef * entropy_loss
        ref, kl_loss = None, torch.zeros(())
        if section.kl is not None:
            ref = batch.gather("ref_log_probs")
            if section.kl.where == "loss":
                kl_loss = (kl.estimate(section.kl.estimator, *fill(mask, current, ref)) * weights).sum()
                total = total + kl_coef * kl_loss
        if values is not None and isinstance(section.critic, SharedCritic):
            value_loss, value_stats = value_model.weighted_value_loss(values, batch, section.critic.clip)
            total = total + section.critic.coef * value_loss
        total.backward()
        self.optimizer.accumulate()
        if self.head is not None:
            self.head_optimizer.accumulate()
        staleness = self.policy_version - batch.per_token("policy_version")
        rollout = batch.gather("rollout_log_probs")
        # In exact mode the old ones may be the engine's, with bypass they are; where the weights still are those that
        # sampled, this forward says what the trainer's are.
        fresh, recorded = staleness == 0, old
        own, measured = old, None
        if section.bypasses:
            own, measured = detached, fresh
        elif self.config.rollout.exact != "off":
            own = recorded = torch.where(fresh, detached, old)
        stats = token_stats(
            mask, detached, old, rollout, ref, entropy.detach(), token.ratio, token.clipped, staleness, own, measured
        )
        stats.loss, stats.policy_loss = float(total.detach()), float(policy_loss.detach())
        stats.kl_loss, stats.entropy_loss = float(kl_loss.detach()), float(entropy_loss.detach())
        if record:
            self._record(batch, recorded, detached, entropy.detach(), token.clipped)
        return stats, value_stats

    def _token_loss(self, batch: PackedBatch, current: Tensor, old: Tensor, mask: Tensor) -> TokenLoss:
        """Of the micro-batch's tokens; without gradient where it was computed over the whole mini-batch."""
        if self.policy_loss.whole_mini_batch:
            assert batch.samples[0].token_loss is not None, "batch.set_losses comes before the update"
            return TokenLoss(batch.gather("token_loss"), batch.gather("ratio"), batch.gather("clipped", torch.bool))
        inputs = {
            "log_probs": current,
            "old_log_probs": old,
            "advantages": batch.gather("advantages"),
            "mask": mask,
            "sequences": batch.sequences,
        }
        options = self.config.algorithm.policy_loss.model_dump(exclude={"type"})
        return policy_losses.compute(self.policy_loss.name, inputs, options)

    def _record(self, batch: PackedBatch, old: Tensor, current: Tensor, entropy: Tensor, clipped: Tensor) -> None:
        """What the micro-batch was trained on."""
        columns = zip(batch.samples, *(batch.split(x) for x in (old, current, entropy, clipped)), strict=True)
        for sample, olds, currents, entropies, cuts in columns:
            found: dict[str, np.ndarray] = {
                names.OLD_LOG_PROBS_ARRAY: olds,
                names.LOG_PROBS_ARRAY: currents,
                names.ENTROPY_ARRAY: entropies,
            }
            record_trained(sample, self.policy_version, found, cuts)

    def optim_step(self, step: int) -> OptimizerStats:
        """Sum gradients over ranks, clip, update. The rollout engine keeps the old weights until ``sync_weights``."""
        with self.hybrid.training(), telemetry.span(names.OPTIMIZER, {names.BUCKET: "productive"}):
            optimizers = [self.optimizer] if self.head is None else [self.optimizer, self.head_optimizer]
            stats, *head = step_together(optimizers, step, self.first_step)
            if head:
                stats = replace(stats, grad_norms=stats.grad_norms | {"value_head": head[0].grad_norm})
        self.policy_version += 1
        return stats

    def sync_weights(self) -> list[Published]:
        """Publish the current weights to the rollout engine: a ledger entry a replica, none if it has them."""
        lost = self.config.rollout.vllm.sleep_level == 2  # dropped while training had the device, if for a critic alone
        if self.policy_version == self.synced and not lost:
            return []
        ledger = self.hybrid.publish(self.policy_version)
        self.synced = self.policy_version
        return ledger

    def version(self) -> int:
        """Optimizer steps applied to the weights."""
        return self.policy_version

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint being made; rank 0 only, all ranks hold the same."""
        checkpoint.save_policy(directory, self.model, self.model_dir, self.optimizer, self.policy_version)

    def save_value_head(self, directory: Path) -> None:
        """Write the head on this model into the critic's part of a checkpoint; rank 0 only."""
        assert self.head is not None, "the critic is a model of its own"
        value_model.save_head(directory, self.head_optimizer.named_master(self.head))
        checkpoint.save_optimizer(directory, self.head_optimizer, self.head_optimizer.num_updates)

    def close(self) -> bool:
        """Release the engine's processes and deliver what is recorded."""
        try:
            if hasattr(self, "hybrid"):
                self.hybrid.close()
        finally:
            delivered = super().close()
        return delivered
