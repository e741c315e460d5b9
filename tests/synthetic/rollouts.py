"""The rollouts of a synthetic step: groups, samples, turns, rewards and what the update saw of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinsight import names
from tests.synthetic.run import SECOND, Run
from tests.synthetic.serving import emit_request, emit_tool, extra_random
from tests.synthetic.wire import Process, new_span_id, new_trace_id

WORDS = ["The", " sum", " is", " just", " a", " number", ",", " so", " we", " get"]


def emit_rollouts(
    run: Run,
    step: int,
    windows: Mapping[str, tuple[int, int, bytes]],
    step_context: tuple[bytes, bytes],
    controller: Process,
    policies: list[Process],
    random_: random.Random,
) -> list[dict[str, Any]]:
    """Groups, rollouts, turns, rewards and training events of one step. Returns what the step metrics come from."""
    sample_start, sample_end, _ = windows["sample"]
    rng = extra_random(run, step)
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
        controller.event(names.GROUP, sample_start, facts, *step_context)
        members = []
        for sample in range(run.group_size):
            rollout = _sample(run, step, (group, sample), prompt, a + b, random_)
            _plant(run, rollout)
            start = sample_start + random_.randrange(SECOND // 10)
            rollout["times"] = (start, _end(run, rollout, start, sample_end))
            policy = policies[rollout["replica"]]
            _emit_sampling(run, rollout, shared, step_context, policy, random_, rng)
            members.append(rollout)
        if group == 0:
            for rollout in members[: run.failed_rollouts]:
                rollout["reward"] = 0.0
                rollout["error"] = "reward numeric raised ValueError"
        if run.has("dropped_group", step) and group == 3:
            facts = {**shared, names.REASON: "no rollout finished", names.BATCH_SIZE: len(members), names.ENV: "sums"}
            controller.event(names.GROUP_DROPPED, sample_end, facts, *step_context)
        equal = len({member["reward"] for member in members}) == 1
        if run.ppo and equal:
            facts = {**shared, names.REASON: "zero_variance", names.BATCH_SIZE: len(members)}
            controller.event(names.GROUP_DROPPED, sample_end, facts, *step_context)
        mean = sum(member["reward"] for member in members) / len(members)
        spread = float(np.std([member["reward"] for member in members]))
        for rollout in members:
            rollout["advantage"] = (rollout["reward"] - mean) / (spread + 1e-6)
            rollout["dropped"] = run.ppo and equal
            _emit_scoring(run, rollout, shared, windows, controller, policies[rollout["replica"]], random_)
        rollouts.extend(members)
    return rollouts


def _sample(
    run: Run, step: int, place: tuple[int, int], prompt: str, answer: int, random_: random.Random
) -> dict[str, Any]:
    group, sample = place
    tokens = max(2, min(2 * run.tokens, int(random_.gauss(run.tokens, run.tokens / 4))))
    correct = random_.random() < run.skill(step)
    said = str(answer if correct else answer + random_.choice([-2, -1, 1, 2]))
    generator = np.random.default_rng(random_.randrange(2**32))
    first = int(generator.integers(len(WORDS)))  # so that few texts are equal
    pieces = [WORDS[(first + i * i) % len(WORDS)] for i in range(tokens - 1)] + [f" {said}"]
    return {
        "step": step,
        "rollout_id": f"{run.run_id}/{step}/{group}/{sample}",
        "place": place,
        "sample": sample,
        "replica": sample % run.replicas,
        "version": step - 1,
        "oldest_version": step - 1,
        "tokens": tokens,
        "prompt_tokens": 18,
        "cached": 18 if sample else 0,
        "correct": correct,
        "reward": float(correct),
        "error": None,
        "pieces": pieces,
        "text": "".join(pieces),
        "prompt": prompt,
        "finish": "length" if tokens == 2 * run.tokens else "stop",
        "log_probs": -generator.exponential(0.4, tokens).astype(np.float32),
        "generator": generator,
        "trace": new_trace_id(random_),
        "span": new_span_id(random_),
    }


def _plant(run: Run, rollout: dict[str, Any]) -> None:
    """Faults that show in what a rollout says, earns, or was sampled by."""
    step, place, replica = rollout["step"], rollout["place"], rollout["replica"]
    if run.has("truncation", step):
        rollout |= {"finish": "length", "correct": False, "reward": 0.0}
    if run.has("zero_variance", step):
        rollout |= {"correct": False, "reward": 0.0}
    if run.has("reward_hack", step) and place[1] == 0:
        rollout |= {"text": "As the answer is surely known, I say it is 7", "correct": True, "reward": 1.0}
    if run.has("garbled", step) and replica == 1:
        rollout["text"] = "\ufffd\x07" * rollout["tokens"]
    if run.has("repetitive", step) and replica == 0:
        rollout["text"] = "and so it is " * rollout["tokens"]
    if run.has("stale_engine", step - 1) and replica == 1:
        rollout |= {"version": step - 2, "oldest_version": step - 2}
    if run.has("stale_rollouts", step) and place in ((3, 0), (3, 1)):
        rollout |= {"version": step - 5, "oldest_version": step - 5}
    if run.has("mixed_versions", step) and place == (1, 3):
        rollout["oldest_version"] = step - 2


def _end(run: Run, rollout: dict[str, Any], start: int, sample_end: int) -> int:
    if run.has("straggler", rollout["step"]):
        if rollout["place"] == (2, 1):
            return sample_end
        sample_end = start + (sample_end - start) // 3
    return start + (sample_end - start) * rollout["tokens"] // (2 * run.tokens + 4)


def _emit_sampling(
    run: Run,
    rollout: dict[str, Any],
    shared: dict[str, Any],
    step_context: tuple[bytes, bytes],
    policy: Process,
    random_: random.Random,
    rng: random.Random,
) -> None:
    start, end = rollout["times"]
    identity = {**shared, names.ROLLOUT_ID: rollout["rollout_id"], names.LANE: policy.lane}
    usage = {
        names.INPUT_TOKENS: rollout["prompt_tokens"],
        names.OUTPUT_TOKENS: rollout["tokens"],
        names.FINISH_REASONS: [rollout["finish"]],
    }
    attributes = {
        **identity,
        **usage,
        names.SAMPLE_INDEX: rollout["sample"],
        names.POLICY_VERSION_MIN: rollout["oldest_version"],
        names.POLICY_VERSION_MAX: rollout["version"],
        names.STATUS: "ok",
    }
    if run.serving:
        attributes |= {names.SPLIT: "train", names.ENV: "sums"}
    if run.has("rollout_error", rollout["step"]) and rollout["place"] == (0, 1):
        attributes |= {names.STATUS: "error", names.ERROR_TYPE: "EnvironmentTimeout"}
    trace, root = rollout["trace"], rollout["span"]
    policy.span(names.ROLLOUT, start, end, attributes, trace, None, random_, root, link=step_context)
    turn = {
        **identity,
        **usage,
        names.TURN_INDEX: 0,
        names.REQUEST_ID: f"req-{rollout['rollout_id']}",
        names.OPERATION: "chat",
        names.REQUEST_MODEL: "tiny",
        names.CACHED_TOKENS: rollout["cached"],
        names.ENGINE: "native",
        names.REPLICA: policy.lane,
        names.POLICY_VERSION: rollout["version"],
    }
    turn_span = policy.span(f"{names.TURN} tiny", start, end, turn, trace, root, random_)
    if run.serving:
        emit_request(run, rollout, identity, turn_span, policy, rng)
        if rollout["place"] == (0, 0):
            emit_tool(run, rollout, identity, policy, rng)
    if not (run.has("lost_content", rollout["step"]) and rollout["place"] == (0, 0)):
        policy.event(names.TURN_CONTENT, end, _content(run, rollout, identity), trace, turn_span)


def _content(run: Run, rollout: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {**identity, names.TURN_INDEX: 0}
    if run.texts:
        content |= {names.PROMPT_TEXT: rollout["prompt"], names.RESPONSE_TEXT: rollout["text"]}
    if run.texts and run.arrays:
        content[names.PROMPT_TOKEN_IDS] = np.arange(rollout["prompt_tokens"], dtype="<i4").tobytes()
        content[names.TOKEN_IDS] = rollout["generator"].integers(5, 999, rollout["tokens"]).astype("<i4").tobytes()
        content[names.TOKEN_PIECES] = rollout["pieces"]
    if run.arrays:
        content[names.ROLLOUT_LOG_PROBS] = rollout["log_probs"].tobytes()
    if run.arrays and run.serving:
        versions = np.full(rollout["tokens"], rollout["version"], "<i4")
        versions[: rollout["tokens"] // 2] = rollout["oldest_version"]
        content[names.POLICY_VERSIONS] = versions.tobytes()
    return content


def _emit_scoring(
    run: Run,
    rollout: dict[str, Any],
    shared: dict[str, Any],
    windows: Mapping[str, tuple[int, int, bytes]],
    controller: Process,
    policy: Process,
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
        facts |= _training_arrays(run, rollout)
    if not rollout["dropped"]:
        policy.event(names.ROLLOUT_TRAINED, trained, facts, rollout["trace"], rollout["span"])


def _training_arrays(run: Run, rollout: dict[str, Any]) -> dict[str, bytes]:
    generator, count, sampled = rollout["generator"], rollout["tokens"], rollout["log_probs"]
    step, place = rollout["step"], rollout["place"]
    old = sampled + generator.normal(0, 1e-3, count).astype(np.float32)
    if run.has("mismatch", step) and place == (1, 2):
        old = old - np.float32(0.5)
    if "always_off" in run.faults:
        old = old - np.float32(0.2)
    if run.has("mixed_versions", step) and place == (1, 3):
        old[: count // 2] -= np.float32(0.5)
    if run.has("cache_mismatch", step) and rollout["cached"]:
        old = old - np.float32(0.1)
    new = old + generator.normal(0, 0.05, count).astype(np.float32)
    if run.has("spike", step) and place == (0, 0):
        new[3:5] = old[3:5] + np.float32(3.0)
    if run.has("clipped_rollout", step) and place == (1, 1):
        new = old + np.float32(0.5)
    entropy = generator.exponential(0.5, count).astype(np.float32)
    if run.has("entropy_collapse", step):
        entropy[np.arange(count) * 10 // count >= 7] = 1e-4
    rollout["entropy"] = entropy
    rollout["clipped"] = np.abs(new - old) > 0.12
    rollout["gaps"] = old - sampled
    rollout["moves"] = new - old
    facts = {
        names.LOSS_MASK: np.ones(count, np.uint8).tobytes(),
        names.OLD_LOG_PROBS_ARRAY: old.tobytes(),
        names.LOG_PROBS_ARRAY: new.tobytes(),
        names.REF_LOG_PROBS_ARRAY: (old - np.float32(0.01)).tobytes(),
        names.ENTROPY_ARRAY: rollout["entropy"].tobytes(),
        names.ADVANTAGES_ARRAY: np.full(count, rollout["advantage"], np.float32).tobytes(),
        names.CLIPPED_ARRAY: rollout["clipped"].astype(np.uint8).tobytes(),
    }
    return facts | _ppo_arrays(rollout) if run.ppo else facts


def _ppo_arrays(rollout: dict[str, Any]) -> dict[str, bytes]:
    """Weights 0.75 and 1 in turn, the first token of sample 0 rejected; values that come to know the reward."""
    count = rollout["tokens"]
    weights = np.where(np.arange(count) % 2, 0.75, 1.0).astype(np.float32)
    weights[0] *= rollout["sample"] != 0
    known = np.linspace(0, 1, count, dtype=np.float32)
    return {
        names.WEIGHTS_ARRAY: weights.tobytes(),
        names.VALUES_ARRAY: (0.5 + known * np.float32(rollout["reward"] - 0.5)).tobytes(),
        names.RETURNS_ARRAY: np.full(count, rollout["reward"], np.float32).tobytes(),
    }
