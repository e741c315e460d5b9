"""The steps of a synthetic run: phases, worker calls, weight syncs, metrics and what producers say of themselves."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlinsight import names
from tests.synthetic.rollouts import emit_rollouts
from tests.synthetic.run import PHASES, SECOND, WORKER_METHODS, Run
from tests.synthetic.serving import emit_check, emit_eval, emit_samples, extra_random
from tests.synthetic.wire import Process, Request, flush, new_span_id, new_trace_id


def requests(run: Run) -> Iterator[Request]:
    """All OTLP requests of a run, step by step, in the order the processes would send them."""
    duration = int(sum(seconds for _, _, seconds, _ in PHASES) * SECOND * 1.01)
    start_ns = run.start_ns or time.time_ns() - duration * (run.steps + 1)
    controller = Process(run, "controller", 0, "controller")
    policies = [Process(run, "policy", rank, f"policy/{rank}") for rank in range(run.replicas)]
    random_ = random.Random(f"{run.seed}/{run.attempt}")
    controller.event(names.RUN_START, start_ns, _run_facts(run))
    controller.span(
        names.SETUP, start_ns, start_ns + SECOND, {names.LANE: "controller"}, new_trace_id(random_), None, random_
    )
    yield from flush(controller, *policies)
    step_start = start_ns + 2 * SECOND
    for step in range(run.first_step, run.first_step + run.steps):
        step_end = _step(run, step, step_start, controller, policies, random_)
        _health(controller, step_end, run)
        for policy in policies:
            _health(policy, step_end, run)
        yield from flush(controller, *policies)
        step_start = step_end + SECOND // 100
    if run.status is None:
        _open_step(run, run.last_step + 1, step_start, controller, policies, random_)
    else:
        code = {"finished": 0, "failed": 1, "interrupted": 130}[run.status]
        facts = {names.STATUS: run.status, names.EXIT_CODE: code, names.REASON: run.reason or "done"}
        controller.event(names.RUN_END, step_start, facts)
    _health(controller, time.time_ns() if "hung" in run.faults else step_start, run)
    yield from flush(controller, *policies)
    yield policies[0].gauge("process.memory", step_start, 1.5e9)


def _step(
    run: Run, step: int, start_ns: int, controller: Process, policies: list[Process], random_: random.Random
) -> int:
    """Emit one finished step; returns its end."""
    trace, root = new_trace_id(random_), new_span_id(random_)
    cursor = start_ns
    windows = {}
    for name, phase, seconds, bucket in PHASES:
        if phase == "old_log_probs" and run.has("gap", step):
            cursor += 10 * SECOND
        phase_end = cursor + int(seconds * random_.uniform(0.9, 1.1) * SECOND)
        span_id = new_span_id(random_)
        windows[phase] = (cursor, phase_end, span_id)
        attributes: dict[str, Any] = {names.STEP_INDEX: step, names.PHASE: phase, names.LANE: "controller"}
        if phase not in WORKER_METHODS:
            attributes[names.BUCKET] = bucket
        if phase == "ref_log_probs":
            attributes[names.SKIPPED] = "kl_coef is 0"
        controller.start(name, cursor, {**attributes, names.START_PARENT: root}, trace, span_id)
        controller.span(name, cursor, phase_end, attributes, trace, root, random_, span_id)
        if phase in WORKER_METHODS:
            for policy in policies:
                _worker_call(policy, phase, step, cursor, phase_end, trace, span_id, random_)
        cursor = phase_end
    step_end = cursor + SECOND // 20
    rollouts = emit_rollouts(run, step, windows, (trace, root), controller, policies, random_)
    for policy in policies:
        _sync(run, policy, step, windows["sync"], trace, random_)
    if run.serving:
        rng = extra_random(run, step + 1_000_000)
        emit_samples(run, step, *windows["sample"][:2], policies, rng)
        if step % 2 == 0:
            emit_eval(run, step, step_end - SECOND // 50, controller, policies[0], rng)
        if step == run.first_step:
            emit_check(start_ns, controller)
    if run.has("stale_engine", step - 1):
        _alert(step, step_end, controller)
    controller.start(names.STEP, start_ns, {names.STEP_INDEX: step, names.LANE: "controller"}, trace, root)
    num_tokens = sum(rollout["tokens"] + rollout["prompt_tokens"] for rollout in rollouts)
    attributes = {
        names.STEP_INDEX: step,
        names.LANE: "controller",
        names.POLICY_VERSION_IN: step - 1,
        names.POLICY_VERSION_OUT: step,
        names.NUM_PROMPTS: run.groups,
        names.BATCH_SIZE: len(rollouts),
        names.NUM_TOKENS: num_tokens,
    }
    controller.span(names.STEP, start_ns, step_end, attributes, trace, None, random_, root, message="ok")
    _metrics(run, step, step_end, rollouts, num_tokens / ((step_end - start_ns) / SECOND), controller, random_)
    return step_end


def _open_step(
    run: Run, step: int, start_ns: int, controller: Process, policies: list[Process], random_: random.Random
) -> None:
    """A step that has begun and is in its first phases: starts without spans."""
    trace, root = new_trace_id(random_), new_span_id(random_)
    controller.start(names.STEP, start_ns, {names.STEP_INDEX: step, names.LANE: "controller"}, trace, root)
    phase = new_span_id(random_)
    attributes = {names.STEP_INDEX: step, names.PHASE: "sample", names.LANE: "controller", names.START_PARENT: root}
    controller.start(names.SAMPLE, start_ns + SECOND // 20, attributes, trace, phase)
    if "missing_rank" in run.faults:
        begun = [(policy, "generate") for policy in policies] + [(policy, "update") for policy in policies[:-1]]
        for policy, method in begun:
            inside = {names.STEP_INDEX: step, names.METHOD: method, names.LANE: policy.lane}
            attributes = {**inside, names.START_PARENT: phase}
            policy.start(names.WORKER_CALL, start_ns + SECOND // 10, attributes, trace, new_span_id(random_))


def _worker_call(
    policy: Process, phase: str, step: int, start: int, end: int, trace: bytes, parent: bytes, random_: random.Random
) -> None:
    call, inside = new_span_id(random_), {names.STEP_INDEX: step, names.LANE: policy.lane}
    span = (end - start) // 50
    attributes = {**inside, names.METHOD: WORKER_METHODS[phase], names.WORKER_GROUP: "policy"}
    policy.start(names.WORKER_CALL, start + span, {**attributes, names.START_PARENT: parent}, trace, call)
    policy.span(names.WORKER_CALL, start + span, end - span, attributes, trace, parent, random_, call)
    leaves = {"sample": (names.PREFILL, names.DECODE), "train": (names.MICRO_BATCH, names.MICRO_BATCH, names.OPTIMIZER)}
    parts = leaves.get(phase, (names.MICRO_BATCH,))
    width = (end - start - 4 * span) // len(parts)
    for i, name in enumerate(parts):
        leaf_start = start + 2 * span + i * width
        attributes = {**inside, names.BUCKET: "productive", names.NUM_TOKENS: 512}
        policy.span(name, leaf_start, leaf_start + width, attributes, trace, call, random_)


def _sync(
    run: Run, policy: Process, step: int, window: tuple[int, int, bytes], trace: bytes, random_: random.Random
) -> None:
    if run.has("missing_sync", step) and policy.rank == 1:
        return
    start, end, parent = window
    attributes: dict[str, Any] = {
        names.STEP_INDEX: step,
        names.LANE: policy.lane,
        names.POLICY_VERSION: step,
        names.ENGINE: "native",
        names.REPLICA: policy.lane,
        names.BYTES: 0,
        names.REFRESHED_BYTES: 134_515_008,
    }
    if run.serving:
        wrong = run.has("wrong_checksum", step) and policy.rank == 0
        attributes |= {names.PAUSE_MODE: "wait", names.SYNC_IN_FLIGHT: 0, names.SYNC_ABORTED: 0}
        attributes |= {names.CHECKSUM_TRAINED: f"{step:08x}", names.CHECKSUM_SERVED: f"{step - wrong:08x}"}
    failed = run.has("sync_failed", step) and policy.rank == 0
    if failed:
        attributes[names.ERROR_TYPE] = "ConnectionError"
    policy.span(names.WEIGHT_SYNC, start, end, attributes, trace, parent, random_, failed=failed)


def _alert(step: int, time_ns: int, controller: Process) -> None:
    facts = {
        names.STEP_INDEX: step,
        names.ALERT_RULE: "stale_engine",
        names.ALERT_SEVERITY: "critical",
        names.ALERT_MESSAGE: f"policy/1 sampled step {step} with weights of another version than it was given",
        names.ALERT_EVIDENCE: "FROM sync_health('run') WHERE problem IS NOT NULL",
    }
    controller.event(names.ALERT, time_ns, facts)


def _metrics(
    run: Run,
    step: int,
    time_ns: int,
    rollouts: list[dict[str, Any]],
    tokens_per_s: float,
    controller: Process,
    random_: random.Random,
) -> None:
    """One event per step metric; what the arrays allow is computed from them, the rest is made up."""
    rewards = np.array([rollout["reward"] for rollout in rollouts])
    lengths = np.array([rollout["tokens"] for rollout in rollouts])
    by_group = rewards.reshape(run.groups, run.group_size)
    values = {
        names.M_REWARD_MEAN: rewards.mean(),
        names.M_REWARD_STD: rewards.std(),
        names.M_REWARD_MAX: rewards.max(),
        names.M_REWARD_MIN: rewards.min(),
        names.M_ZERO_VARIANCE: (by_group.std(axis=1) == 0).mean(),
        names.M_ADVANTAGE_ABS: np.mean([abs(rollout["advantage"]) for rollout in rollouts]),
        names.M_LENGTH_MEAN: lengths.mean(),
        names.M_LENGTH_MAX: lengths.max(),
        names.M_TRUNCATED: np.mean([rollout["finish"] == "length" for rollout in rollouts]),
        names.M_PROMPT_LENGTH: 18.0,
        names.M_TOKENS_PER_S: tokens_per_s,
        names.M_SAMPLES_PER_S: tokens_per_s / 30,
        names.M_GEN_TOKENS_PER_S: tokens_per_s * 1.5,
        names.M_LR: 2e-5,
        names.M_STALENESS: 0.0,
    }
    if run.arrays:
        gaps = np.concatenate([rollout["gaps"] for rollout in rollouts]).astype(np.float64)
        moves = np.concatenate([rollout["moves"] for rollout in rollouts]).astype(np.float64)
        values |= {
            names.M_ENTROPY: np.concatenate([rollout["entropy"] for rollout in rollouts]).mean(),
            names.M_ROLLOUT_KL: (np.expm1(gaps) - gaps).mean(),
            names.M_ROLLOUT_ABS: np.abs(gaps).mean(),
            names.M_ROLLOUT_MAX: np.abs(gaps).max(),
            names.M_MISMATCHED: (gaps != 0).sum(),
            names.M_POLICY_KL: (np.expm1(-moves) + moves).mean(),
            names.M_CLIP_FRACTION: np.concatenate([rollout["clipped"] for rollout in rollouts]).mean(),
            names.M_RATIO_MAX: np.exp(moves).max(),
        }
    made_up = {
        names.M_REF_KL: 0.002 * step,
        names.M_LOSS: random_.gauss(0, 0.01),
        names.M_POLICY_LOSS: random_.gauss(0, 0.01),
        names.M_KL_LOSS: 0.001 * step,
        names.M_GRAD_NORM: random_.uniform(0.5, 2.0),
        names.M_WEIGHTS_CHANGED: random_.uniform(0.5, 0.7),
    }
    values |= made_up
    if run.ppo:
        values |= _ppo_metrics(step, rollouts, run.group_size)
    _plant(run, step, values)
    for name, value in values.items():
        facts = {
            names.STEP_INDEX: step,
            names.METRIC_NAME: name,
            names.METRIC_VALUE: float(value),
            names.METRIC_AGG: names.METRICS[name].agg,
            names.METRIC_UNIT: names.METRICS[name].unit,
            names.METRIC_WEIGHT: "rollout",
        }
        controller.event(names.STEP_METRIC, time_ns, facts)


def _ppo_metrics(step: int, rollouts: list[dict[str, Any]], group_size: int) -> dict[Any, Any]:
    """What a run with ``ppo`` reports beside; made up, but for the groups dropped."""
    share = 0.5 * 0.8**step
    return {
        names.M_VALUE_LOSS: 0.2 * 0.8**step,
        names.M_EXPLAINED_VARIANCE: 0.9 - 1.2 * 0.7**step,
        names.M_VALUE_CLIP_FRACTION: share,
        names.M_VALUE_MEAN: 0.6 - 0.4 * 0.8**step,
        names.M_RETURN_MEAN: 0.6 - 0.2 * 0.9**step,
        names.M_CRITIC_GRAD_NORM: 1 + share,
        **{metric: (1 + i) * share for i, metric in enumerate(names.M_CRITIC_GRAD_NORM_GROUPS.values())},
        names.M_CRITIC_LR: 1e-5,
        names.M_KL_COEF: 0.01 * 1.1**step,
        names.M_KL_REWARD: 0.03 * step,
        names.M_GROUPS_DROPPED: sum(rollout["dropped"] for rollout in rollouts) / group_size,
        names.M_SAMPLING_ROUNDS: 1 + step % 2,
        **{metric: 0.001 * (1 + i) * 1.05**step for i, metric in enumerate(names.M_CORRECTION.values())},
        names.M_CORRECTION["effective_sample_size"]: 1 - share,
        names.M_CORRECTION["weight_effective_sample_size"]: 1 - share / 2,
        names.M_CORRECTION["perplexity_ratio"]: 1.02,
        names.M_CORRECTION["weight_mean"]: 0.98,
        **{metric: (1 + i) * 0.2 for i, metric in enumerate(names.M_GRAD_NORM_GROUPS.values())},
    }


def _plant(run: Run, step: int, values: dict[Any, Any]) -> None:
    """Faults that show in the step metrics only."""
    if "diverging" in run.faults and step >= run.fault_step:
        for name in values:
            values[name] *= 1.01
    if "lagged" in run.faults:
        wave = [0.5, -0.9, 0.1, 0.8, -0.3, -0.7, 0.9, 0.2, -0.6, 0.4, -0.1, 0.7]
        values[names.M_LOSS] = wave[step % len(wave)]
        values[names.M_GRAD_NORM] = 2 + wave[(step - 2) % len(wave)]
    if "bad_resume" in run.faults:
        values[names.M_GRAD_NORM] *= 20


def _health(process: Process, time_ns: int, run: Run) -> None:
    dropped = run.dropped if process.role == "controller" else 0
    emitted = process.emitted + 1 + dropped  # this report counts itself
    facts = {
        names.PRODUCER: process.producer,
        names.EMITTED: emitted,
        names.SENT: process.emitted,
        names.DROPPED_QUEUE: dropped,
        names.DROPPED_LIMIT: 0,
        names.DROPPED_DISK: 0,
        names.DROPPED_CRASH: 0,
        names.DROPPED_FAULT: 0,
        names.REJECTED: 0,
        names.RETRIED: 0,
        names.QUEUE_LENGTH: 0,
        names.OVERHEAD_NS: 20_000 * process.emitted,
        names.LABELS_DROPPED: 0,
        names.METRICS_OVERFLOWING: 0,
    }
    process.event(names.PRODUCER_HEALTH, time_ns, facts)


def _run_facts(run: Run) -> dict[str, Any]:
    return {
        names.RUN_NAME: run.name,
        names.PROJECT: run.project,
        names.CONFIG: '{"trainer": {"total_steps": 5, "learning_rate": 2e-05}, "rollout": {"group_size": 4}}',
        names.CONFIG_HASH: "5f" * 32,
        names.CODE_VERSION: "0.1.0",
        names.HOST: '{"hostname": "node0", "num_cpus": 2}',
        names.TOTAL_STEPS: run.total_steps or run.last_step,
        names.RESUMED_FROM_STEP: run.resumed_from_step or 0,
    }
