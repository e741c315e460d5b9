"""Sampling from engines that fail: nothing hangs, a rollout is sampled again or fails by name, the trace shows it."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
import torch

from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.router import Router
from core_trainer.rollout.sample import Group, Sampler, make_groups, time_limit_s
from core_trainer.types import Prompt, Rollout, SamplingParams, Turn
from rlinsight.config import RolloutSection
from rlinsight.errors import EngineError, RequestRefused, RlinsightError
from tests.core_trainer.scripted_engine import Answer, Script, ScriptedEngine, dies_after, turn
from tests.core_trainer.stored import recording

VOCAB = 100
PARAMS = SamplingParams(8)
PROMPTS = [Prompt(f"p/{i}", "p", f"text {i}", (i, 1, 2), None) for i in range(2)]


def groups(size: int = 2) -> list[Group]:
    """Two prompts."""
    return make_groups(PROMPTS, size, 0, 1, 1)


def sample(engine: ScriptedEngine, size: int = 2, **options: object) -> list[Rollout]:
    sampler = Sampler(engine, RolloutSection.model_validate(options), "tiny", VOCAB, str)
    return asyncio.run(sampler.sample(groups(size), PARAMS))


def fails(request_id: str, answer: Answer, times: int = 99) -> Script:
    """The first ``times`` attempts of one rollout's request get ``answer``, all others are answered well."""
    left = [times]

    def script(request: GenerateRequest, _: int) -> Answer:
        if request.request_id.startswith(request_id) and left[0]:
            left[0] -= 1
            return answer
        return turn(request)

    return script


ONE = "a1-s000001-g0000-r001-t0"
MADE = GenerateRequest(ONE, (0, 1, 2), PARAMS)
FAULTS: dict[str, tuple[Answer, str, str]] = {  # what comes back, the class it counts as, what the error says
    "dies": (EngineError("the engine's process has ended"), "EngineError", "the engine's process has ended"),
    "out of memory": (torch.OutOfMemoryError("1 GiB"), "OutOfMemoryError", r"Error: 1 GiB \(scripted"),
    "out of KV memory": (EngineError("no room for 9 blocks"), "EngineError", "no room for 9 blocks"),
    "unreachable": (ConnectionRefusedError("[Errno 111]"), "ConnectionRefusedError", r"Errno 111\] \(scripted_engine"),
    "a bug": (KeyError("slot"), "KeyError", r"KeyError: 'slot' \(scripted_engine.py:\d+\)"),
    "prompt too long": (RlinsightError("exceeds its context of 4"), "RlinsightError", "exceeds its context of 4"),
    "hangs": (None, "RequestTimeout", "no answer within 0.05 s; raise rollout.request_timeout_s"),
    "gives up": (turn(MADE, 2, finish_reason="abort"), "RequestAborted", "gave the request up after 2 tokens"),
    "says nothing": (turn(MADE, 0), "MalformedTurn", "0 tokens with 0 log-probs"),
    "lacks log-probs": (turn(MADE, 3, rollout_log_probs=[-1.0]), "MalformedTurn", "3 tokens with 1 log-probs"),
    "another model": (turn(MADE, 2, token_ids=[5, VOCAB]), "MalformedTurn", "sampled token 100, the model has 100"),
    "NaN": (turn(MADE, 2, rollout_log_probs=[-1.0, math.nan]), "NonFiniteLogProbs", "token 1 of 2 the log-prob nan"),
    "infinite": (turn(MADE, 2, rollout_log_probs=[-math.inf, -1.0]), "NonFiniteLogProbs", "0 of 2 the log-prob -inf"),
}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "a bug"])
def test_a_request_that_fails_for_good_costs_its_rollout(fault: str) -> None:
    """With on_error drop the others are whole, in order, and the engine was told to let go of each attempt."""
    answer, kind, _ = FAULTS[fault]
    engine = ScriptedEngine(fails(ONE, answer))
    began = time.monotonic()
    rollouts = sample(engine, on_error="drop", request_timeout_s=0.05, retries=2)
    assert time.monotonic() - began < 5
    assert [rollout.error for rollout in rollouts] == [None, kind, None, None]
    assert [rollout.sample_index for rollout in rollouts] == [0, 1, 0, 1]
    assert rollouts[1].turns == []
    assert rollouts[1].finish_reason == "error"
    assert rollouts[1].num_response_tokens == 0
    assert all(rollout.turns[0].token_ids == [5, 6, 7] for rollout in rollouts if not rollout.error)
    asked = [request for request in engine.requests if request.request_id.startswith(ONE)]
    assert [request.request_id for request in asked] == [ONE, f"{ONE}-retry1", f"{ONE}-retry2"]
    assert len({request.params.seed for request in asked}) == 1
    if answer is None or isinstance(answer, BaseException):
        assert engine.aborted == [request.request_id for request in asked]


@pytest.mark.parametrize("fault", FAULTS)
def test_or_stops_the_run_with_a_reason(fault: str) -> None:
    """on_error fail raises what the last attempt failed with, and what can be set or done."""
    answer, _, text = FAULTS[fault]
    then = "this is a bug, please report it" if fault == "a bug" else "set rollout.on_error: drop to go"
    pattern = rf"request {ONE} to rollout engine scripted failed for good: .*{text}.*; {then}"
    with pytest.raises(EngineError, match=pattern):
        sample(ScriptedEngine(fails(ONE, answer)), request_timeout_s=0.05)


def test_a_bug_is_never_dropped() -> None:
    """It stops the run with its place in the code, whatever on_error says; no setting is named that would not help."""
    answer, _, text = FAULTS["a bug"]
    with pytest.raises(EngineError, match=rf"failed for good: {text}; this is a bug, please report it$") as raised:
        sample(ScriptedEngine(fails(ONE, answer)), on_error="drop", request_timeout_s=0.05)
    assert raised.value.__cause__ is answer


@pytest.mark.parametrize("fault", FAULTS)
def test_a_retry_that_goes_well_leaves_nothing_out(fault: str) -> None:
    """The rollout is the one it would have been: same seed, same name; its turn began with the first attempt."""
    answer = FAULTS[fault][0]
    engine = ScriptedEngine(fails(ONE, answer, times=1))
    began = time.time_ns()
    rollouts = sample(engine, request_timeout_s=0.05)
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert rollouts[1].turns[0].request_id == f"{ONE}-retry1"
    assert began <= rollouts[1].turns[0].start_ns <= rollouts[1].turns[0].end_ns


def test_retries_avoid_the_replicas_that_failed() -> None:
    """Those an error names, or else the engine's own."""

    def script(request: GenerateRequest, asked: int) -> Answer:
        error = EngineError("down")
        error.replica = f"server/{asked}" if asked < 2 else None
        return error if asked < 3 else turn(request)

    engine = ScriptedEngine(script, replica="router")
    sampler = Sampler(engine, RolloutSection(retries=3), "tiny", VOCAB, str)
    asyncio.run(sampler.sample(groups(1)[:1], PARAMS))
    assert [set(request.avoid) for request in engine.requests] == [
        set(),
        {"server/0"},
        {"server/0", "server/1"},
        {"server/0", "server/1", "router"},
    ]


def test_a_bad_answer_is_its_replicas() -> None:
    """The engine handed it on in good faith; the next attempt goes elsewhere."""

    def script(request: GenerateRequest, asked: int) -> Answer:
        return turn(request, replica=f"server/{asked}", finish_reason="abort" if asked == 0 else "stop")

    engine = ScriptedEngine(script, replica="router")
    asyncio.run(Sampler(engine, RolloutSection(retries=1), "tiny", VOCAB, str).sample(groups(1)[:1], PARAMS))
    assert [set(request.avoid) for request in engine.requests] == [set(), {"server/0"}]


def test_a_late_answer_is_its_replicas(tmp_path: Path) -> None:
    """The record names the replica that was asked, and the next attempt avoids it though it is back by then."""
    silent, good = ScriptedEngine(lambda *_: None, "server/0"), ScriptedEngine(replica="server/1")
    router = Router([silent, good])
    router.sync_weights(0)
    section = RolloutSection(retries=1, request_timeout_s=0.05)
    sampler = Sampler(router, section, "tiny", VOCAB, str)
    ask, asked = router.generate, []

    async def generate(request: GenerateRequest) -> Turn:
        asked.append(request)
        router.sync_weights(len(asked))  # every replica may be used
        return await ask(request)

    router.generate = generate  # type: ignore[method-assign]
    with recording(tmp_path) as store:
        (rollout,) = asyncio.run(sampler.sample(groups(1)[:1], PARAMS))
    assert [set(request.avoid) for request in asked] == [set(), {"server/0"}]
    assert (rollout.turns[0].replica, len(silent.requests)) == ("server/1", 1)
    assert store.rows("SELECT replica, error_type FROM serving_requests") == [("server/0", "RequestTimeout")]


def test_a_request_that_is_refused_is_not_made_again() -> None:
    """Another replica would refuse it too."""
    engine = ScriptedEngine(fails(ONE, RequestRefused("9 tokens are too many")))
    with pytest.raises(
        EngineError, match=f"request {ONE} to rollout engine scripted failed for good: 9 tokens are too"
    ):
        sample(engine, retries=3)
    assert [request.request_id for request in engine.requests].count(ONE) == 1
    assert not any("retry" in request.request_id for request in engine.requests)


def test_a_dead_engine_ends_sampling_at_once() -> None:
    """With on_error fail the requests under way are given up; with drop every one after the death fails by name."""
    hanging: Script = lambda request, asked: None if asked == 0 else EngineError("gone")  # noqa: E731
    engine = ScriptedEngine(hanging)
    began = time.monotonic()
    with pytest.raises(EngineError, match="gone"):
        sample(engine, retries=0)
    assert time.monotonic() - began < 5  # not the request that hangs for an hour
    assert engine.requests[0].request_id in engine.aborted
    rollouts = sample(ScriptedEngine(dies_after(3)), on_error="drop", retries=0)
    assert [rollout.error for rollout in rollouts] == [None, None, None, "EngineError"]


def test_no_groups_are_no_rollouts() -> None:
    """As a rank gets when there are fewer groups than ranks."""
    sampler = Sampler(ScriptedEngine(), RolloutSection(), "tiny", VOCAB, str)
    assert asyncio.run(sampler.sample([], PARAMS)) == []


def test_sampling_may_take_as_long_as_all_attempts_of_a_request() -> None:
    """Beyond that the worker itself hangs."""
    assert time_limit_s(RolloutSection(request_timeout_s=10, retries=2)) == 3 * 10 + 60


def test_a_rollout_is_as_old_as_its_oldest_token() -> None:
    """Per-token versions decide where an engine reports them."""
    changed = turn(MADE, 3, policy_version=7, token_policy_versions=[5, 6, 7])
    rollout = Rollout("r", "g", 0, PROMPTS[0], [turn(MADE, policy_version=6), changed], {})
    assert rollout.policy_version == 5
    assert changed.policy_versions == [5, 6, 7]
    assert turn(MADE, policy_version=6).policy_versions == [6]


# The trace ------------------------------------------------------------------------------------------------------------


def test_the_store_shows_what_failed_and_what_was_tried(tmp_path: Path) -> None:
    """One rollout fails for good, one at first: spans with error types, requests below turns, views without holes."""

    def script(request: GenerateRequest, _: int) -> Answer:
        if "g0001-r000" in request.request_id:
            return turn(request, 2, rollout_log_probs=[math.nan, -1.0])
        if request.request_id == ONE:
            return None
        return turn(request, policy_version=3, token_policy_versions=[2, 3, 3])

    with recording(tmp_path) as store:
        sample(ScriptedEngine(script), on_error="drop", request_timeout_s=0.05)
    rollouts = store.rows(
        "SELECT sample_index, status, error_type, finish_reason, policy_version_min, policy_version_max, "
        "response_tokens FROM rollout_samples ORDER BY rollout_id"
    )
    good = ("ok", None, "stop", 2, 3, 3)
    bad = ("error", "NonFiniteLogProbs", "error", None, None, None)
    assert rollouts == [(0, *good), (1, *good), (0, *bad), (1, *good)]
    requests = store.rows(
        "SELECT q.request_id, q.error_type, q.corrupted, q.status_code, q.replica, t.finish_reason, t.request_id "
        "FROM serving_requests q JOIN turns t ON t.span_id = q.parent_span_id ORDER BY q.request_id"
    )
    other = "a1-s000001-g0001-r000-t0"
    assert requests == [
        (ONE, "RequestTimeout", None, 2, "policy/0", "stop", f"{ONE}-retry1"),
        (other, "NonFiniteLogProbs", True, 2, "policy/0", "error", other),
        (f"{other}-retry1", "NonFiniteLogProbs", True, 2, "policy/0", "error", other),
    ]
    kinds = store.rows("SELECT kind, type, n FROM errors ORDER BY ALL")
    assert kinds == [
        ("request", "NonFiniteLogProbs", 2),
        ("request", "RequestTimeout", 1),
        ("rollout", "NonFiniteLogProbs", 1),
    ]
    assert store.rows("SELECT DISTINCT policy_versions FROM token_runs") == [([2, 3, 3],)]
    linked = dict(store.rows("SELECT edge, n = linked FROM v_linkage WHERE edge LIKE 'rollout->%'"))
    assert linked.pop("rollout->step") is False  # there is no step here
    assert set(linked) == {"rollout->group", "rollout->tokens", "rollout->spans"}
    assert all(linked.values())
    status = store.rows("SELECT status_message FROM otel_spans WHERE name = 'rl.rollout' AND status_code = 2")
    assert status[0][0].startswith("NonFiniteLogProbs: the engine gave token 0 of 2 the log-prob nan")
    wasted = store.rows("SELECT count(*) FROM otel_spans WHERE bucket = 'wasted' AND end_ns > start_ns")
    assert wasted == [(3,)]


def test_what_stops_the_run_is_in_the_store(tmp_path: Path) -> None:
    """With on_error fail, the rollout it failed on and those that were done."""
    with recording(tmp_path) as store, pytest.raises(EngineError, match="ended"):
        sample(ScriptedEngine(dies_after(2)), retries=0)
    counts = dict(store.rows("SELECT status, count(*) FROM rollout_samples GROUP BY status"))
    assert counts["ok"] == 2
    assert counts["error"] in (1, 2)  # both failed, the second perhaps after the first had stopped it all
