"""What the native engine's sampler draws, row by row, against plain loops over one row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from core_trainer.rollout.native.sampler import Options, inverse_cdf, sample
from core_trainer.types import SamplingParams


def options(rows: int, **params: object) -> Options:
    """The same options for every row."""
    each = SamplingParams(**({"max_new_tokens": 1} | params))  # type: ignore[arg-type]
    return Options.of([each] * rows, [[]] * rows, torch.device("cpu"))


def evenly(rows: int) -> Tensor:
    """Uniform numbers, evenly spread."""
    return (torch.arange(rows, dtype=torch.float64) + 0.5) / rows


def share(logits: list[float], params: SamplingParams, seen: Sequence[int] = ()) -> list[float]:
    """Probabilities that a row is drawn with, by a plain loop."""
    values = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    for i in set(seen):
        penalty = params.repetition_penalty
        values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
    weights = [math.exp(x / params.temperature) for x in values]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    if params.top_k:
        least = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    ordered, before = sorted(range(len(weights)), key=lambda i: -weights[i]), 0.0
    total = sum(weights)
    for i in ordered:
        if before >= params.top_p * total:
            weights[i] = 0.0
        else:
            before += weights[i]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_drawn_by_their_own_options(seed: int) -> None:
    """Five rows with random options each, drawn together: shares are those of a loop over one row, and log-probs those
    of the whole distribution before penalties, bias and truncation.
    """
    rng = np.random.default_rng(seed)
    size, draws = 11, 2000
    logits = rng.normal(0, 2, (5, size)).astype(np.float32)

    def some(value: object, off: object) -> object:
        return value if rng.random() < 0.5 else off

    params = [
        SamplingParams(
            1,
            temperature=float(rng.choice([0.5, 1.0, 1.7])),
            top_k=some(int(rng.integers(1, size + 3)), None),  # type: ignore[arg-type]
            top_p=some(float(rng.uniform(0.3, 0.95)), 1.0),  # type: ignore[arg-type]
            min_p=some(float(rng.uniform(0.01, 0.5)), 0.0),  # type: ignore[arg-type]
            repetition_penalty=some(float(rng.uniform(0.7, 1.8)), 1.0),  # type: ignore[arg-type]
            logit_bias=some({int(rng.integers(size)): float(rng.normal(0, 3)), 3: -100.0}, {}),  # type: ignore[arg-type]
        )
        for _ in range(5)
    ]
    params = [p if (p.top_k or 0) <= size else SamplingParams(1, p.temperature) for p in params]
    seen = [rng.integers(0, size, 4).tolist() for _ in range(5)]
    together = Options.of(
        [p for p in params for _ in range(draws)], [s for s in seen for _ in range(draws)], torch.device("cpu")
    )
    rows = torch.from_numpy(logits).repeat_interleave(draws, 0)
    found = sample(rows, evenly(draws).repeat(5), together)
    drawn = found.tokens.view(5, draws).numpy()
    for row, (p, words) in enumerate(zip(params, seen, strict=True)):
        expected = share([float(x) for x in logits[row]], p, words)
        np.testing.assert_allclose(np.bincount(drawn[row], minlength=size) / draws, expected, atol=2 / draws)
    whole = torch.log_softmax(rows / together.temperature[:, None], -1).gather(1, found.tokens[:, None])[:, 0]
    torch.testing.assert_close(found.log_probs, whole)


def test_inverse_cdf_draws_by_weight() -> None:
    """Frequencies over an even grid of uniforms equal the weights, zero weights are never drawn, any vocabulary
    size.
    """
    rng = np.random.default_rng(0)
    weights = rng.random(1000).astype(np.float32)
    weights[rng.random(1000) < 0.5] = 0
    count = 200_000
    drawn = torch.cat([inverse_cdf(torch.from_numpy(weights).expand(len(u), -1), u) for u in evenly(count).split(2000)])
    share = np.bincount(drawn.numpy(), minlength=1000) / count
    assert share[weights == 0].max() == 0
    np.testing.assert_allclose(share, weights / weights.sum(), atol=2e-5)
    edges = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    first, last = inverse_cdf(torch.from_numpy(weights).expand(2, -1), edges).tolist()
    assert (first, last) == (int(np.flatnonzero(weights)[0]), int(np.flatnonzero(weights)[-1]))


def test_greedy_takes_the_likeliest_word_after_bias() -> None:
    """Temperature 0 is argmax, with bias and penalty; its log-prob is that of temperature 1 without them."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(3, -1)
    biases: list[Mapping[int, float]] = [{}, {2: 10.0}, {0: -math.inf}]
    params = [SamplingParams(1, 0.0, logit_bias=bias) for bias in biases]
    found = sample(logits, evenly(3), Options.of(params, [[]] * 3, torch.device("cpu")))
    assert found.tokens.tolist() == [0, 2, 1]
    torch.testing.assert_close(found.log_probs.exp(), torch.tensor([0.5, 0.2, 0.3]))


def test_likeliest_words_are_reported_where_asked_for() -> None:
    """Each row its own number, likeliest first, at the temperature."""
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]))
    found = sample(logits, evenly(2), options(2, temperature=0.5), [0, 2])
    squares = 0.01 + 0.36 + 0.09
    assert found.top[0] == []
    assert [token for token, _ in found.top[1]] == [1, 2]
    np.testing.assert_allclose(
        [value for _, value in found.top[1]], np.log([0.36 / squares, 0.09 / squares]), rtol=1e-6
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_breaks_no_other(broken: float) -> None:
    """NaN or infinity among a row's logits shows in its log-prob; the row beside draws as ever."""
    logits = torch.zeros(2, 700)
    logits[0, 5] = broken
    logits[1, 699] = 50.0
    for section in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        found = sample(logits, evenly(2), options(2, **section), [1, 1])
        assert torch.isfinite(found.log_probs).tolist() == [False, True]
        assert found.tokens[1] == 699
        assert 0 <= int(found.tokens[0]) < 700


def test_impossible_words_are_no_fault() -> None:
    """A word of logit -inf is never drawn and breaks nothing."""
    logits = torch.tensor([[-math.inf, 0.0, 0.0]]).expand(100, -1)
    found = sample(logits, evenly(100), options(100))
    assert set(found.tokens.tolist()) == {1, 2}
    assert torch.isfinite(found.log_probs).all()
