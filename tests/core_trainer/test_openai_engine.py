"""The OpenAI engine trusts a server only as far as it was checked, and each of its faults is an error by name."""

from __future__ import annotations

import asyncio
import copy
import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from core_trainer import attention, models
from core_trainer.forward import sample_log_probs
from core_trainer.rollout import router as router_module
from core_trainer.rollout import server as server_module
from core_trainer.rollout import weight_transport
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode
from core_trainer.rollout.router import Router
from core_trainer.rollout.server import Server
from core_trainer.rollout.vllm.client import SharedMemory, VllmServerEngine
from core_trainer.rollout.vllm.servers import Address
from core_trainer.rollout.weight_transport import WeightFolder
from core_trainer.types import SamplingParams, Turn
from rlinsight import config, names, preflight, telemetry
from rlinsight.errors import ConfigError, EngineError, NonFiniteLogProbs, RequestRefused
from tests.core_trainer.scripted_server import Fault, ScriptedServer, Style
from tests.core_trainer.test_shared_prefix import make_sample
from tests.scripted_collector import Collector, attributes, running

PROMPT = (5, 17, 300, 42, 8)
STYLES: dict[str, str] = {"vllm": "vllm", "placeholders": "vllm", "llama.cpp": "other", "sglang": "sglang"}


@pytest.fixture(scope="module")
def lively(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights, so that its distributions are far from uniform."""
    directory = tmp_path_factory.mktemp("lively")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1)
    model.save_pretrained(directory)
    models.load_tokenizer(tiny_model).save_pretrained(directory)
    return directory


@pytest.fixture
def policy(lively: Path) -> PreTrainedModel:
    """The trainer's model, which a test may change."""
    model = models.load_model(lively, torch.float32)
    attention.enable(model)
    return model


@pytest.fixture
def scripted(lively: Path) -> Iterator[ScriptedServer]:
    """A server with the policy's weights."""
    with ScriptedServer(lively).running() as server:
        yield server


def connect(server: ScriptedServer, policy: PreTrainedModel, directory: Path, **rollout: Any) -> Router:
    """The engine a run with these options gets, before its first sync."""
    kind = STYLES.get(server.style, "vllm")
    servers = {"urls": [server.url], "server": kind, "weights": "none" if kind == "other" else "disk"}
    servers |= rollout.pop("openai", {})
    section = config.RolloutSection(**{"engine": "openai", "openai": servers, "max_new_tokens": 32} | rollout)
    data = config.DataSection(train="d.jsonl", max_prompt_tokens=64)
    engine = build_engine(section, data, policy, models.load_tokenizer(directory), directory)
    assert isinstance(engine, Router)
    return engine


def ready(server: ScriptedServer, policy: PreTrainedModel, directory: Path, **rollout: Any) -> Router:
    """After its first sync."""
    engine = connect(server, policy, directory, **rollout)
    engine.sync_weights(0)
    return engine


def ask(name: str = "r", new: int = 6, **params: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, SamplingParams(new, **{"temperature": 0.7, "seed": 3} | params))


def generate(engine: Router, requests: Sequence[GenerateRequest]) -> list[Turn]:
    """All at once, in an event loop of their own."""

    async def run() -> list[Turn]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


def trained(policy: PreTrainedModel, turn: Turn, temperature: float) -> np.ndarray:
    """The trainer's log-probs of a turn."""
    sample = make_sample(np.random.default_rng(0), 0, 0, np.array(turn.prompt_token_ids), 1)
    sample.token_ids = np.array(turn.token_ids)
    return sample_log_probs(policy, [sample], temperature, 4096)[0]


@pytest.mark.parametrize("style", STYLES)
def test_answers_of_every_kind_of_server_are_read_alike(lively: Path, policy: PreTrainedModel, style: Style) -> None:
    """Tokens, log-probs at the temperature, likeliest words, text and finish reason, whoever wrote them."""
    with ScriptedServer(lively, style).running() as server:
        engine = ready(server, policy, lively)
        turn, other = generate(engine, [ask("a", num_top_log_probs=2), ask("b", seed=4)])
    expected = list(server.sample(PROMPT, {"max_tokens": 6, "temperature": 0.7, "top_k": 0, "top_p": 1, "seed": 3,
                                           "stop": [], "top": 2}))  # fmt: skip
    assert turn.token_ids == [token for token, _, _ in expected]
    assert turn.token_ids != other.token_ids
    np.testing.assert_allclose(turn.rollout_log_probs, trained(policy, turn, 0.7), atol=1e-4)
    assert turn.top_log_probs is not None
    assert [[t for t, _ in top] for top in turn.top_log_probs] == [[t for t, _ in top] for _, _, top in expected]
    assert turn.text == models.decode(models.load_tokenizer(lively), turn.token_ids)
    assert (turn.finish_reason, turn.policy_version) == ("length", 0)
    assert turn.num_cached_tokens == (None if style == "llama.cpp" else 3)
    assert turn.replica == server.url.removeprefix("http://")
    assert other.top_log_probs is None


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_a_stop_token_ends_the_answer_and_stays_in_it(lively: Path, policy: PreTrainedModel, style: Style) -> None:
    """It is part of what was sampled, and learnt from."""
    with ScriptedServer(lively, style).running() as server:
        engine = ready(server, policy, lively)
        (whole,) = generate(engine, [ask(new=12)])
        stop = whole.token_ids[4]
        engine.replicas[0].engine.stop_token_ids = (stop,)  # type: ignore[attr-defined]
        (turn,) = generate(engine, [ask(new=12)])
    assert turn.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert turn.finish_reason == "stop"


def test_an_engine_outlives_event_loops_and_asks_in_parallel(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """Each step samples in a loop of its own; seeds decide, whatever else is asked at the time."""
    engine = ready(scripted, policy, lively)
    first = generate(engine, [ask(f"a{i}", seed=i) for i in range(6)])
    second = generate(engine, [ask(f"b{i}", seed=i) for i in range(6)])
    assert [turn.token_ids for turn in first] == [turn.token_ids for turn in second]
    assert len({tuple(turn.token_ids) for turn in first}) == 6


def test_requests_carry_trace_key_and_name(lively: Path, policy: PreTrainedModel) -> None:
    """The server's own spans are children of the turn's, and its log has our request id."""
    with ScriptedServer(lively, api_key="secret").running() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_KEY", "secret")
        engine = ready(server, policy, lively, openai={"api_key_env": "TINY_KEY"})
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        generate(engine, [GenerateRequest("r7", PROMPT, SamplingParams(2), carrier={"traceparent": trace})])
    headers = server.of("/v1/completions")[-1].headers
    assert (headers["traceparent"], headers["x-request-id"]) == (trace, "r7")
    assert headers["authorization"] == "Bearer secret"


def test_a_request_is_recorded_under_its_turn(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path, tmp_path: Path
) -> None:
    """With its times as seen from here; and how many requests the server had, at the beginning and the end."""
    with running(Collector()) as collector:
        telemetry.setup("policy", spool_dir=tmp_path, run_id="r", attempt=1, endpoint=collector.url)
        try:
            engine = ready(scripted, policy, lively)
            carrier = telemetry.new_carrier()
            generate(engine, [GenerateRequest("r7", PROMPT, SamplingParams(5), carrier, {names.ROLLOUT_ID: "g-r0"})])
        finally:
            assert telemetry.shutdown(10)
    (span,) = [span for span in collector.spans() if span.name == names.ENGINE_REQUEST]
    assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == carrier["traceparent"]
    facts = attributes(span.attributes)
    assert (facts[names.ROLLOUT_ID], facts[names.REQUEST_ID], facts[names.ENGINE]) == ("g-r0", "r7", "openai")
    assert (facts[names.INPUT_TOKENS], facts[names.OUTPUT_TOKENS], facts[names.CACHED_TOKENS]) == (5, 5, 3)
    assert 0 < facts[names.TTFT_S] < facts[names.E2E_S]
    assert facts[names.E2E_S] == pytest.approx(facts[names.TTFT_S] + facts[names.DECODE_S])
    states = [attributes(event.attributes)[names.RUNNING] for event in collector.events(names.ENGINE_SAMPLE)]
    assert (states[0], states[-1]) == (1, 0)


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["vllm", "sglang"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_servers_follow_the_policy_at_a_sync_and_not_before(
    lively: Path, policy: PreTrainedModel, tmp_path: Path, style: Style, on_disk: bool
) -> None:
    """New weights reach the server through memory or a folder; its log-probs are then the new policy's."""
    options = {"weights_dir": str(tmp_path / "weights")} if on_disk else {}
    with ScriptedServer(lively, style).running() as server:
        engine = ready(server, policy, lively, openai=options)
        before = trained(policy, generate(engine, [ask("a")])[0], 0.7)
        for version in (1, 2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(0.9)
            (turn,) = generate(engine, [ask("b")])
            np.testing.assert_allclose(turn.rollout_log_probs, before, atol=1e-4)
            (synced,) = engine.sync_weights(version)
            assert synced.moved == sum(parameter.nbytes for parameter in policy.parameters())
            (turn,) = generate(engine, [ask("c")])
            before = trained(policy, turn, 0.7)
            np.testing.assert_allclose(turn.rollout_log_probs, before, atol=1e-4)
            assert turn.policy_version == version
        assert not server.paused
        engine.close()
        assert not on_disk or list((tmp_path / "weights").iterdir()) == []


def test_a_server_that_is_a_small_step_behind_is_found_too(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """Its log-probs are much nearer those of the weights it had. One that follows such steps is not held up."""
    engine = ready(scripted, policy, lively)

    def step() -> None:
        with torch.no_grad():
            policy.get_input_embeddings().weight.mul_(1 + 1e-4)

    for version in (1, 2, 3):
        step()
        engine.sync_weights(version)
    scripted.ignores_weights = True
    for version in (4, 4, 5):
        step()
        with pytest.raises(
            EngineError, match=rf"did not take the weights of policy_version={version}: .* by 0\.000\d+ "
        ):
            engine.sync_weights(version)
    scripted.ignores_weights = False
    engine.sync_weights(5)


def test_a_server_without_the_new_weights_is_found_at_the_sync(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """One that says no, and one that says yes and keeps the old ones; once it takes them all is well."""
    engine = ready(scripted, policy, lively)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(1.05)
    scripted.refuses_weights = True
    with pytest.raises(EngineError, match=r"/collective_rpc answers 500: no weights today"):
        engine.sync_weights(1)
    assert not scripted.paused
    scripted.refuses_weights, scripted.ignores_weights = False, True
    with pytest.raises(EngineError, match="did not take the weights of policy_version=1: log-probs differ"):
        engine.sync_weights(1)
    with pytest.raises(EngineError, match="did not take the weights"):
        engine.sync_weights(1)
    scripted.ignores_weights = False
    engine.sync_weights(1)
    assert generate(engine, [ask()])[0].policy_version == 1


def start_request(engine: Router, request: GenerateRequest, tokens: int) -> Any:
    """A task of it, once so many tokens have arrived."""

    async def begin() -> asyncio.Task[Turn]:
        task, answers = asyncio.create_task(engine.generate(request)), engine.replicas[0].engine._answers  # type: ignore[attr-defined]
        while request.request_id not in answers or len(answers[request.request_id].token_ids) < tokens:
            assert not task.done(), task
            await asyncio.sleep(0.001)
        return task

    return begin()


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_weights_change_under_requests_in_flight(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path, mode: PauseMode
) -> None:
    """wait samples them to their end first, abort ends them, keep goes on under the new weights; each token says whose
    it is.
    """
    engine = ready(scripted, policy, lively)
    old = copy.deepcopy(policy)
    scripted.script = [Fault(token_s=0.02)]

    async def run() -> tuple[Turn, Any]:
        task = await start_request(engine, ask(new=24), 5)
        with torch.no_grad():
            policy.get_input_embeddings().weight.mul_(0.8)
        (synced,) = await asyncio.to_thread(engine.sync_weights, 1, mode)
        return await task, synced

    turn, synced = asyncio.run(run())
    assert (synced.pause_mode, synced.in_flight, synced.aborted) == (mode, 1, int(mode == "abort"))
    assert turn.policy_version == 0
    if mode == "keep":
        assert turn.token_policy_versions == sorted(turn.policy_versions)
        assert 5 <= turn.policy_versions.count(0) < 24 == len(turn.policy_versions)
    else:
        assert turn.token_policy_versions is None
        assert (turn.finish_reason, len(turn.token_ids) < 24) == (
            ("abort", True) if mode == "abort" else ("length", False)
        )
    under = [trained(weights, turn, 0.7) for weights in (old, policy)]
    own = np.array(turn.policy_versions * (len(turn.token_ids) if mode != "keep" else 1))
    np.testing.assert_allclose(turn.rollout_log_probs, np.where(own == 0, *under), atol=1e-4)
    assert np.abs(under[0] - under[1]).min() > 1e-3
    assert not scripted.paused
    (later,) = generate(engine, [ask("later")])
    assert (later.policy_version, later.token_policy_versions) == (1, None)


def test_requests_kept_through_a_sync_that_failed_are_not_trusted(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """Nobody knows which weights sampled their later tokens."""
    engine = ready(scripted, policy, lively)
    scripted.script, scripted.ignores_weights = [Fault(token_s=0.05)], True

    async def run() -> Turn:
        task = await start_request(engine, ask(new=32), 3)
        with torch.no_grad():
            policy.get_input_embeddings().weight.mul_(1.1)
        with pytest.raises(EngineError, match="did not take the weights of policy_version=1"):
            await asyncio.to_thread(engine.sync_weights, 1, "keep")
        return await task

    with pytest.raises(EngineError, match="request r: it was to be kept through a weight sync, which failed"):
        asyncio.run(run())


def test_sglang_is_told_to_wait_alone(policy: PreTrainedModel, lively: Path) -> None:
    """Its other ways are not known to be those of vLLM."""
    with ScriptedServer(lively, "sglang").running() as server:
        engine = ready(server, policy, lively)
        with pytest.raises(EngineError, match="SGLang is not told what becomes of requests in flight"):
            engine.sync_weights(1, "keep")


def test_a_server_that_keeps_its_weights_says_so_for_good(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """Its turns stay of the version it was checked at, of which nobody has a checksum; other weights are refused."""
    engine = ready(scripted, policy, lively, openai={"weights": "none"})
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(1.2)
    (first,), (second,) = engine.sync_weights(1), engine.sync_weights(2)
    assert (first.checksum_served, second.checksum_served) == (None, None)
    assert first.moved == 0
    assert generate(engine, [ask()])[0].policy_version == 0
    assert scripted.loads == 0
    with torch.no_grad():  # somebody starts it anew, with another model
        scripted.model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(EngineError, match="serves other weights than at first: log-probs differ by"):
        engine.sync_weights(3)


def test_a_killed_attempt_leaves_its_folder_to_the_next_one(policy: PreTrainedModel, tmp_path: Path) -> None:
    """Which removes it before it publishes; workers of a run have folders of their own."""
    killed = WeightFolder(policy, tmp_path, "run-0")
    killed.at(3)
    other = WeightFolder(policy, tmp_path, "run-1")
    again = WeightFolder(policy, tmp_path, "run-0")
    assert list(again.path.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {again.path.name, other.path.name}
    with pytest.raises(EngineError, match="policy_version=0 is no longer published, 1 is"):
        again.at(1) and again.at(0)
    again.close()
    other.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"rollout.openai.weights_dir=.*file: no folder for the weights"):
        WeightFolder(policy, tmp_path / "file", "run-0")


def test_a_control_call_fails_long_before_a_request_would(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs is found at the pause; loading weights may take as long as a request."""
    engine = ready(scripted, policy, lively)
    monkeypatch.setattr(server_module, "CONTROL_TIMEOUT_S", 0.2)
    scripted.slow = {"/collective_rpc": 0.6}
    engine.sync_weights(1)
    scripted.slow = {"/pause": 1.0}
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"/pause was silent for 0.2 s$"):
        engine.sync_weights(2)
    assert time.monotonic() - began < 0.9
    assert len(scripted.of("/resume")) == 3  # after this pause too, lest it hold when it comes
    monkeypatch.setattr(weight_transport, "RESUME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server_module, "CONTROL_TIMEOUT_S", 2.0)
    scripted.slow = {"/pause": 5.0, "/resume": 5.0}
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"/pause was silent for 2 s$"):
        engine.sync_weights(3)
    assert time.monotonic() - began < 3.5  # it was waited for once


@pytest.mark.parametrize("silence", [httpx.ReadTimeout, httpx.WriteTimeout])
def test_a_call_that_is_not_taken_names_its_own_time(silence: type[httpx.TimeoutException]) -> None:
    """Whether the server stops to read or to answer."""

    def hang(_: httpx.Request) -> httpx.Response:
        raise silence("too long")

    server = Server("http://a:1", timeout_s=600)
    server._control = httpx.Client(base_url=server.url, transport=httpx.MockTransport(hang))
    with pytest.raises(EngineError, match=r"http://a:1/pause was silent for 7 s$"):
        server.call("POST", "/pause", timeout_s=7)


@pytest.mark.parametrize("way", ["memory", "own servers", "disk"])
def test_weights_that_cannot_be_published_are_an_engine_error(
    policy: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """With what to free; at the sync, and where not even a folder can be made."""

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = (
        SharedMemory(policy).folder
        if way == "own servers"
        else WeightFolder(policy, tmp_path if way == "disk" else None)
    )
    monkeypatch.setattr(weight_transport, "save_file" if way == "disk" else "SharedWeights", no_room)
    with pytest.raises(
        EngineError, match=rf"written to .* left on device\); free some {'space' if way == 'disk' else 'memory'}$"
    ):
        folder.at(0)
    folder.close()
    monkeypatch.setattr(weight_transport.tempfile, "mkdtemp", no_room)
    with pytest.raises(EngineError, match=r"no folder for the weights can be made.*No space left on device"):
        WeightFolder(policy, tmp_path if way == "disk" else None)


# A run's own servers --------------------------------------------------------------------------------------------------


def test_own_servers_take_requests_as_long_as_the_run_does_and_give_no_foreign_advice(
    lively: Path, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their context is the model's where that is shorter; messages name no option of servers of others. Nobody waits
    for one that is gone.
    """
    monkeypatch.setattr(router_module, "FIRST_BACKOFF_S", 0.05)
    section = config.RolloutSection(
        engine="vllm_server", max_new_tokens=32, request_timeout_s=7200, vllm=config.VllmSection(sleep_level=1)
    )
    longest = policy.config.max_position_embeddings
    data = config.DataSection(train="d.jsonl", max_prompt_tokens=longest)
    tokenizer = models.load_tokenizer(lively)
    with ScriptedServer(lively, max_model_len=longest, api_key="key").running() as server:

        def build(**changes: str) -> Router:
            address = Address(**{"replica": "vllm/0", "url": server.url, "model": "tiny", "api_key": "key"} | changes)
            engine = build_engine(section, data, policy, tokenizer, lively, servers=[address])
            assert isinstance(engine, Router)
            return engine

        router = build()
        engine = router.replicas[0].engine
        assert isinstance(engine, VllmServerEngine)
        assert engine.replica == "vllm/0"
        assert (engine.max_length, engine.server.timeout_s) == (longest, 7200)
        engine.sync_weights(0)
        engine.sleep()
        engine.sync_weights(1)  # it was out when the others were woken
        engine.sync_weights(2)
        assert len(server.of("/sleep")) == len(server.of("/wake_up")) == 1
        assert server.loads == 3
        for wrong, message in (({"api_key": "no"}, "refuses the key"), ({"model": "x"}, "serves no model 'x'")):
            with pytest.raises(EngineError, match=message) as refusal:
                build(**wrong)
            assert "rollout.openai" not in str(refusal.value)
    with pytest.raises(EngineError, match=r"cannot be reached .*; its log is in the run's folder under servers"):
        build()

    async def generate_soon() -> Turn:
        return await asyncio.wait_for(router.generate(ask()), 30)

    for message in ("cannot be reached", "no rollout replica can be used, all have failed: vllm/0"):
        with pytest.raises(EngineError, match=message):
            asyncio.run(generate_soon())


# What is refused at the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "rollout", "message"),
    [
        ({"names": ("a", "b")}, {}, "serves several models; set rollout.openai.model to one of: a, b"),
        ({}, {"openai": {"model": "big"}}, "serves no model 'big'; set rollout.openai.model to one of: tiny"),
        ({"names": ()}, {}, "lists no model at /v1/models"),
        ({"max_model_len": 80}, {}, "serves a context of 80, and data.max_prompt_tokens and .* need 96"),
        ({"api_key": "x"}, {}, r"refuses the key \(401\): Unauthorized; set rollout.openai.api_key_env"),
        ({"style": "text"}, {}, "cannot be sampled from: it returns no token ids; vLLM does since"),
        (
            {"log_probs": "raw"},
            {"temperature": 0.7},
            "reports log-probs before the temperature, and this run samples at 0.7; start vLLM with --logprobs-mode",
        ),
        ({"knows_stop_tokens": False}, {}, "does not end an answer after a token of stop_token_ids"),
        ({"log_probs": "processed"}, {"top_p": 0.9}, "reports log-probs of what top-k and top-p left"),
        (
            {"dev_mode": False},
            {},
            "/pause answers 404: Not Found; start vLLM with VLLM_SERVER_DEV_MODE=1, or set rollout.openai.server",
        ),
        ({"dev_mode": False}, {"openai": {"server": "sglang"}}, "update_weights_from_disk answers 404: .*; start vLLM"),
    ],
)  # fmt: skip
def test_what_a_server_cannot_do_is_refused_with_what_fixes_it(
    lively: Path, policy: PreTrainedModel, server: dict, rollout: dict, message: str
) -> None:
    """Before the first rollout."""
    with ScriptedServer(lively, **server).running() as scripted, pytest.raises(EngineError, match=message) as refusal:
        ready(scripted, policy, lively, **rollout)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("server", "rollout"),
    [
        ({"log_probs": "raw"}, {"temperature": 1.0}),
        ({"log_probs": "raw"}, {"temperature": 1.0, "top_p": 0.8}),
        ({"log_probs": "processed"}, {"temperature": 0.3}),
        ({"log_probs": "whole"}, {"temperature": 0.3, "top_k": 5}),
        ({"max_model_len": None}, {}),
    ],
)
def test_what_fits_is_let_through(lively: Path, policy: PreTrainedModel, server: dict, rollout: dict) -> None:
    """Log-probs that are right for how the run samples, however the server came by them."""
    with ScriptedServer(lively, **server).running() as scripted:
        engine = ready(scripted, policy, lively, **rollout)
        params = {key: value for key, value in rollout.items() if key != "openai"}
        (turn,) = generate(engine, [ask(**{"temperature": 1.0} | params)])
    np.testing.assert_allclose(
        turn.rollout_log_probs, trained(policy, turn, rollout.get("temperature", 1.0)), atol=1e-4
    )


def test_a_path_that_is_missing_under_v1_is_not_explained_by_what_runs_there(lively: Path) -> None:
    """Wherever the server is mounted."""
    with ScriptedServer(lively, dev_mode=False).running() as scripted:
        for mount in ("", "/gpu0"):
            server = Server(scripted.url + mount)
            with pytest.raises(EngineError, match=rf"{scripted.url}{mount}/pause answers 404: Not Found; start vLLM"):
                server.call("POST", "/pause")
            with pytest.raises(EngineError, match=rf"{scripted.url}{mount}/v1/other answers 404: Not Found$"):
                server.call("POST", "/v1/other")


def test_a_server_of_other_weights_is_refused(tiny_model: Path, policy: PreTrainedModel, lively: Path) -> None:
    """The right architecture and vocabulary, but another revision: its log-probs give it away."""
    with ScriptedServer(tiny_model).running() as server:
        server.ignores_weights = True
        with pytest.raises(
            EngineError, match=r"serves other weights than the policy's: .* start it with the model that"
        ):
            ready(server, policy, lively)


def test_nobody_there(policy: PreTrainedModel, lively: Path) -> None:
    """One line with the address."""
    server = ScriptedServer(lively)
    with server.running():
        pass
    with pytest.raises(EngineError, match=rf"{server.url} cannot be reached \(.*\); is the server running\?"):
        connect(server, policy, lively)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "openai"}, "engine openai needs the servers' addresses; set openai.urls"),
        ({"openai": {"urls": ["http://a:1"]}}, "openai has no effect with engine native; set engine: openai"),
        ({"engine": "openai", "openai": {"urls": ["a:1"]}}, "urls.0='a:1' is no http or https address"),
        ({"engine": "openai", "openai": {"urls": ["http://u:p@a"]}}, "urls.0 holds credentials, which would be stored"),
        ({"engine": "openai", "openai": {"urls": ["http://a", "http://a/"]}}, "urls repeat"),
        ({"engine": "openai", "openai": {"urls": ["http://h:8000", "http://h:8000/v1"]}}, "urls repeat"),
        ({"engine": "openai", "openai": {"urls": ["http://h", "http://H:80/v1/"]}}, "urls repeat"),
        (
            {"engine": "openai", "openai": {"urls": ["http://a"], "weights": "none"}, "on_stale": "fail"},
            "on_stale=fail has no effect with openai.weights: none",
        ),
        ({"engine": "openai", "openai": {"urls": ["http://a"], "server": "other"}}, "weights=disk needs server: vllm"),
        (
            {"engine": "openai", "openai": {"urls": ["http://a"], "weights": "none", "weights_dir": "/w"}},
            "weights_dir has no effect with weights: none",
        ),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused(rollout: dict, message: str) -> None:
    """By the config, before anything starts."""
    with pytest.raises(ConfigError) as refusal:
        settings(rollout)
    assert message in str(refusal.value)


def settings(rollout: dict, **algorithm: Any) -> config.Config:
    return config.parse(
        {
            "model": {"source": "some-owner/some-model"},
            "data": {"train": "reasoning_gym:chain_sum"},
            "reward": {"functions": [{"type": "numeric"}]},
            "rollout": rollout,
            "algorithm": algorithm,
        }
    )


def test_a_run_that_cannot_work_with_its_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is not there; servers that keep their weights, where nothing makes up for it."""
    monkeypatch.delenv("NO_KEY", raising=False)
    servers = {"urls": ["http://a"], "api_key_env": "NO_KEY"}
    with pytest.raises(ConfigError, match=r"rollout.openai.api_key_env=NO_KEY: no such environment variable"):
        preflight.check(settings({"engine": "openai", "openai": servers}))
    monkeypatch.setenv("NO_KEY", "k")
    preflight.check(settings({"engine": "openai", "openai": servers}))
    frozen = {"engine": "openai", "openai": {"urls": ["http://a"], "weights": "none"}}
    with pytest.raises(ConfigError, match=r"rollout.openai.weights=none: the servers would sample from other weights"):
        preflight.check(settings(frozen))
    preflight.check(settings(frozen, correction={"importance": {}}))
    with pytest.raises(ConfigError, match=r"rollout.openai.weights=none: the servers have the weights the run began"):
        preflight.check(settings(frozen, correction={"importance": {}}), resume=True)


def test_workers_share_servers(policy: PreTrainedModel, lively: Path) -> None:
    """Each worker has its own where there are enough, and otherwise they take turns."""
    data = config.DataSection(train="d.jsonl", max_prompt_tokens=64)
    tokenizer = models.load_tokenizer(lively)
    with ScriptedServer(lively).running() as a, ScriptedServer(lively).running() as b:
        addresses = [server.url.removeprefix("http://") for server in (a, b)]

        def share(urls: list[str], rank: int, world_size: int) -> list[str]:
            section = config.RolloutSection(engine="openai", openai={"urls": urls})  # type: ignore[arg-type]
            engine = build_engine(section, data, policy, tokenizer, lively, rank=rank, world_size=world_size)
            assert isinstance(engine, Router)
            return [replica.name for replica in engine.replicas]

        assert share([a.url, b.url], 0, 1) == addresses
        assert [share([a.url, b.url], rank, 2) for rank in (0, 1)] == [addresses[:1], addresses[1:]]
        assert [share([a.url, b.url], rank, 3) for rank in (0, 1, 2)] == [addresses[:1], addresses[1:], addresses[:1]]


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=500, message="out of KV memory"), "/v1/completions answers 500: out of KV memory"),
        (Fault(drop_after=2), "broke the connection"),
        (Fault(drop_after=0), "broke the connection"),
        (Fault(end_after=2), "request r: it ended the answer early, after 2 tokens"),
        (Fault(end_after=0), "request r: it ended the answer early, after 0 tokens"),
        (Fault(fail_after=2, message="engine died"), "request r: it failed: engine died"),
        (Fault(first_log_prob=float("nan")), "it returned nan as the log-prob of a token it sampled"),
        (Fault(first_log_prob=None), "it returned None as the log-prob"),
        (Fault(first_log_prob=-9999.0), "it returned -9999.0 as the log-prob"),
        (Fault(first_log_prob=2.5), "it returned 2.5 as the log-prob"),
        (Fault(missing_log_probs=1), "it returned 0 log-probs for 1 tokens"),
        (Fault(first_token=70_000), "it returned token 70000, but the model has"),
        (Fault(counted_more=1), "it counts 7 tokens and returned 6"),
        (Fault(prompt_more=1), "it counts 6 prompt tokens of 5; it must take token ids as they are"),
        (Fault(finish_reason="content_filter"), "it ended the request with 'content_filter'"),
        (Fault(not_json=True), "it ended the answer early, after 0 tokens"),
    ],
)  # fmt: skip
def test_a_bad_answer_is_an_error_by_name(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path, fault: Fault, message: str
) -> None:
    """The error has server, request and what was wrong; the server gets its weights again and serves the next one."""
    engine = ready(scripted, policy, lively)
    scripted.script = [fault]
    with pytest.raises(EngineError, match=message) as failure:
        generate(engine, [ask()])
    assert failure.value.replica == engine.replicas[0].name
    is_number = fault.first_log_prob in ("true", 2.5)
    assert type(failure.value) is (EngineError if is_number else NonFiniteLogProbs)
    assert engine.replicas[0].load == 0
    engine.sync_weights(1)
    assert len(generate(engine, [ask()])[0].token_ids) == 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(not_json=True), "of another form"),
        (Fault(drop_after=2), "broke the connection"),
        (Fault(first_log_prob=None), "it returned None as the log-prob"),
        (Fault(counted_more=2), "it returned 6 log-probs|it counts 8 tokens and returned 6"),
    ],
)
def test_whole_answers_are_checked_alike(lively: Path, policy: PreTrainedModel, fault: Fault, message: str) -> None:
    """Those of a server that is asked without a stream."""
    with ScriptedServer(lively, "sglang").running() as server:
        engine = ready(server, policy, lively)
        server.script = [fault]
        with pytest.raises(EngineError, match=message):
            generate(engine, [ask()])


def test_a_request_that_is_refused_for_what_it_asks(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """Too long for the context, or refused by the server: no replica is to blame, and the next request is served."""
    engine = ready(scripted, policy, lively)
    with pytest.raises(RequestRefused, match=r"a prompt of 5 tokens and max_new_tokens=600 exceed the context of 512"):
        generate(engine, [ask(new=600)])
    scripted.script = [Fault(status=400, message="bad seed")]
    with pytest.raises(RequestRefused, match="answers 400: bad seed"):
        generate(engine, [ask()])
    assert generate(engine, [ask()])


def test_a_busy_server_is_asked_again_when_it_says(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before Retry-After is over; without one after a moment that grows; never at once after 429 or 503."""
    monkeypatch.setattr(server_module, "FIRST_DELAY_S", 0.02)
    engine = ready(scripted, policy, lively)
    scripted.script = [Fault(status=429, headers={"retry-after": "1"}), Fault(status=503), None]
    began = time.monotonic()
    assert len(generate(engine, [ask()])[0].token_ids) == 6
    assert time.monotonic() - began > 1.0 + 0.01 + 0.02
    assert len([asked for asked in scripted.of("/v1/completions") if "x-request-id" in asked.headers]) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=429, message="too many"), r"was busy \(429\) 6 times in a row: too many"),
        (Fault(status=503, headers={"retry-after": "3600"}), r"is busy \(503\) and asks to wait 3600 s"),
        (Fault(status=503, headers={"retry-after": "Fri, 31 Dec 2100 23:59:59 GMT"}), "asks to wait 2.*e"),
    ],
)  # fmt: skip
def test_a_server_that_stays_busy_fails(
    scripted: ScriptedServer,
    policy: PreTrainedModel,
    lively: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    message: str,
) -> None:
    """After a number of tries, or at once when it asks for more time than anybody has."""
    monkeypatch.setattr(server_module, "FIRST_DELAY_S", 0.001)
    engine = ready(scripted, policy, lively)
    scripted.script = [fault] * 10
    with pytest.raises(EngineError, match=message):
        generate(engine, [ask()])


@pytest.mark.parametrize("fault", [Fault(after_s=3), Fault(token_s=3)])
def test_silence_is_an_error_after_its_time(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path, fault: Fault
) -> None:
    """Before an answer or in the middle of it."""
    engine = ready(scripted, policy, lively, openai={"timeout_s": 1.0})
    scripted.script = [fault]
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"was silent for 1 s; raise rollout.openai.timeout_s"):
        generate(engine, [ask(new=2)])
    assert time.monotonic() - began < 2.5


def test_abort_returns_what_has_arrived_and_hangs_up(
    scripted: ScriptedServer, policy: PreTrainedModel, lively: Path
) -> None:
    """The aborted turn has its tokens so far, the other one all of its; the server sees the connection close."""
    engine = ready(scripted, policy, lively)
    scripted.script = [Fault(token_s=0.05)] * 2

    async def run() -> list[Turn]:
        tasks = [asyncio.create_task(engine.generate(ask(name, new=30))) for name in "ab"]
        await asyncio.sleep(0.6)
        engine.abort("a")
        engine.abort("nobody")
        aborted = await tasks[0]
        assert not tasks[1].done()
        return [aborted, await tasks[1]]

    aborted, other = asyncio.run(run())
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 30
    assert aborted.token_ids == other.token_ids[: len(aborted.token_ids)]
    assert len(aborted.rollout_log_probs) == len(aborted.token_ids)
    assert len(other.token_ids) == 30
    wait_for(lambda: scripted.hung_up == 1)


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_a_stream_gives_tokens_as_they_come(lively: Path, policy: PreTrainedModel, style: Style) -> None:
    """Chunks add up to the turn, in time; who stops listening hangs up."""
    with ScriptedServer(lively, style).running() as server:
        engine = ready(server, policy, lively)
        server.script = [Fault(token_s=0.05)] * 2

        async def run() -> tuple[list[Chunk], list[float]]:
            chunks, times = [], []
            async for chunk in engine.stream(ask(new=8)):
                chunks.append(chunk)
                times.append(time.monotonic())
            async with aclosing(engine.stream(ask("left", new=60))) as left:  # type: ignore[type-var]  # a generator
                await anext(left)
            return chunks, times

        chunks, times = asyncio.run(run())
        turn = chunks[-1].turn
        assert turn is not None
        assert [token for chunk in chunks for token in chunk.token_ids] == turn.token_ids
        assert [x for chunk in chunks for x in chunk.log_probs] == turn.rollout_log_probs
        assert max(len(chunk.token_ids) for chunk in chunks) == 1
        assert times[-1] - times[0] > 0.3
        wait_for(lambda: server.hung_up == 1)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
