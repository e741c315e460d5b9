"""What rollout engines, tools and validations of a synthetic run report, when it has ``serving``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from rlinsight import names
from tests.synthetic.run import SECOND, Run
from tests.synthetic.wire import Process, new_span_id, new_trace_id

SPEED = 50.0  # tokens a request decodes per second


def extra_random(run: Run, step: int) -> random.Random:
    """Its own stream, so that reporting more does not change what is reported otherwise."""
    return random.Random(f"serving/{run.seed}/{run.attempt}/{step}")


def emit_request(
    run: Run, rollout: dict[str, Any], identity: dict[str, Any], turn_span: bytes, policy: Process, rng: random.Random
) -> None:
    """The engine's own span of a rollout's one request."""
    start, end = rollout["times"]
    step, slow = rollout["step"], run.has("slow_after_sync", rollout["step"]) and rollout["replica"] == 1
    waits = run.has("straggler", step) and rollout["place"] == (2, 1)
    decode_s = rollout["tokens"] / (SPEED * rng.uniform(0.95, 1.05)) * (4 if slow else 1)
    queue_s = 0.9 * (end - start) / SECOND if waits else 0.01
    attributes = {
        **identity,
        names.TURN_INDEX: 0,
        names.REQUEST_ID: f"req-{rollout['rollout_id']}",
        names.ENGINE: "native",
        names.REPLICA: policy.lane,
        names.POLICY_VERSION: rollout["version"],
        names.QUEUE_S: queue_s,
        names.PREFILL_S: 0.02,
        names.DECODE_S: decode_s,
        names.TTFT_S: queue_s + 0.02,
        names.E2E_S: queue_s + 0.02 + decode_s,
        names.INPUT_TOKENS: rollout["prompt_tokens"],
        names.OUTPUT_TOKENS: rollout["tokens"],
        names.CACHED_TOKENS: rollout["cached"],
        names.MAX_TOKENS: 2 * run.tokens,
        names.FINISH_REASONS: [rollout["finish"]],
        names.PREEMPTIONS: 0,
        names.ABORTED: False,
        names.CORRUPTED: False,
    }
    policy.span(names.ENGINE_REQUEST, start, end, attributes, rollout["trace"], turn_span, rng)
    if run.has("request_error", step) and rollout["place"] == (0, 1):
        asked = {name: attributes[name] for name in (*identity, names.TURN_INDEX, names.ENGINE, names.REPLICA)}
        asked |= {names.REQUEST_ID: f"first-{rollout['rollout_id']}", names.FINISH_REASONS: ["error"]}
        asked |= {names.ERROR_TYPE: "RequestTimeout", names.BUCKET: "wasted"}
        middle = (start + end) // 2
        policy.span(names.ENGINE_REQUEST, start, middle, asked, rollout["trace"], turn_span, rng, failed=True)


def emit_tool(run: Run, rollout: dict[str, Any], identity: dict[str, Any], policy: Process, rng: random.Random) -> None:
    """One call of a calculator, in sample 0 of group 0."""
    failed = run.has("tool_error", rollout["step"])
    start, end = rollout["times"]
    attributes = {
        **identity,
        names.TURN_INDEX: 0,
        names.TOOL_NAME: "calculator",
        names.TOOL_CALL_ID: f"call-{rollout['rollout_id']}",
    }
    if failed:
        attributes[names.ERROR_TYPE] = "TimeoutError"
    policy.span(
        f"{names.TOOL} calculator",
        start,
        start + (end - start) // 10,
        attributes,
        rollout["trace"],
        rollout["span"],
        rng,
        failed=failed,
    )


def emit_samples(run: Run, step: int, start: int, end: int, policies: list[Process], rng: random.Random) -> None:
    """Two samples a second of every engine while the step samples, and for 10 s after, when nothing runs."""
    for policy in policies:
        starved = run.has("starved_engine", step) and policy.rank == 1
        for i, time_ns in enumerate(
            [*range(start + SECOND // 4, end, SECOND // 2), *range(end + 1, end + 10 * SECOND, SECOND // 2)]
        ):
            running = 0 if starved or time_ns > end else rng.randint(2, 4)
            made = (step * 20 + i) * 100
            attributes = {
                names.STEP_INDEX: step,
                names.ENGINE: "native",
                names.REPLICA: policy.lane,
                names.RUNNING: running,
                names.WAITING_CAPACITY: 0,
                names.WAITING_DEFERRED: 0,
                names.KV_USAGE: running / 8,
                names.PREFIX_QUERIES: made,
                names.PREFIX_HITS: made // 2,
                names.ENGINE_PROMPT_TOKENS: made,
                names.ENGINE_OUTPUT_TOKENS: made,
                names.ENGINE_PREEMPTIONS: 0,
                names.AWAKE: True,
            }
            policy.event(names.ENGINE_SAMPLE, time_ns, attributes)


def emit_check(time_ns: int, process: Process) -> None:
    """A check of the model, as `rlinsight check-model` sends it: parity on all prompts but one, at a near-tie."""
    of = {names.CHECK_ID: "check-20250101-110000-c3d4", names.CHECK_PART: "native", names.CHECK_TOKENS_PER_S: 400.0}
    found = {
        names.CHECK_STATUS: "ok",
        names.REASON: "greedy tokens of 1 prompts part where two are equally likely: rounding",
        names.CHECK_ARCHITECTURE: "LlamaForCausalLM",
        names.CHECK_PARAMETERS: 134_515_008,
        names.CHECK_DTYPE: "float32",
        names.CHECK_LOAD_S: 2.5,
        names.CHECK_PROMPTS: 32,
        names.CHECK_TOKENS: 1900,
        names.CHECK_PARITY: 31 / 32,
        names.CHECK_DIVERGENT_PROMPT: 3,
        names.CHECK_DIVERGENT_POSITION: 17,
        names.CHECK_EXPECTED_PIECE: " seven",
        names.CHECK_FOUND_PIECE: " 7",
        names.CHECK_EXPECTED_LOG_PROB: -0.70001,
        names.CHECK_FOUND_LOG_PROB: -0.70002,
        names.CHECK_LEAD: 1e-5,
        names.CHECK_MAX_GAP: 4e-5,
        names.CHECK_MEAN_GAP: 2e-6,
        names.CODE_VERSION: "0.1.0",
        names.HOST: '{"cores": 2}',
    }
    process.event(names.MODEL_CHECK, time_ns, of | found)
    seconds = {name: 0.01 * i for i, name in enumerate(names.CHECK_LATENCY.values(), start=1)}
    counts = {names.CHECK_CONCURRENCY: 4, names.CHECK_REQUESTS: 16, names.OUTPUT_TOKENS: 480}
    process.event(names.MODEL_CHECK_LATENCY, time_ns, of | counts | seconds)


def emit_eval(run: Run, step: int, time_ns: int, controller: Process, policy: Process, rng: random.Random) -> None:
    """A validation of one rollout, and its metrics over 64 prompts."""
    chance = 1 - run.skill(step) if "eval_falls" in run.faults else run.skill(step)
    value = min(1.0, max(0.0, chance + rng.gauss(0, 0.005)))
    for metric, measured in (("mean@4", value), ("pass@4", 1 - (1 - value) ** 4)):
        facts = {
            names.STEP_INDEX: step,
            names.POLICY_VERSION: step,
            names.EVAL_DATASET: "sums-test",
            names.EVAL_METRIC: metric,
            names.EVAL_VALUE: measured,
            names.EVAL_STD_ERROR: (measured * (1 - measured) / 64) ** 0.5,
            names.EVAL_SAMPLES: 256,
        }
        controller.event(names.EVAL, time_ns, facts)
    identity = {
        names.STEP_INDEX: step,
        names.ROLLOUT_ID: f"{run.run_id}/eval/{step}/0",
        names.PROMPT_ID: "sums-test/0",
        names.LANE: policy.lane,
    }
    usage = {names.INPUT_TOKENS: 18, names.OUTPUT_TOKENS: 2, names.FINISH_REASONS: ["stop"]}
    versions = {names.POLICY_VERSION_MIN: step, names.POLICY_VERSION_MAX: step}
    trace, start = new_trace_id(rng), time_ns - SECOND // 100
    sample = {**identity, **usage, **versions, names.STATUS: "ok", names.SPLIT: "eval"}
    root = policy.span(names.ROLLOUT, start, time_ns, sample, trace, None, rng, new_span_id(rng))
    request = {names.TURN_INDEX: 0, names.REQUEST_ID: f"req-eval-{step}", names.POLICY_VERSION: step}
    where = {names.ENGINE: "native", names.REPLICA: policy.lane}
    turn = {**identity, **usage, **request, **where}
    turn_span = policy.span(f"{names.TURN} tiny", start, time_ns, turn, trace, root, rng)
    policy.span(names.ENGINE_REQUEST, start, time_ns, turn | {names.DECODE_S: 2 / SPEED}, trace, turn_span, rng)
    content: dict[str, Any] = {**identity, names.TURN_INDEX: 0}
    if run.texts:
        content |= {names.PROMPT_TEXT: "<|user|>1 + 1?<|assistant|>", names.RESPONSE_TEXT: "It is 2"}
    if run.texts and run.arrays:
        content[names.TOKEN_IDS] = np.array([7, 8], "<i4").tobytes()
    policy.event(names.TURN_CONTENT, time_ns, content, trace, turn_span)
