"""The controller: one driver process whose loop is the algorithm.

    prompts -> sample -> reward -> old_log_probs -> ref_log_probs -> values -> advantages -> train -> sync -> record
       ^                  |                                                                             |
       +--- more groups --+ (dynamic sampling)              new weights, policy_version + 1 <-----------+

Each phase is one call on a worker group: dispatched by rank, collected, one span. The loop waits for each phase before
the next; nothing here reads telemetry or waits for it. Workers are built in ``cluster.py``, tensors to samples in
``batch.py``, samples to advantages in ``advantages.py``. Another algorithm is a subclass with a ``train_step`` of its
own: its lines are the methods below.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core_trainer import advantages, checkpoint, validation
from core_trainer.advantages import StepRewards
from core_trainer.alerts import Alert, Alerts
from core_trainer.algorithms import kl, registry, shaping
from core_trainer.batch import attach, mini_batches, set_losses, to_samples
from core_trainer.batching import TrainSample
from core_trainer.checkpoint import TrainerState
from core_trainer.cluster import Cluster, start_limit_s
from core_trainer.job import Job, Reporter, RunSummary, StepReport
from core_trainer.metrics import TokenStats, emit, rollout_metrics
from core_trainer.optimizer import OptimizerStats, update_metrics
from core_trainer.rewards import RewardResult
from core_trainer.rollout.hybrid import Published
from core_trainer.rollout.sample import Group, make_groups, time_limit_s
from core_trainer.types import Rollout, SamplingParams
from core_trainer.value_model import ValueStats, critic_metrics
from core_trainer.workers.policy import CRITIC
from core_trainer.workers.worker_group import WorkerGroup
from rlinsight import names, telemetry
from rlinsight.config import Config
from rlinsight.config.kl import AdaptiveController, KlSection
from rlinsight.config.shaping import OVERLONG
from rlinsight.errors import CheckpointError, ConfigError, EngineError, RlinsightError, TrainingError
from rlinsight.telemetry import Span

ON_POLICY = "one on-policy update: the update's own forward gives the same log-probs"
BYPASS = "correction.mode is bypass: the engine's log-probs stand for them"
EXACT = "rollout.exact: the engine's log-probs are them, and the update's first forward checks it"
BEFORE_UPDATE = (names.REWARD, names.OLD_LOG_PROBS, names.REF_LOG_PROBS, names.VALUES, names.TRAIN)
GREEDY = "-greedy"  # suffix of the group of a prompt's greedy rollout


def run(config: Config, job: Job, reporter: Reporter) -> RunSummary:
    """Train until ``trainer.total_steps`` or until the reporter passes on a stop; both end with a checkpoint.

    Raises RlinsightError for what the user can act on, also after a checkpoint where the weights are still those of the
    last finished step. Workers are gone when this returns or raises.
    """
    return Controller.run(config, job, reporter)


class _Abandoned(Exception):
    """The user asked for a stop before this step changed any weight."""


@dataclass(slots=True)
class Step:
    """What a step has produced so far; each phase adds to it."""

    index: int  # from 1
    sampled: list[Rollout] = field(default_factory=list)  # everything sampled and scored
    rollouts: list[Rollout] = field(default_factory=list)  # those of them to learn from
    greedy_rewards: dict[str, float] = field(default_factory=dict)  # by group, where the advantage wants them
    results: dict[str, RewardResult] = field(default_factory=dict)  # of ``sampled`` by rollout id
    samples: list[TrainSample] = field(default_factory=list)  # of ``rollouts``, in order
    old_version: int | None = None  # policy_version that their old log-probs are of, where those are not the engine's
    sampling_s: float = 0.0
    sampled_tokens: int = 0  # in that time, those of greedy rollouts too
    num_failed: int = 0  # rollouts whose request failed for good
    token_stats: TokenStats = field(default_factory=TokenStats)  # of the last epoch
    value_stats: ValueStats = field(default_factory=ValueStats)  # likewise
    num_mini_batches: int = 0  # likewise
    updates: list[OptimizerStats] = field(default_factory=list)  # of the policy
    critic_updates: list[OptimizerStats] = field(default_factory=list)
    metrics: dict[str, float | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of what is learned from."""
        return sum(len(sample.prompt_token_ids) + sample.num_tokens for sample in self.samples)


class Controller:
    """State of the loop between steps."""

    def __init__(self, config: Config, job: Job, reporter: Reporter, cluster: Cluster) -> None:
        self.config, self.job, self.reporter = config, job, reporter
        self.policy, self.reference, self.critic = cluster.policy, cluster.reference, cluster.critic
        self.reward = cluster.reward
        self.sampler = cluster.sampler
        rollout = config.rollout
        self.params = SamplingParams(
            rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, stop=tuple(rollout.stop)
        )
        self.advantage = registry.find("advantage", config.algorithm.advantage.type)
        self.policy_loss = registry.find("policy_loss", config.algorithm.policy_loss.type)
        self.kl_controller = _kl_controller(config.algorithm.kl)
        self.validation_sets, self.fingerprint = cluster.validation_sets, cluster.fingerprint
        self.policy_version = self.served_version = cluster.policy_version
        self.alerts = Alerts(job.run_id, reporter.stage, "groups" in self.advantage.inputs, cluster.replicas)
        self._first_sync = cluster.ledger
        self._stale: list[Alert] = []  # engines that do not serve what was published
        self.step, self.best, self.validated = 0, None, None
        self._resumed = cluster.state.extra if cluster.state is not None else {}
        if cluster.state is not None:
            self.step, self.best, self.validated = cluster.state.step, cluster.state.best, cluster.state.validated
            if self.kl_controller is not None and cluster.state.kl_controller is not None:
                self.kl_controller.load_state_dict(cluster.state.kl_controller)
        self.rewards: list[float] = []
        self.saved = job.resume
        self.updating = False  # from a step's first update to its end, weights belong to no finished step

    @classmethod
    def run(cls, config: Config, job: Job, reporter: Reporter) -> RunSummary:
        """Start the workers, train, stop them."""
        if cls is Controller:
            _refuse_idle_options(config)
        with Cluster(config, job, reporter) as cluster:
            return cls(config, job, reporter, cluster).train()

    def train(self) -> RunSummary:
        """The loop over steps."""
        total, trainer = self.config.trainer.total_steps, self.config.trainer
        if self._resumed:  # not before a subclass's __init__ has set the defaults
            self.load_state_dict(self._resumed)
        self._published(self._first_sync)
        self._stop_if_stale()
        # The initial weights, or those of a resumed step whose validation failed.
        if self.validated != self.step and self.validate() and trainer.keep_best:
            self._checkpoint()
        while self.step < total and not self.reporter.stop_requested():
            position = self._position()
            try:
                self._run_step(self.step + 1)
                self.step, position = self.step + 1, self._position()
                self._stop_if_stale()
                is_best = self.validate()
            except _Abandoned:
                self._rewind(*position)
                break
            except RlinsightError:
                self._rewind(*position)
                self._save_what_is_whole()
                raise
            if (trainer.checkpoint_every and self.step % trainer.checkpoint_every == 0) or (
                is_best and trainer.keep_best
            ):
                self._checkpoint()
        self._checkpoint()
        return RunSummary("finished" if self.step == total else "interrupted", self.step, self.rewards, self.saved)

    def validate(self) -> bool:
        """Validate the current weights if it is time to; whether they are the best so far.

        Without a sample that could be scored they are not, and training goes on.
        """
        section, total = self.config.validation, self.config.trainer.total_steps
        if section is None or not validation.is_due(section, self.step, total):
            return False
        self.reporter.stage(f"validating step {self.step}")
        measured = validation.validate(
            self.policy, self.reward, self.validation_sets, self.config, self.step, self.job.attempt
        )
        self.validated, self.saved = self.step, None  # a checkpoint of this step, if there is one, says it was not
        value = validation.best_metric(measured, section)
        if value is None:
            metric = "/".join(section.best)
            self.reporter.stage(f"validation of step {self.step} made no {metric}: too few samples could be scored")
            return False
        best = checkpoint.improved(self.best, "/".join(section.best), value, self.step, maximize=True)
        self.best = best or self.best
        return best is not None

    def state_dict(self) -> dict[str, Any]:
        """State of a subclass's own that a checkpoint holds beside weights and data position; JSON types only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave: before the first step of a resumed run, and when a step is given up.

        Called with what is not empty. Raises CheckpointError where the checkpoint is of another controller.
        """
        raise CheckpointError(
            f"the checkpoint holds state ({', '.join(state)}) that {type(self).__name__} does not load; resume with "
            "the controller that wrote it, or give this one a load_state_dict"
        )

    def train_step(self, step: Step) -> None:
        """One step: the phases in order."""
        self.collect(step)
        if step.rollouts:
            self.old_log_probs(step)
            self.ref_log_probs(step)
            self.values(step)
            self.estimate_advantages(step)
        if step.rollouts:
            self.update(step)
            self.sync(step)

    # Phases ----------------------------------------------------------------------------------------------------------

    def collect(self, step: Step) -> None:
        """Sample and score groups until there are ``prompts_per_step`` to learn from, or no more rounds."""
        wanted, options = self.config.trainer.prompts_per_step, self.config.algorithm.shaping
        rounds = options.dynamic_sampling.max_rounds if options.dynamic_sampling else 1
        num_sampled = num_kept = sampling_round = 0
        while sampling_round < rounds and num_kept < wanted:
            sampling_round += 1
            groups = self.draw(step, wanted - num_kept, num_sampled)
            rollouts = self.sample(step, groups)
            self.score(step, rollouts)
            greedy = [rollout for rollout in rollouts if rollout.group_id.endswith(GREEDY)]
            step.greedy_rewards |= {r.group_id.removesuffix(GREEDY): r.reward for r in greedy if r.reward is not None}
            rollouts = rollouts[: len(rollouts) - len(greedy)]
            kept, reasons = self._select(step, rollouts)
            members = _by_group(rollouts)
            for group_id, reason in reasons.items():
                self._record_dropped(members[group_id], reason)
            step.sampled += rollouts
            step.rollouts += kept
            num_sampled += len(groups)
            num_kept += len({rollout.group_id for rollout in kept})
        step.samples = to_samples(step.rollouts)
        step.metrics |= {names.M_SAMPLING_ROUNDS: sampling_round, names.M_GROUPS_DROPPED: num_sampled - num_kept}

    def draw(self, step: Step, count: int, first: int = 0) -> list[Group]:
        """The next prompts as groups, numbered in the step from ``first``."""
        with self.phase(names.DATA):
            prompts = self.sampler.next_step(count)
            size, seed = self.config.rollout.group_size, self.config.run.seed
            return make_groups(prompts, size, seed, step.index, self.job.attempt, first)

    def sample(self, step: Step, groups: Sequence[Group]) -> list[Rollout]:
        """Rollouts of the groups, and the greedy one of each prompt where the advantage is taken against its reward.

        Those whose request failed for good are left out, with ``rollout.on_error: drop``, and groups of which nothing
        is left are recorded as dropped. Raises EngineError when nothing at all is left.
        """
        with self.phase(names.SAMPLE):
            began = time.perf_counter()
            sampled = self._sample(step, groups, self.params)
            if "greedy_rewards" in self.advantage.inputs:
                greedy = replace(self.params, temperature=0.0)
                sampled += self._sample(step, [_greedy(group) for group in groups], greedy)
            step.sampling_s += time.perf_counter() - began
            step.sampled_tokens += sum(rollout.num_response_tokens for rollout in sampled)
            rollouts = [rollout for rollout in sampled if not rollout.error]
            self._look_at(step, sampled, rollouts)
        return rollouts

    def score(self, step: Step, rollouts: Sequence[Rollout]) -> None:
        """Set the reward and its components of each rollout."""
        with self.phase(names.REWARD):
            results = self.reward.call("score", rollouts, step=step.index)[0]
            for rollout, result in zip(rollouts, results, strict=True):
                rollout.reward = result.reward
                step.results[rollout.rollout_id] = result

    def old_log_probs(self, step: Step) -> None:
        """Log-probs of the sampled tokens under the weights the step starts from; skipped where they are known."""
        algorithm = self.config.algorithm
        step.old_version = None if algorithm.bypasses else self.policy_version
        with self.phase(names.OLD_LOG_PROBS) as phase:
            if algorithm.bypasses:
                for sample in step.samples:
                    sample.old_log_probs = sample.rollout_log_probs
                phase.set({names.SKIPPED: BYPASS})
            elif algorithm.is_on_policy and not self._needs_old_log_probs:
                phase.set({names.SKIPPED: ON_POLICY})
            elif self._engine_knows(step) and algorithm.num_epochs == 1 and not self._needs_the_pass:
                for sample in step.samples:
                    sample.old_log_probs = sample.rollout_log_probs
                phase.set({names.SKIPPED: EXACT})
            else:
                self._attach(self.policy, "log_probs", step)

    def ref_log_probs(self, step: Step) -> None:
        """Log-probs of the sampled tokens under the frozen reference."""
        with self.phase(names.REF_LOG_PROBS) as phase:
            if self.config.algorithm.kl is None:
                phase.set({names.SKIPPED: "kl is off"})
            else:  # with adapters, the policy without them is the reference
                self._attach(self.reference or self.policy, "ref_log_probs", step)

    def values(self, step: Step) -> None:
        """The critic's values of the sampled tokens."""
        if self.critic is not None:
            with self.phase(names.VALUES):
                self._attach(self.critic, "values", step)

    def estimate_advantages(self, step: Step) -> None:
        """Rollout correction, KL in the reward, and the advantage function."""
        algorithm = self.config.algorithm
        with self.phase(names.ADVANTAGES):
            if algorithm.correction is not None and algorithm.correction.mode == "decoupled":
                step.metrics |= advantages.correct(step.samples, algorithm.correction)
                self._drop_rejected(step)
            if step.rollouts:
                step.metrics |= advantages.estimate(step.samples, self._step_rewards(step), algorithm, self.kl_coef)

    def update(self, step: Step) -> None:
        """Epochs over mini-batches, each one optimizer step of the critic, if there is one, and of the policy.

        Token statistics are those of the last epoch. The critic's first steps may be its alone. Raises TrainingError
        when the policy has been updated in this step and the log-probs from before that are not known.
        """
        if step.updates and any(sample.old_log_probs is None for sample in step.samples):
            raise TrainingError(
                f"train_step updates the policy again in step {step.index} on samples without old log-probs, which one "
                "update of one mini-batch does without; set algorithm.num_mini_batches or num_epochs to 2 or more, or "
                "update once"
            )
        num_epochs, critic = self.config.algorithm.num_epochs, self.config.algorithm.model_critic
        policy_learns = critic is None or step.index > critic.warmup_steps
        with self.phase(names.TRAIN):
            for epoch in range(num_epochs):
                is_last = epoch == num_epochs - 1
                # With bypass only the weights that sampled tell the gap to the engine, and no later epoch has them.
                gaps = step.token_stats.gaps() if self.config.algorithm.bypasses else TokenStats()
                step.token_stats, step.value_stats, step.num_mini_batches = gaps, ValueStats(), 0
                for parts in self._mini_batches(step, epoch):
                    step.num_mini_batches += 1
                    if self.critic is not None:
                        self._update_critic(step, parts, record=is_last and not policy_learns)
                    if policy_learns:
                        self._update_policy(step, parts, record=is_last)
            self._adapt_kl(step)

    def _update_policy(self, step: Step, parts: list[list[TrainSample]], record: bool) -> None:
        if self.policy_loss.whole_mini_batch:
            current = self.policy.scatter("current_log_probs", parts, step=step.index)
            options = self.config.algorithm.policy_loss.model_dump(exclude={"type"})
            on_policy = step.old_version == self.policy_version
            set_losses(parts, current, self.policy_loss.name, options, on_policy)
        for stats, values in self.policy.scatter("forward_backward", parts, self.kl_coef, record, step=step.index):
            step.token_stats = step.token_stats.merge(stats)
            step.value_stats = step.value_stats.merge(values)
        was_updating, self.updating = self.updating, True
        try:
            step.updates.append(self.policy.call("optim_step", step.index, step=step.index)[0])
        except TrainingError:  # raised before any weight changes
            self.updating = was_updating
            raise
        self.policy_version += 1

    def _update_critic(self, step: Step, parts: list[list[TrainSample]], record: bool) -> None:
        assert self.critic is not None
        for values in self.critic.scatter("forward_backward", parts, record, step=step.index):
            step.value_stats = step.value_stats.merge(values)
        was_updating, self.updating = self.updating, True
        try:
            step.critic_updates.append(self.critic.call("optim_step", step.index, step=step.index)[0])
        except TrainingError:
            self.updating = was_updating
            raise

    def _mini_batches(self, step: Step, epoch: int) -> Iterator[list[list[TrainSample]]]:
        seed = (self.config.run.seed, step.index, epoch)
        return mini_batches(
            step.samples, self.policy.world_size, self.config.algorithm, seed, self.params.max_new_tokens
        )

    def sync(self, step: Step) -> None:
        """Publish the new weights to the rollout engines."""
        with self.phase(names.SYNC):
            limit_s = start_limit_s(self.config)
            self._published(self.policy.call("sync_weights", step=step.index, timeout_s=limit_s))

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """One span of the step. A stop the user asked for takes effect before the weights change, never during."""
        if not self.updating and name in BEFORE_UPDATE and self.reporter.stop_requested():
            raise _Abandoned
        # The others' time is spent in workers, whose own spans say what it counts as.
        bucket = "overhead" if name in (names.DATA, names.ADVANTAGES, names.RECORD) else None
        attributes = {names.PHASE: name.removeprefix("rl."), names.BUCKET: bucket}
        with telemetry.span(name, attributes, announce=True) as span:
            yield span

    # Around the phases -----------------------------------------------------------------------------------------------

    def _run_step(self, index: int) -> None:
        began = time.perf_counter()
        step = Step(index)
        attributes = {names.POLICY_VERSION_IN: self.policy_version, names.BATCH_SIZE: self._num_rollouts}
        with telemetry.step_context(index), telemetry.span(names.STEP, attributes, root=True, announce=True) as span:
            self.train_step(step)
            with self.phase(names.RECORD):
                metrics = self._metrics(step, time.perf_counter() - began)
                for name, value in metrics.items():
                    emit(name, value)
                self.alerts.finished(index, metrics)
            span.set(
                {
                    names.POLICY_VERSION_OUT: self.policy_version,
                    names.NUM_PROMPTS: len({sample.group_id for sample in step.samples}),
                    names.NUM_TOKENS: step.num_tokens,
                }
            )
        self.updating = False
        if (reward := metrics[names.M_REWARD_MEAN]) is not None:
            self.rewards.append(reward)
        self.reporter.step(StepReport(index, self.config.trainer.total_steps, time.perf_counter() - began, metrics))

    def _sample(self, step: Step, groups: Sequence[Group], params: SamplingParams) -> list[Rollout]:
        limit_s = time_limit_s(self.config.rollout)
        parts = self.policy.scatter("sample", self.policy.split(groups), params, step=step.index, timeout_s=limit_s)
        return [rollout for part in parts for rollout in part]

    def _look_at(self, step: Step, sampled: Sequence[Rollout], rollouts: Sequence[Rollout]) -> None:
        """Record what is wrong with ``sampled``, of which ``rollouts`` did not fail."""
        failed = [rollout for rollout in sampled if rollout.error]
        step.num_failed += len(failed)
        stale = self.alerts.sampled(rollouts, failed, self.served_version)
        if stale and self.config.rollout.on_stale == "fail":
            raise EngineError(f"{stale[0].message}; set rollout.on_stale: alert to train on them all the same")
        if failed and not rollouts:
            kinds = ", ".join(sorted({str(rollout.error) for rollout in failed}))
            raise EngineError(
                f"all {len(failed)} rollouts of step {step.index} failed ({kinds}); see view errors, and go on with "
                "--resume when the engine is well"
            )
        left = {rollout.group_id for rollout in rollouts}
        for group_id, members in _by_group(failed).items():
            if group_id not in left and not group_id.endswith(GREEDY):
                self._record_dropped(members, "engine_error")

    def _published(self, ledgers: Sequence[Sequence[Published]]) -> None:
        """Look at what each policy worker's engine took of the weights it was given."""
        entries = [entry for ledger in ledgers for entry in ledger]
        if entries:
            if self.config.rollout.openai.weights != "none":  # servers that keep theirs are never given others
                self.served_version = entries[0].policy_version
            self._stale = self.alerts.synced(entries)

    def _stop_if_stale(self) -> None:
        """Between steps, so that the last one is whole and can be resumed from."""
        if self._stale and self.config.rollout.on_stale == "fail":
            raise EngineError(f"{self._stale[0].message}; set rollout.on_stale: alert to go on all the same")

    def _attach(self, group: WorkerGroup, method: str, step: Step) -> None:
        """Set what a worker method gives for each sample's tokens."""
        parts = group.split_groups(step.samples)
        attach(parts, group.scatter(method, parts, step=step.index))

    def _select(self, step: Step, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], dict[str, str]]:
        """Rollouts to learn from, and the reasons of the groups that are not, by group."""
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        names_ = {group: i for i, group in enumerate(dict.fromkeys(rollout.group_id for rollout in rollouts))}
        groups = torch.tensor([names_[rollout.group_id] for rollout in scored], dtype=torch.int64)
        rewards = torch.tensor([self._unshaped_reward(step, rollout) for rollout in scored], dtype=torch.float64)
        options, checks = self.config.algorithm.shaping, {}
        if "greedy_rewards" in self.advantage.inputs:
            checks["no_baseline"] = torch.tensor([r.group_id in step.greedy_rewards for r in scored], dtype=torch.bool)
        if "groups" in self.advantage.inputs:
            checks["too_small"] = shaping.too_small(groups)
        versions = torch.tensor([rollout.policy_version for rollout in scored], dtype=torch.int64)
        inputs = {"rewards": rewards, "groups": groups, "staleness": self.policy_version - versions}
        for section in options.group_filters:
            checks[section.type] = shaping.filter_groups(section.type, inputs, section.model_dump(exclude={"type"}))
        if options.dynamic_sampling is not None:
            checks["zero_variance"] = shaping.zero_variance(rewards, groups)
        if not checks:
            kept, reasons = scored, {}
        else:
            selection = shaping.select(checks)
            kept = [rollout for rollout, keep in zip(scored, selection.keep.tolist(), strict=True) if keep]
            reasons = {r.group_id: why for r, why in zip(scored, selection.reasons, strict=True) if why is not None}
        left = {rollout.group_id for rollout in kept}
        return kept, {group: reasons.get(group, "no_reward") for group in names_ if group not in left}

    def _unshaped_reward(self, step: Step, rollout: Rollout) -> float:
        """The reward without the penalty on length: a group that differs in length alone has nothing to teach.

        Summed anew, since taking the penalty off again would leave equal rewards apart by a rounding error.
        """
        components = step.results[rollout.rollout_id].components
        return sum(part.weight * (part.value or 0.0) for part in components if part.name != OVERLONG)

    def _step_rewards(self, step: Step) -> StepRewards:
        rewards = torch.tensor([rollout.reward for rollout in step.rollouts], dtype=torch.float64)
        greedy = None
        if "greedy_rewards" in self.advantage.inputs:
            greedy = torch.tensor([step.greedy_rewards[r.group_id] for r in step.rollouts], dtype=torch.float64)
        if "components" not in self.advantage.inputs:
            return StepRewards(rewards, greedy_rewards=greedy)
        results = [step.results[rollout.rollout_id].components for rollout in step.rollouts]
        weights = {part.name: part.weight for parts in results for part in parts}
        # A component that failed counts 0 here, as reward.on_error: zero says.
        found = [{part.name: part.value or 0.0 for part in parts} for parts in results]
        table = [[values.get(name, 0.0) for name in weights] for values in found]
        components = torch.tensor(table, dtype=torch.float64)
        return StepRewards(rewards, components, torch.tensor(list(weights.values()), dtype=torch.float64), greedy)

    @property
    def _needs_old_log_probs(self) -> bool:
        """Whether something before the update looks at them."""
        algorithm = self.config.algorithm
        return (
            self._needs_the_pass
            or algorithm.correction is not None
            or (algorithm.kl is not None and algorithm.kl.where == "reward")
            or "old_log_probs" in self.advantage.inputs
        )

    def _engine_knows(self, step: Step) -> bool:
        """Whether the engine's log-probs are those of the weights the step starts from, to the last bit."""
        if self.config.rollout.exact == "off":
            return False
        return all(sample.policy_version == self.policy_version for sample in step.samples)

    @property
    def _needs_the_pass(self) -> bool:
        """Whether the pass that computes them also computes something else: a shared critic's values, say."""
        shares = self.config.algorithm.critic is not None and self.critic is None
        return shares or "sum_pi_squared" in self.advantage.inputs

    @property
    def kl_coef(self) -> float:
        """Weight of the KL to the reference in this step."""
        return self.kl_controller.coef if self.kl_controller else 0.0

    def _adapt_kl(self, step: Step) -> None:
        if self.kl_controller is not None:
            step.metrics[names.M_KL_COEF] = self.kl_coef
            if step.updates and (distance := self._reference_kl(step)) is not None:
                self.kl_controller.update(distance, len(step.rollouts))

    def _reference_kl(self, step: Step) -> float | None:
        """Mean k3 over loss tokens from the weights the step starts from to the reference."""
        if any(sample.old_log_probs is None for sample in step.samples):  # the one update's own forward is of them
            stats = step.token_stats
            return stats.ref_kl / stats.num_tokens if stats.num_tokens else None
        return advantages.reference_kl(step.samples)

    def _drop_rejected(self, step: Step) -> None:
        """Drop groups without a loss token left, so that no mini-batch is made of them alone."""
        left = {sample.group_id for sample in step.samples if sample.loss_mask.any()}
        dropped = _by_group([rollout for rollout in step.rollouts if rollout.group_id not in left])
        for rollouts in dropped.values():
            self._record_dropped(rollouts, "rejected")
        step.rollouts = [rollout for rollout in step.rollouts if rollout.group_id in left]
        step.samples = [sample for sample in step.samples if sample.group_id in left]
        step.metrics[names.M_GROUPS_DROPPED] = (step.metrics.get(names.M_GROUPS_DROPPED) or 0) + len(dropped)

    def _record_dropped(self, rollouts: Sequence[Rollout], reason: str) -> None:
        attributes = {
            names.GROUP_ID: rollouts[0].group_id,
            names.PROMPT_ID: rollouts[0].prompt.prompt_id,
            names.REASON: reason,
            names.BATCH_SIZE: len(rollouts),
        }
        telemetry.event(names.GROUP_DROPPED, attributes)

    def _position(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a step moves besides weights: the data position and a subclass's own state."""
        return self.sampler.state_dict(), copy.deepcopy(self.state_dict())

    def _rewind(self, sampler: dict[str, Any], extra: dict[str, Any]) -> None:
        self.sampler.load_state_dict(sampler)
        if extra:
            self.load_state_dict(extra)

    def _save_what_is_whole(self) -> None:
        """After a failed step: a checkpoint of the last finished one, unless an update of the step has begun."""
        if self.step and not self.updating:
            with suppress(Exception):  # the error under way matters more, and the policy workers may be what failed
                self._checkpoint()

    def _checkpoint(self) -> None:
        """Write a resumable checkpoint of the last finished step, unless the one written last is of it."""
        if checkpoint.is_of(self.saved, self.step):
            return
        self.reporter.stage(f"writing checkpoint of step {self.step}")
        folder = self.job.run_dir / "checkpoints"
        with telemetry.span(names.CHECKPOINT, {names.STEP_INDEX: self.step}, announce=True) as span:
            trainer = self.config.trainer
            self.saved = checkpoint.write(
                folder, self._state(), self._savers(), trainer.keep_checkpoints, trainer.keep_best
            )
            span.set({names.PATH: str(self.saved)})

    def _state(self) -> TrainerState:
        controller = self.kl_controller.state_dict() if self.kl_controller is not None else None
        sampler, extra = self._position()
        return TrainerState(self.step, sampler, self.fingerprint, controller, self.best, self.validated, extra)

    def _savers(self) -> dict[str, Callable[[Path], object]]:
        """Who writes which part of a checkpoint."""
        savers: dict[str, Callable[[Path], object]] = {".": partial(self.policy.call_rank, 0, "save")}
        if self.critic is not None:
            savers[CRITIC] = partial(self.critic.call_rank, 0, "save")
        elif self.config.algorithm.critic is not None:
            savers[CRITIC] = partial(self.policy.call_rank, 0, "save_value_head")
        return savers

    @property
    def _num_rollouts(self) -> int:
        return self.config.trainer.prompts_per_step * self.config.rollout.group_size

    def _metrics(self, step: Step, seconds: float) -> dict[str, float | None]:
        """The step's metrics; those of the update are absent when there was nothing to learn from."""
        sampled = sum(rollout.num_response_tokens for rollout in step.sampled)
        tokens = sampled + sum(len(rollout.prompt.token_ids) for rollout in step.sampled)
        metrics = rollout_metrics(step.sampled) | step.metrics
        if step.updates:
            metrics |= step.token_stats.metrics(self.config.algorithm, step.num_mini_batches)
            metrics |= update_metrics(step.updates)
        if self.config.algorithm.critic is not None and (step.critic_updates or step.updates):
            metrics |= step.value_stats.metrics(step.num_mini_batches)
        if step.critic_updates:
            metrics |= critic_metrics(step.critic_updates)
        return {
            **metrics,
            names.M_TOKENS_PER_S: tokens / seconds,
            names.M_SAMPLES_PER_S: len(step.sampled) / seconds,
            names.M_FAILED_ROLLOUTS: float(step.num_failed),
            names.M_GEN_TOKENS_PER_S: step.sampled_tokens / step.sampling_s if step.sampling_s else None,
        }


def _refuse_idle_options(config: Config) -> None:
    """Raise ConfigError for what looks at rollouts of older weights. This loop trains on none, unless servers fall
    behind; a subclass may.
    """
    engine, exact, correction = config.rollout.engine, config.rollout.exact, config.algorithm.correction
    if exact != "off" and correction is not None and correction.mode == "decoupled":
        raise ConfigError(
            f"algorithm.correction has no effect with rollout.exact={exact}, where the engine's log-probs are the "
            "trainer's and their ratio is 1; remove it or set rollout.exact: off"
        )
    if exact != "off" and config.algorithm.bypasses and config.algorithm.num_epochs == 1:
        raise ConfigError(
            f"algorithm.correction.mode=bypass has no effect with rollout.exact={exact} and one epoch, where the "
            "engine's log-probs are the trainer's and stand for them anyway; remove algorithm.correction"
        )
    filters = [section.type for section in config.algorithm.shaping.group_filters]
    if "stale" in filters and engine in ("native", "vllm"):
        raise ConfigError(
            f"algorithm.shaping.group_filters: stale drops nothing with rollout.engine {engine}, which samples each "
            "step with the newest weights; remove it"
        )


def _kl_controller(section: KlSection | None) -> kl.Controller | None:
    if section is None:
        return None
    if isinstance(section.controller, AdaptiveController):
        return kl.AdaptiveController(section.coef, section.controller.target, section.controller.horizon)
    return kl.FixedController(section.coef)


def _by_group(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return groups


def _greedy(group: Group) -> Group:
    return replace(group, group_id=f"{group.group_id}{GREEDY}", size=1, seeds=group.seeds[:1], split="baseline")
