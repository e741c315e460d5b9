"""The controller: one driver process whose loop is the algorithm.

    prompts -> sample -> reward -> old_log_probs -> ref_log_probs -> advantages -> train -> sync -> record (->
    checkpoint)
                 ^                                                                           |
                 +------------------------- new weights, policy_version + 1 ----------------+

Each phase is one call on a worker group: dispatched by rank, collected, one span. The loop waits for each phase before
the next; nothing here reads telemetry or waits for it. Workers are built in ``cluster.py``, tensors to samples in
``batch.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from core_trainer import checkpoint
from core_trainer.batch import attach, mini_batches, step_advantages, to_samples
from core_trainer.batching import TrainSample
from core_trainer.checkpoint import TrainerState
from core_trainer.cluster import Cluster
from core_trainer.job import Job, Reporter, RunSummary, StepReport
from core_trainer.metrics import TokenStats, emit, rollout_metrics
from core_trainer.optimizer import OptimizerStats
from core_trainer.rollout.sample import make_groups
from core_trainer.types import Rollout, SamplingParams
from rlinsight import names, telemetry
from rlinsight.config import Config
from rlinsight.errors import RlinsightError, TrainingError
from rlinsight.telemetry import Span

ON_POLICY = "one on-policy update: the update's own forward gives the same log-probs"


def run(config: Config, job: Job, reporter: Reporter) -> RunSummary:
    """Train until ``trainer.total_steps`` or until the reporter passes on a stop; both end with a checkpoint.

    Raises RlinsightError for what the user can act on, also after a checkpoint where the weights are still those of the
    last finished step. Workers are gone when this returns or raises.
    """
    with Cluster(config, job, reporter) as cluster:
        return Controller(config, job, reporter, cluster).train()


class _Abandoned(Exception):
    """The user asked for a stop before this step changed any weight."""


class Controller:
    """State of the loop between steps."""

    def __init__(self, config: Config, job: Job, reporter: Reporter, cluster: Cluster) -> None:
        self.config, self.job, self.reporter = config, job, reporter
        self.policy, self.reference, self.reward = cluster.policy, cluster.reference, cluster.reward
        self.sampler = cluster.sampler
        rollout = config.rollout
        self.params = SamplingParams(
            rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, tuple(rollout.stop)
        )
        self.step, self.policy_version = cluster.step, cluster.policy_version
        self.rewards: list[float] = []
        self.saved = job.resume
        self.updating = False  # from a step's first update to its end, weights belong to no finished step

    def train(self) -> RunSummary:
        """The loop over steps."""
        total, every = self.config.trainer.total_steps, self.config.trainer.checkpoint_every
        while self.step < total and not self.reporter.stop_requested():
            position = self.sampler.state_dict()
            try:
                self.train_step(self.step + 1)
            except _Abandoned:
                self.sampler.load_state_dict(position)
                break
            except RlinsightError:
                self.sampler.load_state_dict(position)
                self._save_what_is_whole()
                raise
            self.step += 1
            if every and self.step % every == 0:
                self._checkpoint()
        if self.saved is None or checkpoint.read_state(self.saved).step != self.step:
            self._checkpoint()
        return RunSummary("finished" if self.step == total else "interrupted", self.step, self.rewards, self.saved)

    def _save_what_is_whole(self) -> None:
        """After a failed step: a checkpoint of the last finished one, unless an update of the step has begun."""
        if self.step and not self.updating:
            with suppress(Exception):  # the error under way matters more, and the policy workers may be what failed
                self._checkpoint()

    def train_step(self, step: int) -> None:
        """One step: the phases in order."""
        began = time.perf_counter()
        attributes = {names.POLICY_VERSION_IN: self.policy_version, names.BATCH_SIZE: self._num_rollouts}
        with telemetry.step_context(step), telemetry.span(names.STEP, attributes, root=True, announce=True) as span:
            with self._phase(names.DATA):
                prompts = self.sampler.next_step()
                groups = make_groups(
                    prompts, self.config.rollout.group_size, self.config.run.seed, step, self.job.attempt
                )
            with self._phase(names.SAMPLE):
                sampling = time.perf_counter()
                parts = self.policy.scatter("sample", self.policy.split(groups), self.params, step=step)
                rollouts = [rollout for part in parts for rollout in part]
                sampling = time.perf_counter() - sampling
            with self._phase(names.REWARD):
                rollouts = self._score(rollouts, step)
            with self._phase(names.ADVANTAGES):
                advantages = step_advantages(rollouts, self.config.algorithm)
                samples = to_samples(rollouts, advantages)
            with self._phase(names.OLD_LOG_PROBS) as phase:
                self._old_log_probs(samples, step, phase)
            with self._phase(names.REF_LOG_PROBS) as phase:
                self._ref_log_probs(samples, step, phase)
            with self._phase(names.TRAIN):
                stats, updates = self._update(samples, step)
            with self._phase(names.SYNC):
                self.policy.call("sync_weights", step=step)
            with self._phase(names.RECORD):
                metrics = self._metrics(rollouts, advantages, stats, updates, time.perf_counter() - began, sampling)
                for name, value in metrics.items():
                    emit(name, value)
            num_tokens = sum(len(s.prompt_token_ids) + s.num_tokens for s in samples)
            span.set(
                {
                    names.POLICY_VERSION_OUT: self.policy_version,
                    names.NUM_PROMPTS: len(prompts),
                    names.NUM_TOKENS: num_tokens,
                }
            )
        self.updating = False
        self.rewards.append(metrics[names.M_REWARD_MEAN] or 0.0)
        self.reporter.step(StepReport(step, self.config.trainer.total_steps, time.perf_counter() - began, metrics))

    # Phases ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[Span]:
        """One span of the step. A stop the user asked for takes effect before the weights change, never during."""
        if (
            name in (names.REWARD, names.OLD_LOG_PROBS, names.REF_LOG_PROBS, names.TRAIN)
            and self.reporter.stop_requested()
        ):
            raise _Abandoned
        # The others' time is spent in workers, whose own spans say what it counts as.
        bucket = "overhead" if name in (names.DATA, names.ADVANTAGES, names.RECORD) else None
        attributes = {names.PHASE: name.removeprefix("rl."), names.BUCKET: bucket}
        with telemetry.span(name, attributes, announce=True) as span:
            yield span

    def _score(self, rollouts: list[Rollout], step: int) -> list[Rollout]:
        results = self.reward.call("score", rollouts, step=step)[0]
        for rollout, result in zip(rollouts, results, strict=True):
            rollout.reward = result.reward
        return [rollout for rollout in rollouts if rollout.reward is not None]  # reward.on_error: drop

    def _old_log_probs(self, samples: list[TrainSample], step: int, phase: Span) -> None:
        if self.config.algorithm.num_epochs == self.config.algorithm.num_mini_batches == 1:
            phase.set({names.SKIPPED: ON_POLICY})
            return
        attach(samples, "old_log_probs", self.policy.scatter("log_probs", self.policy.split_groups(samples), step=step))

    def _ref_log_probs(self, samples: list[TrainSample], step: int, phase: Span) -> None:
        if self.reference is None:
            phase.set({names.SKIPPED: "kl_coef is 0"})
            return
        parts = self.reference.split_groups(samples)
        attach(samples, "ref_log_probs", self.reference.scatter("log_probs", parts, step=step))

    def _update(self, samples: list[TrainSample], step: int) -> tuple[TokenStats, list[OptimizerStats]]:
        """Epochs over mini-batches, each one optimizer step. Statistics are those of the last epoch."""
        algorithm, updates = self.config.algorithm, []
        stats = TokenStats()
        for epoch in range(algorithm.num_epochs):
            last = epoch == algorithm.num_epochs - 1
            stats = TokenStats()
            for parts in mini_batches(samples, self.policy.world_size, algorithm, (self.config.run.seed, step, epoch)):
                for result in self.policy.scatter("forward_backward", parts, algorithm, last, step=step):
                    stats = stats.merge(result)
                self.updating = True
                try:
                    updates.append(self.policy.call("optim_step", step, step=step)[0])
                except TrainingError:  # raised before any weight changes
                    self.updating = bool(updates)
                    raise
        self.policy_version += len(updates)
        return stats, updates

    def _checkpoint(self) -> None:
        """Write a resumable checkpoint of the last finished step."""
        self.reporter.stage(f"writing checkpoint of step {self.step}")
        folder = self.job.run_dir / "checkpoints"
        with telemetry.span(names.CHECKPOINT, {names.STEP_INDEX: self.step}, announce=True) as span:
            self.saved = checkpoint.write(
                folder,
                TrainerState(self.step, self.sampler.state_dict()),
                lambda directory: self.policy.call_rank(0, "save", directory),
                self.config.trainer.keep_checkpoints,
            )
            span.set({names.PATH: str(self.saved)})

    # Metrics ---------------------------------------------------------------------------------------------------------

    @property
    def _num_rollouts(self) -> int:
        return self.config.trainer.prompts_per_step * self.config.rollout.group_size

    def _metrics(
        self,
        rollouts: list[Rollout],
        advantages: torch.Tensor,
        stats: TokenStats,
        updates: list[OptimizerStats],
        seconds: float,
        sampling: float,
    ) -> dict[str, float | None]:
        sampled = sum(rollout.num_response_tokens for rollout in rollouts)
        tokens = sampled + sum(len(rollout.prompt.token_ids) for rollout in rollouts)
        algorithm = self.config.algorithm
        metrics: dict[Any, float | None] = {
            **rollout_metrics(rollouts, advantages),
            **stats.metrics(algorithm.kl_coef, algorithm.num_mini_batches),
            names.M_GRAD_NORM: updates[-1].grad_norm,
            names.M_LR: updates[-1].learning_rate,
            names.M_WEIGHTS_CHANGED: updates[-1].weights_changed,
            names.M_TOKENS_PER_S: tokens / seconds,
            names.M_SAMPLES_PER_S: len(rollouts) / seconds,
            names.M_GEN_TOKENS_PER_S: sampled / sampling,
        }
        return metrics
