"""A router sends each request to the replica that answers it soonest, and to none that may be dead or stale."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from core_trainer import attention, models
from core_trainer.rollout import router as router_module
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode, WeightSync
from core_trainer.rollout.hybrid import HybridEngine
from core_trainer.rollout.router import SPILL_RATIO, SPILL_REQUESTS, Router
from core_trainer.rollout.sample import Sampler, make_groups
from core_trainer.types import Prompt, Rollout, SamplingParams, Turn
from rlinsight import config, names, telemetry
from rlinsight.errors import EngineError, RequestRefused
from tests.core_trainer.scripted_server import Fault, ScriptedServer
from tests.core_trainer.stored import recording
from tests.scripted_collector import Collector, attributes, running


@dataclass
class ScriptedEngine:
    """An engine that answers when told to, and fails as scripted."""

    replica: str
    name: str = "scripted"
    policy_version: int = -1
    failing: Exception | None = None  # of requests
    refuses_weights: bool = False
    holds: bool = False  # answers only once ``release`` is called
    synced: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    sync_s: float = 0.0  # how long it takes weights
    slept: int = 7
    slept_calls: int = 0  # sleeps and wakes
    failing_to_sleep: EngineError | None = None
    forgotten: bool = False

    def __post_init__(self) -> None:
        self._waiting: list[asyncio.Event] = []

    def sync_weights(self, policy_version: int, pause_mode: PauseMode = "wait") -> list[WeightSync]:
        time.sleep(self.sync_s)
        if self.refuses_weights:
            raise EngineError(f"{self.replica} takes none")
        self.policy_version = policy_version
        self.synced.append(policy_version)
        return [WeightSync(self.replica, 10, 0, pause_mode, checksum_served=f"{policy_version:016x}")]

    async def generate(self, request: GenerateRequest) -> Turn:
        self.asked.append(request.request_id)
        if self.holds:
            self._waiting.append(event := asyncio.Event())
            await event.wait()
        await asyncio.sleep(0)
        if self.failing is not None:
            raise self.failing
        return Turn(
            request.request_id, request.prompt_token_ids, [1], [-1.0], "x", "stop", self.policy_version, 0, 0, 1,
            replica=self.replica,
        )  # fmt: skip

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        turn = await self.generate(request)
        yield Chunk([1], [-1.0])
        yield Chunk([], [], turn)

    def release(self) -> None:
        for event in self._waiting:
            event.set()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def forget(self) -> None:
        self.forgotten = True

    def sleep(self) -> int:
        self.slept_calls += 1
        if self.failing_to_sleep is not None:
            raise self.failing_to_sleep
        return self.slept

    def wake(self) -> int:
        return self.sleep()

    def close(self) -> None:
        self.closed = True


def make(count: int, clock: Callable[[], float] | None = None) -> tuple[Router, list[ScriptedEngine]]:
    """A router over so many engines with weights of version 0."""
    engines = [ScriptedEngine(f"e{i}") for i in range(count)]
    router = Router(engines, clock) if clock else Router(engines)
    router.sync_weights(0)
    return router, engines


def ask(name: str = "r", prompt: int = 10, new: int = 90, **options: object) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(prompt)), SamplingParams(new), **options)  # type: ignore[arg-type]


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


# Which replica --------------------------------------------------------------------------------------------------------


def test_requests_go_where_the_fewest_tokens_are_waited_for() -> None:
    """Counted by what a request may take, not by how many there are; given back when it is answered."""
    router, (a, b) = make(2)
    a.holds = b.holds = True

    async def run() -> None:
        tasks = [asyncio.create_task(router.generate(ask("big", new=490)))]
        await settle()
        for i in range(5):
            tasks.append(asyncio.create_task(router.generate(ask(f"small{i}"))))
            await settle()
        assert (a.asked, b.asked) == (["big"], [f"small{i}" for i in range(5)])
        b.release()
        await settle()
        tasks.append(asyncio.create_task(router.generate(ask("next"))))
        await settle()
        assert b.asked[-1] == "next"
        a.release()
        b.release()
        turns = await asyncio.gather(*tasks)
        assert [turn.replica for turn in turns] == ["e0", *["e1"] * 6]

    asyncio.run(run())
    assert [replica.load for replica in router.replicas] == [0, 0]


def test_a_session_stays_until_its_replica_is_far_busier() -> None:
    """Its prefix is there; beyond the limit others of it go elsewhere, and it comes back afterwards."""
    router, (a, b) = make(2)
    a.holds = b.holds = True

    async def run() -> None:
        tasks = []
        for i in range(SPILL_REQUESTS + 2):
            tasks.append(asyncio.create_task(router.generate(ask(f"s{i}", session="s"))))
            await settle()
        assert a.asked == [f"s{i}" for i in range(SPILL_REQUESTS)] + [f"s{SPILL_REQUESTS + 1}"]
        assert b.asked == [f"s{SPILL_REQUESTS}"]
        a.release()
        b.release()
        await asyncio.gather(*tasks)
        a.holds = b.holds = False
        await router.generate(ask("later", session="s"))
        assert a.asked[-1] == "later"

    asyncio.run(run())


def test_sessions_are_spread() -> None:
    """Groups that arrive together get a replica each, in turn, though each of their requests is as good anywhere."""
    router, engines = make(3)
    for engine in engines:
        engine.holds = True

    async def run() -> None:
        tasks = [
            asyncio.create_task(router.generate(ask(f"g{group}-{i}", session=f"g{group}")))
            for group in range(6)
            for i in range(4)
        ]
        await settle()
        for engine in engines:
            assert len(engine.asked) == 8
            assert len({name.split("-")[0] for name in engine.asked}) == 2
            engine.release()
        await asyncio.gather(*tasks)

    asyncio.run(run())


@settings(max_examples=100, deadline=None)
@given(
    loads=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    out=st.sets(st.integers(0, 5)),
    avoid=st.sets(st.integers(0, 5)),
    usual=st.integers(0, 5),
    new=st.integers(1, 300),
)
def test_the_choice_keeps_its_rules(loads: list[int], out: set[int], avoid: set[int], usual: int, new: int) -> None:
    """Never one that is out; one to be avoided only when there is no other; never one far busier than the least
    loaded, and the session's own whenever that is not so.
    """
    router, _ = make(len(loads))
    if out >= set(range(len(loads))):
        out = set()
    for i, (replica, load) in enumerate(zip(router.replicas, loads, strict=True)):
        replica.load, replica.out_until = load, (1.0 if i in out else None)
    router._sessions["s"] = router.replicas[usual % len(loads)]
    request = ask(new=new, session="s", avoid=frozenset(f"e{i}" for i in avoid))
    chosen = router.choose(request)
    usable = [i for i in range(len(loads)) if i not in out]
    wanted = [i for i in usable if i not in avoid] or usable
    index = router.replicas.index(chosen)
    least = min(loads[i] for i in wanted)
    assert index in wanted
    limit = SPILL_REQUESTS * (10 + new)
    assert loads[index] == least or loads[index] < max(least + limit, SPILL_RATIO * least)
    if usual % len(loads) in wanted and loads[usual % len(loads)] - least < limit:
        assert index == usual % len(loads)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200), st.booleans()), max_size=40), st.randoms())
def test_load_is_given_back_whatever_happens(requests: list[tuple[int, int, bool]], random: object) -> None:
    """Answered, failed, refused or cancelled, in any order."""
    router, engines = make(3)

    async def run() -> None:
        tasks = []
        for i, (session, new, cancelled) in enumerate(requests):
            for engine in engines:
                engine.failing = {0: RequestRefused("no"), 1: None}.get(i % 3)
            task = asyncio.create_task(router.generate(ask(f"r{i}", new=new, session=f"s{session}")))
            await asyncio.sleep(0)
            if cancelled:
                task.cancel()
                router._works(router.replicas[0])
                router._works(router.replicas[1])
                router._works(router.replicas[2])
            tasks.append(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert [replica.load for replica in router.replicas] == [0, 0, 0]
    assert router._at == {}


def test_abort_sleep_wake_forget_and_close_reach_the_engines() -> None:
    """An abort the one that has the request; the others all of them."""
    router, engines = make(2)
    engines[0].holds = True

    async def run() -> None:
        task = asyncio.create_task(router.generate(ask("r")))
        await settle()
        router.abort("r")
        router.abort("nobody")
        engines[0].release()
        await task

    asyncio.run(run())
    assert (engines[0].aborted, engines[1].aborted) == (["r"], [])
    assert (router.sleep(), router.wake()) == (14, 14)
    router.forget()
    assert all(engine.forgotten for engine in engines)
    router.close()
    assert all(engine.closed for engine in engines)


def test_a_stream_is_counted_too() -> None:
    """It ends with the turn, or earlier when nobody listens."""
    router, _ = make(2)

    async def run() -> None:
        chunks = [chunk async for chunk in router.stream(ask())]
        assert chunks[-1].turn is not None
        left = router.stream(ask())
        await anext(left)
        assert sum(replica.load for replica in router.replicas) == 100
        await left.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert sum(replica.load for replica in router.replicas) == 0


# Failures -------------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds, as a test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_failed_replica_is_left_out_longer_each_time_and_gets_the_weights_before_a_request() -> None:
    """The error names it; the others answer meanwhile; back-off doubles until a request is answered."""
    clock = Clock()
    router, (a, _) = make(2, clock)
    a.failing = EngineError("dead")
    for failures, backoff in enumerate((1.0, 2.0, 4.0), start=1):

        async def run(backoff: float = backoff) -> None:
            with pytest.raises(EngineError, match="dead") as failure:
                await router.generate(ask("to-a"))
            assert failure.value.replica == "e0"
            clock.now += backoff - 0.1
            for _ in range(3):
                assert (await router.generate(ask())).replica == "e1"
            clock.now += 0.2
            await router.generate(ask())  # starts to bring it back
            await asyncio.sleep(0.05)
            assert router.replicas[0].out_until is None

        asyncio.run(run())
        assert a.synced == [0] * (failures + 1)
        router.replicas[0].num_routed = router.replicas[1].num_routed - 1  # next in turn
    a.failing = None
    asyncio.run(router.generate(ask()))
    assert router.replicas[0].failures == 0


def test_the_request_itself_is_not_held_against_a_replica() -> None:
    """A refusal has a name on it, and the replica stays."""
    router, (a, _) = make(2)
    a.failing = RequestRefused("too long")
    with pytest.raises(RequestRefused) as failure:
        asyncio.run(router.generate(ask()))
    assert failure.value.replica == "e0"
    assert router.replicas[0].out_until is None


def test_who_runs_out_of_patience_is_served_elsewhere() -> None:
    """A replica that hangs until its caller gives up is out, as one that fails."""
    router, (a, _) = make(2)
    a.holds = True

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.generate(ask()), 0.05)
        turns = [await router.generate(ask(f"again{i}")) for i in range(4)]
        assert {turn.replica for turn in turns} == {"e1"}

    asyncio.run(run())


def test_with_one_replica_a_failure_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next requests wait for it to come back, however often it does not."""
    monkeypatch.setattr(router_module, "FIRST_BACKOFF_S", 0.1)
    router, (only,) = make(1)

    async def run() -> None:
        only.failing = EngineError("hiccup")
        with pytest.raises(EngineError, match="hiccup"):
            await router.generate(ask())
        only.failing = None
        turns = await asyncio.gather(*[router.generate(ask(f"r{i}")) for i in range(5)])
        assert [turn.replica for turn in turns] == ["e0"] * 5
        only.failing, only.refuses_weights = EngineError("hiccup"), True
        with pytest.raises(EngineError, match="hiccup"):
            await router.generate(ask())
        only.failing = None
        waiting = asyncio.create_task(router.generate(ask()))
        while router.replicas[0].failures < 3:  # it was given the weights twice in vain
            await asyncio.sleep(0.01)
        assert not waiting.done()
        only.refuses_weights = False
        assert (await waiting).replica == "e0"

    asyncio.run(run())
    assert router.replica == "e0"
    assert only.synced == [0, 0, 0]


def test_where_the_dead_stay_dead_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own servers are not started again: once each was given the weights in vain, requests fail by name."""
    monkeypatch.setattr(router_module, "FIRST_BACKOFF_S", 0.05)
    engines = [ScriptedEngine(f"e{i}") for i in range(2)]
    router = Router(engines, come_back=False)
    router.sync_weights(0)

    async def run() -> None:
        for engine in engines:
            engine.failing, engine.refuses_weights = EngineError("dead"), True
        for _ in engines:
            with pytest.raises(EngineError, match="dead"):
                await router.generate(ask())
        with pytest.raises(EngineError, match="no rollout replica can be used, all have failed: e0, e1"):
            await router.generate(ask())

    asyncio.run(run())


def test_a_replica_that_hangs_stalls_neither_sampling_nor_syncs() -> None:
    """It keeps its thread: the event loop ends without it, later syncs leave it out, and it comes back when it can."""
    clock = Clock()
    router, (a, b) = make(2, clock)
    may_answer, sync = threading.Event(), a.sync_weights

    def hang(policy_version: int, _mode: PauseMode = "wait") -> list[WeightSync]:
        assert may_answer.wait(30)
        return sync(policy_version)

    a.failing, a.sync_weights = EngineError("silent"), hang  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="silent"):
        asyncio.run(router.generate(ask()))
    clock.now += 2
    a.failing = None
    try:
        began = time.monotonic()
        asyncio.run(router.generate(ask()))  # starts to bring it back
        assert [entry.replica for entry in router.sync_weights(1)] == ["e1"]
        assert time.monotonic() - began < 10
    finally:
        may_answer.set()
    push = router.replicas[0].push
    assert push is not None
    push.result(30)
    assert router.replicas[0].out_until is not None  # what it took may be old
    assert [entry.replica for entry in router.sync_weights(2)] == ["e0", "e1"]
    assert (a.policy_version, b.policy_version) == (2, 2)
    assert {turn.replica for turn in asyncio.run(all_of(router, 4))} == {"e0", "e1"}


@pytest.mark.parametrize("tried_since", [False, True])
def test_a_sync_leaves_a_replica_out_that_took_no_weights_since_it_failed(tried_since: bool) -> None:
    """Trying it again at each sync would cost as long as it is silent; it is brought back while others sample."""
    clock = Clock()
    router, (a, _) = make(2, clock)
    a.refuses_weights = True
    router.sync_weights(1)
    if tried_since:
        clock.now += 2
        asyncio.run(restore(router))
    a.refuses_weights = False
    assert [entry.replica for entry in router.sync_weights(2)] == ["e1"]
    clock.now += 10
    asyncio.run(restore(router))
    assert router.replicas[0].out_until is None
    assert a.synced == [0, 2]


async def restore(router: Router) -> None:
    """A request, until those it had brought back have taken the weights or not."""
    await router.generate(ask())
    while any(replica.restoring is not None for replica in router.replicas):
        await asyncio.sleep(0.01)


def test_sleep_and_wake_pass_a_dead_replica_by() -> None:
    """One that fails then is out, one that is out is not asked; the others' bytes count."""
    router, (a, b) = make(2)
    a.failing_to_sleep = EngineError("dead")
    assert router.sleep() == 7
    assert [replica.out_until is None for replica in router.replicas] == [False, True]
    assert router.wake() == 7
    assert (a.slept_calls, b.slept_calls) == (1, 2)


def test_an_answer_to_an_old_request_does_not_make_up_for_a_failure_since() -> None:
    """Back-off grows with failures in a row, whatever was asked before the first of them."""
    router, (only,) = make(1)
    only.holds = True

    async def run() -> None:
        old = asyncio.create_task(router.generate(ask("old")))
        await settle()
        router._failed(router.replicas[0], EngineError("hiccup"))
        router._works(router.replicas[0])
        only.release()
        await old
        assert router.replicas[0].failures == 1
        only.holds = False
        await router.generate(ask("new"))
        assert router.replicas[0].failures == 0

    asyncio.run(run())


def test_a_replica_without_the_new_weights_gets_no_request() -> None:
    """The others go on; when none took them the sync fails."""
    clock = Clock()
    router, (a, b, c) = make(3, clock)
    b.refuses_weights = True
    assert [entry.replica for entry in router.sync_weights(1)] == ["e0", "e2"]
    turns = asyncio.run(all_of(router, 12))
    assert {turn.replica for turn in turns} == {"e0", "e2"}
    assert {turn.policy_version for turn in turns} == {1}
    b.refuses_weights = False
    clock.now += 2
    asyncio.run(restore(router))
    assert len(router.sync_weights(2)) == 3
    assert {turn.replica for turn in asyncio.run(all_of(router, 12))} == {"e0", "e1", "e2"}
    a.refuses_weights = b.refuses_weights = c.refuses_weights = True
    with pytest.raises(EngineError, match="takes none"):
        router.sync_weights(3)


def test_the_trace_shows_who_did_not_take_the_weights(tmp_path: Path) -> None:
    """At a sync that others took, and when a replica is brought back in vain, then with success."""
    clock = Clock()
    with running(Collector()) as collector:
        telemetry.setup("policy", spool_dir=tmp_path, run_id="r", attempt=1, endpoint=collector.url)
        try:
            router, (_, b) = make(2, clock)
            b.refuses_weights = True
            router.sync_weights(1)
            for refuses in (True, False):
                clock.now += 10
                b.refuses_weights = refuses
                asyncio.run(restore(router))
        finally:
            assert telemetry.shutdown(10)
    found = [(span.status.code, attributes(span.attributes)) for span in collector.spans()]
    told = [
        (code, facts[names.REPLICA], facts[names.POLICY_VERSION], facts.get(names.ERROR_TYPE)) for code, facts in found
    ]
    failed = (2, "e1", 1, "EngineError")
    assert told == [failed, failed, (0, "e1", 1, None)]
    assert (found[2][1][names.BYTES], found[2][1][names.CHECKSUM_SERVED]) == (10, "0000000000000001")


def test_a_sync_tells_each_replica_what_becomes_of_its_requests_and_times_it_alone(tmp_path: Path) -> None:
    """The ledger names the slow one; one that fails has its own time too."""
    router, (_, slow, failing) = make(3)
    slow.sync_s, failing.sync_s, failing.refuses_weights = 0.4, 0.2, True
    assert {sync.pause_mode for sync in router.sync_weights(1, "keep")} == {"keep"}
    router.replicas[2].push = None
    with recording(tmp_path) as store:
        HybridEngine(router, nn.Linear(4, 4), []).publish(2)  # type: ignore[arg-type]
    rows = store.rows("SELECT replica, duration_s, problem FROM sync_health('r') ORDER BY replica")
    assert [(replica, problem) for replica, _, problem in rows if problem != "checksum"] == [("e2", "failed")]
    took = {replica: seconds for replica, seconds, _ in rows}
    assert took["e0"] < 0.2 <= took["e2"] < 0.4 <= took["e1"], took


def test_a_request_avoids_the_replicas_that_failed_on_it() -> None:
    """While there is another one."""
    router, _ = make(3)

    async def run() -> None:
        for _ in range(5):
            assert (await router.generate(ask(avoid=frozenset({"e0", "e2"})))).replica == "e1"
            assert (await router.generate(ask(session="s", avoid=frozenset({"e1"})))).replica != "e1"
        assert await router.generate(ask(avoid=frozenset({"e0", "e1", "e2"})))

    asyncio.run(run())


async def all_of(router: Router, count: int) -> list[Turn]:
    return await asyncio.gather(*[router.generate(ask(f"r{i}")) for i in range(count)])


# With servers ---------------------------------------------------------------------------------------------------------


def over(servers: list[ScriptedServer], directory: Path) -> tuple[Router, PreTrainedModel]:
    """The router a run has over these servers, which have the weights of its policy."""
    policy = models.load_model(directory, torch.float32)
    attention.enable(policy)
    tree = {"engine": "openai", "openai": {"urls": [server.url for server in servers]}}
    data = config.DataSection(train="d.jsonl", max_prompt_tokens=64)
    tokenizer = models.load_tokenizer(directory)
    router = build_engine(config.RolloutSection.model_validate(tree), data, policy, tokenizer, directory)
    assert isinstance(router, Router)
    router.sync_weights(0)
    return router, policy


def test_a_server_that_dies_for_good_costs_no_rollout(tiny_model: Path) -> None:
    """Its requests break off in the middle and are made on the other one; every rollout comes back whole."""
    first, second = ScriptedServer(tiny_model), ScriptedServer(tiny_model)
    with second.running():
        first.start()
        router, policy = over([first, second], tiny_model)
        first.script = [Fault(drop_after=1)] * 100
        section = config.RolloutSection.model_validate({"retries": 2, "request_timeout_s": 60})
        sampler = Sampler(router, section, "tiny", policy.config.vocab_size, str)
        prompts = [Prompt(f"p/{i}", "p", f"text {i}", (i, 1, 2), None) for i in range(4)]

        async def run() -> list[Rollout]:
            sampling = asyncio.create_task(sampler.sample(make_groups(prompts, 2, 0, 1, 1), SamplingParams(4)))
            while not [asked for asked in first.of("/v1/completions") if "x-request-id" in asked.headers]:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(first.die)
            return await sampling

        rollouts = asyncio.run(run())
    assert len(rollouts) == 8
    assert {rollout.turns[0].replica for rollout in rollouts} == {router.replicas[1].name}
    assert router.replicas[0].out_until is not None
    for rollout in rollouts:
        assert rollout.error is None
        assert len(rollout.turns[0].rollout_log_probs) == len(rollout.turns[0].token_ids) > 0


def test_a_server_that_was_started_anew_gets_the_weights_first(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in the middle of an answer and comes back with the weights it began with. Nothing stale is sampled."""

    monkeypatch.setattr(router_module, "FIRST_BACKOFF_S", 0.2)
    first, second = ScriptedServer(tiny_model), ScriptedServer(tiny_model)
    with first.running(), second.running():
        engine, policy = over([first, second], tiny_model)
        with torch.no_grad():
            policy.get_input_embeddings().weight.mul_(1.3)
        assert len(engine.sync_weights(1)) == 2
        port = int(first.url.rpartition(":")[2])
        first.script = [Fault(drop_after=1)]
        names = [server.url.removeprefix("http://") for server in (first, second)]

        async def run() -> None:
            with pytest.raises(EngineError, match="broke the connection"):
                await engine.generate(ask("a", new=4, avoid=frozenset({names[1]})))
            first.die()
            turns = [await engine.generate(ask(f"b{i}", new=4)) for i in range(4)]
            assert {turn.replica for turn in turns} == {names[1]}
            again = ScriptedServer(tiny_model)
            again.start(port)
            await asyncio.sleep(0.3)
            try:
                for i in range(200):
                    turn = await engine.generate(ask(f"c{i}", new=4, avoid=frozenset({names[1]})))
                    if turn.replica == names[0]:
                        break
                    await asyncio.sleep(0.05)
                assert turn.replica == names[0]
                assert again.loads == 1
                requests = [asked.path for asked in again.asked]
                assert requests.index("/collective_rpc") < requests.index("/v1/completions")
                weight = again.model.get_input_embeddings().weight
                assert torch.equal(weight, policy.get_input_embeddings().weight)
            finally:
                again.die()
                first.start()  # for the end of its block

        asyncio.run(run())
