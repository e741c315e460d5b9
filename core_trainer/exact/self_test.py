"""The proof, on the model at hand, that engine and trainer agree bit for bit; a run is exact only after it.

Random prompts of lengths around the attention's blocks are answered by the engine, which prefills, decodes ever
smaller batches and ends with one sequence. The trainer then scores the same tokens with gradients, in packed
micro-batches, and those of one sample a prompt, the long one too, without, one sample at a time. All must agree in
every bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from core_trainer.batching import TrainSample, micro_batches, pack, token_sample
from core_trainer.exact import level
from core_trainer.exact.paged import ENGINES
from core_trainer.forward import sample_log_probs, scores
from core_trainer.rollout.engine import GenerateRequest, RolloutEngine
from core_trainer.types import SamplingParams, Turn
from rlinsight import names, telemetry
from rlinsight.errors import EngineError

LENGTHS = ((1, 90), (17, 70), (17, 5), (40, 1), (63, 4), (64, 3), (65, 2), (130, 66))  # tokens of prompt and response
LONGEST = 520  # tokens of the longest sequence that is tried, where the run's own are as long
LONG_RESPONSE = 8  # of them sampled
TOKEN_BUDGET = 1024  # of a micro-batch, so that there are some, of different shapes

E = TypeVar("E", bound=RolloutEngine)


@dataclass(frozen=True, slots=True)
class Result:
    """What was compared."""

    num_tokens: int  # sampled
    num_mismatched: int  # of those, scored otherwise: packed, alone or both
    gap_max: float  # largest difference of a log-prob
    first: str | None  # where the first difference is; None when there is none


def exact_engine(
    levels: Sequence[level.Level],
    model: PreTrainedModel,
    build: Callable[[type[E]], E],
    stop_token_ids: Sequence[int],
    temperature: float,
    longest: int,
    engines: Mapping[level.Level, type[Any]] = ENGINES,
) -> E:
    """The engine at the first of the levels whose self-test passes; the model is left at that level.

    ``build`` makes an engine of a class of ``engines``; ``longest`` is the longest sequence of the run, in tokens.
    Raises EngineError, which tells each level's first difference, when none passes.
    """
    failures = []
    for candidate in levels:
        level.enable(model, candidate)
        engine = build(engines[candidate])
        with telemetry.span(names.EXACT_TEST, {names.EXACT_LEVEL: candidate, names.BUCKET: "overhead"}) as span:
            result = compare(model, engine, stop_token_ids, temperature, longest)
            span.set(
                {
                    names.NUM_TOKENS: result.num_tokens,
                    names.EXACT_MISMATCHED: result.num_mismatched,
                    names.EXACT_GAP_MAX: result.gap_max,
                }
            )
        if result.first is None:
            return engine
        engine.close()
        failures.append(f"level {candidate}: {result.num_mismatched} of {result.num_tokens} differ, {result.first}")
    raise EngineError(
        f"rollout.exact: engine and trainer do not agree bit for bit on this machine ({'; '.join(failures)}); "
        "set rollout.exact: off, or try another level or number of threads"
    )


def compare(
    model: PreTrainedModel,
    engine: RolloutEngine,
    stop_token_ids: Sequence[int],
    temperature: float,
    longest: int,
) -> Result:
    """Sample, score, and compare the bits."""
    engine.sync_weights(0)
    requests = make_requests(model.config.vocab_size, stop_token_ids, temperature, longest)
    turns = asyncio.run(_generate(engine, requests))
    samples = [_sample(turn) for turn in turns]
    packed = _with_gradients(model, samples, temperature)
    alone = [sample_log_probs(model, [sample], temperature, TOKEN_BUDGET)[0] for sample in samples[::2]]
    found = [(sample, scored, "in a packed update") for sample, scored in zip(samples, packed, strict=True)]
    found += [(sample, scored, "alone") for sample, scored in zip(samples[::2], alone, strict=True)]
    wrong = {sample.rollout_id: np.zeros(sample.num_tokens, dtype=bool) for sample in samples}
    first, gap = None, 0.0
    for sample, scored, how in found:
        sampled = sample.rollout_log_probs
        differs = sampled.view(np.int32) != scored.view(np.int32)
        wrong[sample.rollout_id] |= differs
        gap = max(gap, float(np.abs(sampled - scored).max()))
        if first is None and differs.any():
            at, prompt = int(differs.argmax()), len(sample.prompt_token_ids)
            first = (
                f"the first at position {prompt + at} of a sequence with a prompt of {prompt}: sampled with "
                f"{sampled[at]:.9g}, scored {how} with {scored[at]:.9g}"
            )
    return Result(
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_mismatched=sum(int(tokens.sum()) for tokens in wrong.values()),
        gap_max=gap,
        first=first,
    )


def make_requests(
    vocabulary: int, stop_token_ids: Sequence[int], temperature: float, longest: int
) -> list[GenerateRequest]:
    """Two requests for each of LENGTHS, and one long one; none beyond ``longest`` tokens, none stopped early."""
    rng = np.random.default_rng(0)
    lengths = [
        (min(prompt, longest - 1), min(prompt + response, longest) - min(prompt, longest - 1))
        for prompt, response in LENGTHS
    ]
    long_response = min(LONG_RESPONSE, longest - 1)
    lengths.append((min(LONGEST, longest) - long_response, long_response))
    bias = dict.fromkeys(stop_token_ids, -1e4)
    requests = []
    for i, (prompt, response) in enumerate(lengths):
        tokens = tuple(rng.integers(0, vocabulary, prompt).tolist())
        for j in range(1 if i == len(lengths) - 1 else 2):
            # The second of a pair is shorter, so that a group's responses are ragged.
            params = SamplingParams(max(1, response // (j + 1)), temperature, logit_bias=bias, seed=2 * i + j)
            requests.append(GenerateRequest(f"exact-{i}-{j}", tokens, params, session=f"exact-{i}"))
    return requests


async def _generate(engine: RolloutEngine, requests: Sequence[GenerateRequest]) -> list[Turn]:
    return await asyncio.gather(*[engine.generate(request) for request in requests])


def _sample(turn: Turn) -> TrainSample:
    group_id = turn.request_id.rpartition("-")[0]
    return token_sample(turn.request_id, group_id, turn.prompt_token_ids, turn.token_ids, turn.rollout_log_probs)


def _with_gradients(model: PreTrainedModel, samples: Sequence[TrainSample], temperature: float) -> list[np.ndarray]:
    """Log-probs [T] of each sample as an update computes them."""
    found: dict[str, np.ndarray] = {}
    with torch.enable_grad():
        for part in micro_batches(samples, TOKEN_BUDGET):
            batch = pack(part, model.device)
            values = scores(model, batch, temperature).log_probs.detach()
            found |= {s.rollout_id: array for s, array in zip(batch.samples, batch.split(values), strict=True)}
    return [found[sample.rollout_id] for sample in samples]
