"""The native engine samples what the model says, whatever shares its batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from core_trainer import attention, models
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.rollout.native.sampler import inverse_cdf, sample
from core_trainer.types import SamplingParams, Turn
from rlinsight.errors import RlinsightError


def make_engine(directory: Path, dtype: torch.dtype = torch.float32, batch: int = 64, stop: tuple = ()) -> NativeEngine:
    """An engine over a fresh copy of the model."""
    model = models.load_model(directory, dtype)
    attention.enable(model)
    engine = NativeEngine(model, models.load_tokenizer(directory), stop, batch)
    engine.sync_weights(0)
    return engine


def generate(engine: NativeEngine, requests: Sequence[GenerateRequest]) -> list[Turn]:
    """All requests at once."""

    async def run() -> list[Turn]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 500, rng.integers(1, 41)).tolist()) for _ in range(count)]


@pytest.mark.slow
def test_greedy_equals_transformers_on_200_prompts(tiny_model: Path) -> None:
    """In float32, greedy decoding equals transformers' token for token, with waves, ragged prompts and early stops."""
    plain = models.load_model(tiny_model, torch.float32)
    asked = prompts(200)
    expected = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=7
        )
        expected.append(out[0, len(prompt) :].tolist())
    engine = make_engine(tiny_model, batch=48, stop=(7,))
    requests = [GenerateRequest(str(i), p, SamplingParams(12, 0.0)) for i, p in enumerate(asked)]
    turns = generate(engine, requests)
    assert [turn.token_ids for turn in turns] == expected
    for turn in turns:
        assert turn.finish_reason == ("stop" if turn.token_ids[-1] == 7 else "length")


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
    with pytest.raises(RlinsightError, match="max_new_tokens=30 exceed its context of 20"):
        generate(engine, [request])


def test_abort_returns_what_there_is(tiny_model: Path) -> None:
    """An aborted request ends at once with its tokens so far; others go on; unknown ids are ignored."""
    engine = make_engine(tiny_model)
    first, second = (GenerateRequest(str(i), p, SamplingParams(200, 1.0, seed=i)) for i, p in enumerate(prompts(2)))

    async def run() -> list[Turn]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in (first, second)]
        for _ in range(12):
            await asyncio.sleep(0)
        engine.abort("0")
        engine.abort("nobody")
        return await asyncio.gather(*tasks)

    aborted, finished = asyncio.run(run())
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 200
    assert len(finished.token_ids) == 200


def test_a_failure_reaches_every_caller(tiny_model: Path) -> None:
    """If the model fails mid-generation, every waiting caller gets the error and the engine works again after."""
    engine = make_engine(tiny_model)
    requests = [GenerateRequest(str(i), p, SamplingParams(5, 1.0)) for i, p in enumerate(prompts(3))]
    decoder = engine.model.get_decoder
    engine.model.get_decoder = lambda: (_ for _ in ()).throw(MemoryError("no memory"))  # type: ignore[method-assign]

    async def run() -> list:
        return await asyncio.gather(*[engine.generate(r) for r in requests], return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [MemoryError] * 3
    engine.model.get_decoder = decoder  # type: ignore[method-assign]
    assert len(generate(engine, requests)) == 3


def test_inverse_cdf_draws_by_weight() -> None:
    """Frequencies over an even grid of uniforms equal the weights, zero weights are never drawn, any vocabulary
    size.
    """
    rng = np.random.default_rng(0)
    weights = rng.random(1000).astype(np.float32)
    weights[rng.random(1000) < 0.5] = 0
    count = 200_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = torch.cat([inverse_cdf(torch.from_numpy(weights).expand(len(u), -1), u) for u in grid.split(2000)])
    share = np.bincount(drawn.numpy(), minlength=1000) / count
    assert share[weights == 0].max() == 0
    np.testing.assert_allclose(share, weights / weights.sum(), atol=2e-5)
    edges = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    first, last = inverse_cdf(torch.from_numpy(weights).expand(2, -1), edges).tolist()
    assert (first, last) == (int(np.flatnonzero(weights)[0]), int(np.flatnonzero(weights)[-1]))


def test_top_k_and_top_p_restrict_what_is_drawn_per_row() -> None:
    """Each row has its own limits; log-probs stay those of the whole distribution."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(400, -1)
    uniform = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    ones, size = torch.ones(400), torch.full((400,), 4)
    tokens, log_probs = sample(logits, ones, uniform, top_k=torch.where(torch.arange(400) % 2 == 0, 2, size))
    assert set(tokens[::2].tolist()) == {0, 1}
    assert set(tokens[1::2].tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(log_probs, logits[0][tokens])
    tokens, _ = sample(logits, ones, uniform, top_p=torch.full((400,), 0.79))
    assert set(tokens.tolist()) == {0, 1}
    tokens, _ = sample(logits, ones, uniform, top_p=torch.full((400,), 0.4))
    assert set(tokens.tolist()) == {0}
    greedy, _ = sample(logits, torch.zeros(400), uniform)
    assert set(greedy.tolist()) == {0}
