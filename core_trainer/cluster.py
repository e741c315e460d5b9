"""Everything a run needs before its first step: Ray, data, and the worker groups; and all of it stopped again."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import torch
from ray._private.node import Node

from core_trainer import checkpoint, models
from core_trainer.advantages import check_algorithm
from core_trainer.checkpoint import TrainerState
from core_trainer.data import PromptSampler, check_lengths, load_prompts
from core_trainer.job import Job, Reporter
from core_trainer.rollout.hybrid import Published
from core_trainer.rollout.sample import time_limit_s
from core_trainer.validation import ValidationSet, load_sets
from core_trainer.workers.critic import CriticWorker
from core_trainer.workers.policy import CRITIC, PolicyWorker
from core_trainer.workers.reference import ReferenceWorker
from core_trainer.workers.reward import RewardWorker
from core_trainer.workers.worker_group import WorkerGroup, free_port
from rlinsight import names, telemetry
from rlinsight.config import Config
from rlinsight.errors import EngineError, WorkerError

ABORT_TIMEOUT_S = 2.0  # how long workers may take to deliver telemetry when the run is cut short
CLOSE_TIMEOUT_S = 15.0
START_TIMEOUT_S = 3600.0  # a worker that loads its model or hands its engine weights for so long hangs
# The autoscaler, the dashboard with its usage report, and the monitor that prints workers' logs: a run on one machine
# uses none, and each is a Python process that takes seconds of a processor to start, the dashboard before any worker.
IDLE_SERVICES = ("start_monitor", "start_api_server", "start_log_monitor")


class Cluster:
    """Worker groups and data of one attempt. A context manager: on exit every worker is gone and Ray is down."""

    policy: WorkerGroup
    reference: WorkerGroup | None = None  # None without a KL, and with adapters: the policy itself without them
    critic: WorkerGroup | None = None
    reward: WorkerGroup
    sampler: PromptSampler
    validation_sets: list[ValidationSet]
    fingerprint: dict[str, Any]  # what a checkpoint of this run belongs to
    state: TrainerState | None = None  # of the checkpoint this attempt starts from
    policy_version = 0
    replicas: list[str]  # of the rollout engines, by name
    ledger: list[list[Published]]  # of the first weight sync, by policy worker

    def __init__(self, config: Config, job: Job, reporter: Reporter) -> None:
        self.config, self.job, self.reporter = config, job, reporter
        self._groups: list[WorkerGroup] = []

    def __enter__(self) -> Self:
        try:
            with telemetry.span(names.SETUP, announce=True):
                self._start()
        except BaseException:  # also when interrupted: no worker is left behind; passed on
            self._stop(ABORT_TIMEOUT_S)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(CLOSE_TIMEOUT_S if kind is None else ABORT_TIMEOUT_S)

    def _start(self) -> None:
        config, job, say = self.config, self.job, self.reporter.stage
        check_algorithm(config.algorithm, config.rollout.group_size)
        say(f"model {config.model.source}")
        model_dir = models.resolve(config.model)
        own_critic = config.algorithm.model_critic
        critic_dir = models.resolve(own_critic.model_section(config.model)) if own_critic else None
        self.fingerprint = _fingerprint(config, model_dir)
        state = checkpoint.resume(job.resume, self.fingerprint) if job.resume else None
        tokenizer = models.load_tokenizer(model_dir)
        say(f"data {config.data.train}")
        prompts = load_prompts(config.data, tokenizer, config.run.seed)
        trainer, context = config.trainer, models.context_length(model_dir)
        check_lengths(prompts, context, config.rollout.max_new_tokens)
        self.sampler = PromptSampler(prompts, trainer.prompts_per_step, config.run.seed, config.data.shuffle)
        self.validation_sets = load_sets(config, tokenizer, context)
        say("workers")
        workers = trainer.num_workers
        self._start_ray(num_processes(config))
        resource = {names.ALGORITHM: config.algorithm.name, names.MODEL: config.model.source}
        gpus = 1.0 if torch.cuda.is_available() else 0.0  # untested
        if gpus:
            check_gpus(config, int(ray.cluster_resources().get("GPU", 0)))
        self.reward = self._spawn(WorkerGroup(RewardWorker, "reward", 1, job, config, resource))
        self.policy = self._spawn(WorkerGroup(PolicyWorker, "policy", workers, job, config, resource, num_gpus=gpus))
        if has_reference(config):
            self.reference = self._spawn(WorkerGroup(ReferenceWorker, "reference", workers, job, config, resource))
        if own_critic is not None:
            self.critic = self._spawn(WorkerGroup(CriticWorker, CRITIC, workers, job, config, own_critic, resource))
        limit_s = start_limit_s(config)
        checked = [*prompts, *(prompt for each in self.validation_sets for prompt in each.prompts)]
        self.reward.call("start", checked, timeout_s=limit_s)
        servers = self._start_servers(model_dir, resource) if num_servers(config) else []
        port = free_port() if workers > 1 else None
        names_by_rank = self.policy.call("start", model_dir, job.resume, port, servers, timeout_s=limit_s)
        self.replicas = [name for replicas in names_by_rank for name in replicas]
        if self.reference is not None:
            self.reference.call("start", model_dir, timeout_s=limit_s)
        if self.critic is not None:
            resume = job.resume / CRITIC if job.resume else None
            port = free_port() if workers > 1 else None
            self.critic.call("start", critic_dir, resume, port, timeout_s=limit_s)
        if state is not None:
            self.state = state
            self.sampler.load_state_dict(state.sampler)
            self.policy_version = self.policy.call("version")[0]
        self.ledger = self.policy.call("sync_weights", timeout_s=limit_s)

    def _start_servers(self, model_dir: Path, resource: dict[names.Name, str]) -> list[Any]:
        """The run's own vLLM servers; their addresses."""
        from core_trainer.rollout.vllm.servers import VllmServerWorker

        config, section = self.config, self.config.rollout.vllm
        self.reporter.stage(f"{section.replicas} vLLM servers")
        gpus = float(section.tensor_parallel_size) if torch.cuda.is_available() else 0.0  # untested
        group = WorkerGroup(VllmServerWorker, "vllm", section.replicas, self.job, config, resource, num_gpus=gpus)
        return self._spawn(group).call("start", model_dir, timeout_s=start_limit_s(config))

    def _spawn(self, group: WorkerGroup) -> WorkerGroup:
        self._groups.append(group)
        return group

    def _start_ray(self, num_workers: int) -> None:
        """A Ray of our own on this machine, which nobody else uses, for so many worker processes.

        Raises WorkerError when it does not start, for which Ray leaves it 30 s.
        """
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let everything else go before training
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # announces its token each time
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with _without_idle_services():
                ray.init(
                    "local",
                    num_cpus=num_workers,  # so many processes start at once, before they are asked for
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
        except Exception as error:  # Ray has no class of its own for it
            reason = " ".join(str(error).split())
            raise WorkerError(
                f"Ray did not start ({reason}); free memory or processors of this machine and run it again, or look "
                "into /tmp/ray/session_latest/logs"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # ray.init takes it; stopping is launch's business

    def _stop(self, timeout_s: float) -> None:
        for group in reversed(self._groups):
            group.close(timeout_s)
        self._groups.clear()
        if ray.is_initialized():
            ray.shutdown()


@contextmanager
def _without_idle_services() -> Iterator[None]:
    """In this block Ray starts without its IDLE_SERVICES, for which ``ray.init`` has no option.

    A later Ray that names them otherwise starts them, as it would without this.
    """
    kept = {name: getattr(Node, name) for name in IDLE_SERVICES if hasattr(Node, name)}
    for name in kept:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def start_limit_s(config: Config) -> float:
    """Seconds after which a worker that starts or takes weights is stuck: its engine may have requests to wait for."""
    return max(START_TIMEOUT_S, time_limit_s(config.rollout))


def has_reference(config: Config) -> bool:
    """Whether the run has reference workers; a policy that trains adapters is its own reference without them."""
    return config.algorithm.kl is not None and config.model.lora is None


def num_servers(config: Config) -> int:
    """vLLM servers that the run starts."""
    return config.rollout.vllm.replicas if config.rollout.engine == "vllm_server" else 0


def num_processes(config: Config) -> int:
    """The run's worker processes, owners of vLLM servers among them."""
    kinds = 1 + has_reference(config) + (config.algorithm.model_critic is not None)
    return 1 + config.trainer.num_workers * kinds + num_servers(config)


def check_gpus(config: Config, there: int) -> None:
    """Raise EngineError when workers and servers need more GPUs than are ``there``: Ray would wait for them."""
    workers, servers, section = config.trainer.num_workers, num_servers(config), config.rollout.vllm
    needed = workers + servers * section.tensor_parallel_size
    if needed > there:
        told = f" and {servers} vLLM servers with {section.tensor_parallel_size} each" if servers else ""
        fix = "lower rollout.vllm.replicas, or set rollout.engine: vllm" if servers else "lower trainer.num_workers"
        raise EngineError(f"{workers} policy workers with one GPU each{told} need {needed}, there are {there}; {fix}")


def _fingerprint(config: Config, model_dir: Path) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
    algorithm, lora = config.algorithm, config.model.lora
    controller = algorithm.kl.controller.type if algorithm.kl is not None else None
    return checkpoint.fingerprint(
        model_dir,
        algorithm=algorithm.name,
        critic=algorithm.critic.type if algorithm.critic is not None else None,
        kl_controller=controller,
        lora=lora.model_dump(mode="json") if lora is not None else None,
        master_dtype=config.model.master_dtype,
    )
