"""Supervised fine-tuning: teaches a base model the form of an answer, before its rewards teach it which one.

    examples -> pack -> cross-entropy of the responses -> update -> record (-> validate -> checkpoint)

Prompts are read, templated and drawn as in a run that samples (data.py), and batches are packed by the same layout, so
a response is learnt in the very tokens and positions in which it is sampled later. A checkpoint is a model directory:
``model.source`` of `rlinsight train`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from core_trainer import checkpoint, models
from core_trainer.batching import TrainSample
from core_trainer.checkpoint import Best, TrainerState
from core_trainer.cluster import START_TIMEOUT_S, Cluster
from core_trainer.data import PromptSampler, load_prompts
from core_trainer.job import Job, Reporter, RunSummary, StepReport
from core_trainer.metrics import emit
from core_trainer.optimizer import update_metrics
from core_trainer.types import Prompt
from core_trainer.workers.sft import SftWorker
from core_trainer.workers.worker_group import WorkerGroup, free_port
from rlinsight import names, telemetry
from rlinsight.config import SftConfig, SftDataSection, SftTrainerSection
from rlinsight.errors import CheckpointError, ConfigError, DataError, RlinsightError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VALIDATION_LOSS = "loss"  # metric of table evals: mean cross-entropy of a held-out response token, in nats


def run(config: SftConfig, job: Job, reporter: Reporter) -> RunSummary:
    """Train until the last step or until the reporter passes on a stop; both end with a checkpoint.

    Raises RlinsightError for what the user can act on. Workers are gone when this returns or raises.
    """
    with SftCluster(config, job, reporter) as cluster:  # type: ignore[arg-type]  # only its _start reads the config
        return SftController(config, job, reporter, cluster).train()


class SftCluster(Cluster):
    """Data and the one worker group of an attempt."""

    config: SftConfig
    step = 0  # last step of the checkpoint this attempt starts from

    def _start(self) -> None:
        config, job, say = self.config, self.job, self.reporter.stage
        say(f"model {config.model.source}")
        model_dir = models.resolve(config.model)
        lora = config.model.lora
        self.fingerprint = checkpoint.fingerprint(
            model_dir,
            algorithm=config.algorithm.name,
            lora=lora and lora.model_dump(mode="json"),
            master_dtype=config.model.master_dtype,
        )
        state = checkpoint.resume(job.resume, self.fingerprint) if job.resume else None
        tokenizer = models.load_tokenizer(model_dir)
        say(f"data {config.data.train}")
        context = models.context_length(model_dir)
        examples = load_examples(config.data, tokenizer, config.run.seed, context)
        trained, held_out = split(examples, config.data.validation_fraction, config.run.seed)
        self.validation = [sample for _, sample in held_out]
        self.samples = {prompt.prompt_id: sample for prompt, sample in trained}
        prompts, trainer = [prompt for prompt, _ in trained], config.trainer
        self.sampler = PromptSampler(prompts, trainer.prompts_per_step, config.run.seed, config.data.shuffle)
        self.total_steps = total_steps(trainer, len(trained))
        self.best: Best | None = None
        if state is not None:
            self.step, self.best = state.step, state.best
            self.sampler.load_state_dict(state.sampler)
            if self.step >= self.total_steps:
                raise CheckpointError(
                    f"checkpoint {job.resume} has done {self.step} of {self.total_steps} steps; raise "
                    "trainer.epochs or trainer.total_steps to train on"
                )
        say("workers")
        self._start_ray(trainer.num_workers)
        # The workers' schedule ends where the epochs do.
        trainer = trainer.model_copy(update={"total_steps": self.total_steps})
        config = config.model_copy(update={"trainer": trainer})
        resource = {names.ALGORITHM: config.algorithm.name, names.MODEL: config.model.source}
        gpus = 1.0 if torch.cuda.is_available() else 0.0  # untested
        workers = trainer.num_workers
        self.group = self._spawn(WorkerGroup(SftWorker, "policy", workers, job, config, resource, num_gpus=gpus))
        port = free_port() if workers > 1 else None
        self.group.call("start", model_dir, job.resume, port, timeout_s=START_TIMEOUT_S)


class SftController:
    """State of the loop between steps."""

    def __init__(self, config: SftConfig, job: Job, reporter: Reporter, cluster: SftCluster) -> None:
        self.job, self.reporter, self.cluster = job, reporter, cluster
        self.dataset, self.trainer, self.total_steps = config.data.train, config.trainer, cluster.total_steps
        self.group, self.sampler = cluster.group, cluster.sampler
        self.step, self.best = cluster.step, cluster.best
        self.losses: list[float] = []
        self.saved = job.resume

    def train(self) -> RunSummary:
        """The loop over steps."""
        total, trainer = self.total_steps, self.trainer
        if self.step == 0 and self._validate() and trainer.keep_best:
            self._checkpoint()
        while self.step < total and not self.reporter.stop_requested():
            position = self.sampler.state_dict()
            try:
                self.train_step(self.step + 1)
            except RlinsightError:  # raised before the step's one update: weights are those of the last finished step
                self.sampler.load_state_dict(position)
                if self.step:
                    with suppress(Exception):  # the error under way matters more, and a worker may be what failed
                        self._checkpoint()
                raise
            self.step += 1
            due = trainer.validate_every and self.step % trainer.validate_every == 0
            best = self._validate() if due or self.step == total else False
            if (best and trainer.keep_best) or (trainer.checkpoint_every and self.step % trainer.checkpoint_every == 0):
                self._checkpoint()
        self._checkpoint()
        return RunSummary("finished" if self.step == total else "interrupted", self.step, self.losses, self.saved)

    def train_step(self, step: int) -> None:
        """One update."""
        began = time.perf_counter()
        attributes = {names.POLICY_VERSION_IN: step - 1, names.BATCH_SIZE: self.trainer.prompts_per_step}
        with telemetry.step_context(step), telemetry.span(names.STEP, attributes, root=True, announce=True) as span:
            with _phase(names.DATA, "overhead"):
                samples = weighted([self.cluster.samples[prompt.prompt_id] for prompt in self.sampler.next_step()])
            with _phase(names.TRAIN):
                loss = sum(self.group.scatter("forward_backward", self.group.split_groups(samples), step=step))
                update = self.group.call("optim_step", step, step=step)[0]
            with _phase(names.RECORD, "overhead"):
                num_tokens = sum(len(sample.prompt_token_ids) + sample.num_tokens for sample in samples)
                metrics: dict[str, float | None] = {
                    names.M_LOSS: loss,
                    **update_metrics([update]),
                    names.M_TOKENS_PER_S: num_tokens / (time.perf_counter() - began),
                }
                for name, value in metrics.items():
                    emit(name, value)
            span.set({names.POLICY_VERSION_OUT: step, names.NUM_PROMPTS: len(samples), names.NUM_TOKENS: num_tokens})
        self.losses.append(loss)
        self.reporter.step(StepReport(step, self.total_steps, time.perf_counter() - began, metrics))

    def _validate(self) -> bool:
        """Loss on the held-out examples; True when it is the best so far."""
        samples = self.cluster.validation
        if not samples:
            return False
        with telemetry.step_context(self.step), telemetry.span(names.VALIDATE, announce=True):
            total = sum(self.group.scatter("loss", self.group.split_groups(samples), step=self.step))
            loss = total / sum(sample.num_tokens for sample in samples)
            attributes = {
                names.EVAL_DATASET: self.dataset,
                names.EVAL_METRIC: VALIDATION_LOSS,
                names.EVAL_VALUE: loss,
                names.EVAL_SAMPLES: len(samples),
                names.POLICY_VERSION: self.step,
            }
            telemetry.event(names.EVAL, attributes)
        self.reporter.stage(f"validation loss {loss:.4f} after step {self.step}")
        best = checkpoint.improved(self.best, VALIDATION_LOSS, loss, self.step, maximize=False)
        self.best = best or self.best
        return best is not None

    def _checkpoint(self) -> None:
        """Write a resumable checkpoint of the last finished step, unless the one written last is of it."""
        if checkpoint.is_of(self.saved, self.step):
            return
        self.reporter.stage(f"writing checkpoint of step {self.step}")
        state = TrainerState(self.step, self.sampler.state_dict(), self.cluster.fingerprint, best=self.best)
        with telemetry.span(names.CHECKPOINT, {names.STEP_INDEX: self.step}, announce=True) as span:
            self.saved = checkpoint.write(
                self.job.run_dir / "checkpoints",
                state,
                lambda directory: self.group.call_rank(0, "save", directory),
                self.trainer.keep_checkpoints,
                self.trainer.keep_best,
            )
            span.set({names.PATH: str(self.saved)})


def _phase(name: str, bucket: str | None = None) -> telemetry.Span:
    """One span of the step; a phase without a bucket has workers' spans that say what its time counts as."""
    attributes = {names.PHASE: name.removeprefix("rl."), names.BUCKET: bucket}
    return telemetry.span(name, attributes, announce=True)


# Examples: pure ------------------------------------------------------------------------------------------------------


def load_examples(
    section: SftDataSection, tokenizer: PreTrainedTokenizerBase, seed: int, context: int | None
) -> list[tuple[Prompt, TrainSample]]:
    """Prompts with their responses, in file order. A response ends with the token that ends the model's turn.

    ``context`` is the model's longest sequence. Raises DataError naming the prompt, ConfigError for the section.
    """
    end = models.id_after_assistant_message(tokenizer) if tokenizer.chat_template else None
    end = tokenizer.eos_token_id if end is None else end
    if not isinstance(end, int):
        raise ConfigError("the model's tokenizer has no token that ends a response; set its eos_token")
    prompts = load_prompts(section, tokenizer, seed)
    for prompt in prompts:
        if not prompt.answer:
            raise DataError(f"prompt {prompt.prompt_id} has no response in {section.answer_column!r}; add one")
    responses = tokenizer([prompt.answer or "" for prompt in prompts], add_special_tokens=False, verbose=False)
    examples = []
    for prompt, token_ids in zip(prompts, responses["input_ids"], strict=True):
        length = len(token_ids) + 1
        if length > section.max_response_tokens:
            if section.overlong_responses == "drop":
                continue
            raise DataError(
                f"the response of {prompt.prompt_id} has {length} tokens, over data.max_response_tokens="
                f"{section.max_response_tokens}; raise it, or set data.overlong_responses: drop"
            )
        if context is not None and len(prompt.token_ids) + length > context:
            raise DataError(
                f"example {prompt.prompt_id} has {len(prompt.token_ids) + length} tokens, over the model's context of "
                f"{context}; lower data.max_prompt_tokens or max_response_tokens and drop what is over"
            )
        examples.append((prompt, _sample(prompt, [*token_ids, end])))
    if not examples:
        raise DataError(
            f"all {len(prompts)} responses of {section.train} are over data.max_response_tokens="
            f"{section.max_response_tokens}; raise it"
        )
    return examples


def _sample(prompt: Prompt, token_ids: list[int]) -> TrainSample:
    """A response as the update takes it, every token in the loss; nothing was sampled, so the rest is empty."""
    return TrainSample(
        rollout_id=prompt.prompt_id,
        group_id=prompt.prompt_id,
        prompt_token_ids=np.asarray(prompt.token_ids, dtype=np.int64),
        token_ids=np.asarray(token_ids, dtype=np.int64),
        loss_mask=np.ones(len(token_ids), dtype=bool),
        rollout_log_probs=np.empty(0, dtype=np.float32),
        policy_version=0,
        advantages=np.empty(0, dtype=np.float32),
    )


def split(
    examples: Sequence[tuple[Prompt, TrainSample]], fraction: float, seed: int
) -> tuple[list[tuple[Prompt, TrainSample]], list[tuple[Prompt, TrainSample]]]:
    """Examples to train on, and the share ``fraction`` of them held out, both in file order.

    Raises DataError when one of the two would be empty.
    """
    count = round(fraction * len(examples))
    if fraction and not 0 < count < len(examples):
        raise DataError(
            f"data.validation_fraction={fraction:g} of {len(examples)} examples holds out {count}; change it or add "
            "examples"
        )
    held_out = set(random.Random(f"{seed}/validation").sample(range(len(examples)), count))
    trained = [example for i, example in enumerate(examples) if i not in held_out]
    return trained, [example for i, example in enumerate(examples) if i in held_out]


def weighted(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples of one update: equal weights that make the loss a mean over their tokens.

    Each is a group of its own, also where an epoch ends and a step holds an example twice.
    """
    weight = 1 / sum(sample.num_tokens for sample in samples)
    return [replace(sample, group_id=str(i), token_weight=weight) for i, sample in enumerate(samples)]


def total_steps(section: SftTrainerSection, num_examples: int) -> int:
    """Steps of the run, from its epochs unless it says. Raises ConfigError when a schedule has no room in them."""
    if section.total_steps is not None:
        return section.total_steps
    total = math.ceil(section.epochs * num_examples / section.prompts_per_step)
    if section.lr_schedule != "constant" and section.warmup_steps >= total:
        raise ConfigError(
            f"trainer.lr_schedule={section.lr_schedule} never begins: warmup_steps={section.warmup_steps} of {total} "
            "steps; lower warmup_steps or raise epochs"
        )
    return total
