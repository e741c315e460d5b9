"""A check of a model finds what is wrong with it, part by part, and says by how much."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from core_trainer import attention, check_model, models
from core_trainer.check_model import Loaded, check_engine, check_training, prompt_texts
from core_trainer.checks import (
    TOLERANCE,
    Answer,
    Divergence,
    Latency,
    Report,
    Spec,
    Timing,
    compare,
    gaps,
    judge,
    latency,
)
from rlinsight import names
from rlinsight.errors import EngineError
from tests.tiny import make_tokenizer

LATENCY_KEYS = list(names.CHECK_LATENCY)
SPEC = Spec("unused", "float32", num_prompts=6, new_tokens=8, concurrency=[1, 3])


def quiet(_text: str) -> None:
    """Progress that nobody reads."""


def answer(token_ids: list[int], leads: list[float] | None = None) -> Answer:
    """Log-prob -0.1 for every token."""
    return Answer([1], token_ids, [-0.1] * len(token_ids), leads or [1.0] * len(token_ids))


# Numbers -------------------------------------------------------------------------------------------------------------


def test_equal_tokens_are_parity() -> None:
    """All prompts alike: 1 and no divergence."""
    assert compare([answer([1, 2]), answer([3])], [([1, 2], [0.0, 0.0]), ([3], [0.0])]) == (1.0, None)


def test_the_divergence_told_is_the_one_rounding_explains_least() -> None:
    """Of two prompts that part, that with the larger lead; the share counts both."""
    expected = [answer([1, 2, 3], [1, 1e-6, 1]), answer([4, 5]), answer([6, 7, 8], [1, 1, 0.5]), answer([9])]
    found = [([1, 7, 9], [-1.0, -2.0, -3.0]), ([4, 5], [0.0, 0.0]), ([6, 7, 1], [-1.0, -2.0, -3.0]), ([9], [0.0])]
    share, parted = compare(expected, found)
    assert share == 0.5
    assert parted == Divergence(2, 2, 8, 1, -0.1, -3.0, 0.5)


@pytest.mark.parametrize(("found", "ids"), [([1], (2, None)), ([1, 2, 3], (None, 3))])
def test_an_end_too_early_or_too_late_is_a_divergence(found: list[int], ids: tuple[int | None, int | None]) -> None:
    """It has one token, no lead, and counts before every near-tie."""
    share, parted = compare([answer([1, 2]), answer([5], [1e-9])], [(found, [-1.0] * len(found)), ([6], [-1.0])])
    assert parted is not None
    assert (share, parted.prompt, (parted.expected_id, parted.found_id), parted.lead) == (0.0, 0, ids, None)


def test_gaps_are_those_of_every_token() -> None:
    """Largest, mean and number over ragged rows; a number that is none makes both infinite."""
    largest, mean, count = gaps([[-1.0], [-2.0, -3.0]], [[-1.25], [-2.0, -2.5]])
    assert (largest, mean, count) == (0.5, 0.25, 3)
    for wrong in (float("nan"), float("-inf")):
        assert gaps([[-1.0, -1.0]], [[-1.0, wrong]])[:2] == (float("inf"), float("inf"))
        assert gaps([[wrong]], [[wrong]])[0] == float("inf")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_passes_and_what_does_not(dtype: str) -> None:
    """Gaps and leads up to the tolerance are rounding; above it, and where one of the two had ended, they are not."""
    tolerance = TOLERANCE[dtype]

    def judged(gap: float, lead: float | None = 0.0, parity: float = 0.75) -> Report:
        parted = None if parity == 1 else Divergence(1, 5, 8, None if lead is None else 9, -0.1, -0.2, lead)
        report = Report("native", "failed", dtype=dtype, num_prompts=4, parity=parity, divergence=parted)
        report.max_log_prob_gap = gap
        judge(report)
        return report

    assert (judged(0.0, parity=1).status, judged(0.0, parity=1).reason) == ("ok", None)
    assert "greedy tokens of 1 prompts part" in str(judged(tolerance, tolerance).reason)
    assert judged(tolerance, tolerance).status == "ok"
    assert "log-prob is" in str(judged(1.01 * tolerance).reason)
    assert "another greedy token at 5" in str(judged(0.0, 1.01 * tolerance).reason)
    assert "native ends at token 5" in str(judged(0.0, None).reason)
    assert {judged(*bad).status for bad in ((1.01 * tolerance,), (0.0, 1.01 * tolerance), (0.0, None))} == {"mismatch"}
    assert judged(float("inf"), parity=1).status == "mismatch"


def test_nothing_to_compare_with_is_no_pass() -> None:
    """Without transformers' answers and training's log-probs an engine is not checked; one of the two is enough."""
    for parity, gap, status in ((None, None, "failed"), (1.0, None, "ok"), (None, 0.0, "ok")):
        report = Report("vllm", "failed", dtype="float32", num_prompts=4, parity=parity, max_log_prob_gap=gap)
        judge(report)
        assert report.status == status
        assert ("nothing to compare it with: the training part brought no answers" in str(report.reason)) == (
            status == "failed"
        )


def test_latency_is_what_callers_waited() -> None:
    """Two requests by hand: one of four tokens in three chunks, one of a single token; one that brought none."""
    timings = [Timing(10.0, [10.5, 10.7, 11.1], [1, 1, 2]), Timing(10.0, [11.5], [1]), Timing(12.0, [], [])]
    step = latency(2, timings, wall_s=2.0)
    assert (step.concurrency, step.num_requests, step.output_tokens, step.tokens_per_s) == (2, 3, 5, 2.5)
    assert list(step.seconds) == LATENCY_KEYS
    assert step.seconds["ttft_p50_s"] == pytest.approx(1.0)  # between 0.5 and 1.5
    assert step.seconds["ttft_p90_s"] == pytest.approx(1.4)
    assert step.seconds["tpot_p50_s"] == pytest.approx(0.2)  # (11.1 - 10.5) / 3; the other has no further token
    assert step.seconds["inter_token_p50_s"] == pytest.approx(0.2)  # 0.2, and 0.4 shared by two tokens
    assert step.seconds["inter_token_p99_s"] == pytest.approx(0.2)
    assert latency(1, [Timing(0.0, [1.0], [1])], 1.0).seconds["tpot_p50_s"] is None


def test_what_travels_comes_back_equal() -> None:
    """Spec and report survive JSON, with everything they can hold."""
    spec = Spec("m", "auto", 1, 2, [1, 4], "native", [answer([1, 2])])
    assert Spec.parse(json.loads(json.dumps(asdict(spec)))) == spec
    report = Report("native", "ok", divergence=Divergence(0, 1, 2, None, -0.5, None, None, "a", None))
    report.latency = [Latency(1, 8, 20, 3.5, dict.fromkeys(LATENCY_KEYS))]
    assert Report.parse(json.loads(json.dumps(asdict(report)))) == report


def test_prompts_differ_and_are_of_mixed_lengths() -> None:
    """No two alike, always the same, from one line to more than ten times that."""
    texts = prompt_texts(200)
    assert len(set(texts)) == 200
    assert texts == prompt_texts(200)
    lengths = sorted(map(len, texts))
    assert lengths[-1] > 10 * lengths[0]


# The tiny model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Answer]:
    """Transformers' answers."""
    report, answers = check_training(SPEC, tiny_model, quiet)
    assert (report.status, report.reason) == ("ok", None)
    assert (report.architecture, report.dtype, report.num_prompts) == ("LlamaForCausalLM", "float32", 6)
    assert report.num_tokens == sum(len(a.token_ids) for a in answers or [])
    assert report.max_log_prob_gap is not None
    assert report.max_log_prob_gap < 1e-4
    assert answers is not None
    return answers


def spec_for(engine: str, reference: list[Answer] | None) -> Spec:
    return Spec("unused", "float32", 6, 8, [3], engine, reference)


def test_transformers_answers_are_its_most_likely_tokens(tiny_model: Path, reference: list[Answer]) -> None:
    """A naive loop of whole forward passes writes the same tokens, with those log-probs and leads."""
    model = models.load_model(tiny_model, torch.float32)
    ids = list(reference[1].prompt)
    with torch.no_grad():
        for token, log_prob, lead in zip(
            reference[1].token_ids, reference[1].log_probs, reference[1].leads, strict=True
        ):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            (first, second), (best, _) = (x.tolist() for x in row.topk(2))
            assert token == best
            assert log_prob == pytest.approx(first, abs=1e-5)
            assert lead == pytest.approx(first - second, abs=1e-5)
            ids.append(token)


def test_the_native_engine_passes(tiny_model: Path, reference: list[Answer]) -> None:
    """Parity on every prompt, the trainer's log-probs on greedy and sampled tokens, and a whole ladder."""
    report = check_engine(Spec("unused", "float32", 6, 8, [1, 3], "native", reference), tiny_model, quiet)
    assert (report.status, report.reason, report.parity) == ("ok", None, 1.0)
    assert report.max_log_prob_gap is not None
    assert report.max_log_prob_gap < 1e-4
    greedy = sum(len(a.token_ids) for a in reference)
    assert report.num_tokens is not None
    assert greedy < report.num_tokens <= 2 * 6 * 8
    assert report.tokens_per_s is not None
    assert report.tokens_per_s > 0
    assert [(step.concurrency, step.num_requests) for step in report.latency] == [(1, 8), (3, 12)]
    for step in report.latency:
        assert step.num_requests <= step.output_tokens <= 8 * step.num_requests
        seconds = [step.seconds[key] for key in LATENCY_KEYS]
        assert all(value is not None and value > 0 for value in seconds), step
        assert seconds == [x for i in (0, 3, 6) for x in sorted(seconds[i : i + 3])]  # type: ignore[type-var]


def test_without_a_reference_the_engine_is_checked_against_training(tiny_model: Path) -> None:
    """Parity is unknown, not 0."""
    report = check_engine(spec_for("native", None), tiny_model, quiet)
    assert (report.status, report.parity, report.divergence) == ("ok", None, None)
    assert report.max_log_prob_gap is not None


def test_the_ladder_asks_nothing_twice(
    tiny_model: Path, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts are its own, one a request: neither an equal one nor a shared beginning is in the cache."""
    real, engines, room = check_model.start, [], []

    def start(spec: Spec, loaded: Loaded, longest: int) -> Any:
        engine = real(spec, loaded, longest)
        stream = engine.stream

        def noted(request: Any) -> Any:
            room.append(longest - len(request.prompt_token_ids))
            return stream(request)

        monkeypatch.setattr(engine, "stream", noted)
        engines.append(engine)
        return engine

    monkeypatch.setattr(check_model, "start", start)
    report = check_engine(Spec("unused", "float32", 6, 8, [3, 1], "native", reference[:2]), tiny_model, quiet)
    assert report.status == "ok"
    assert len(room) == 12 + 8
    assert min(room) == 0
    (engine,) = engines
    assert engine.scheduler.prefix_queries > 0
    assert engine.scheduler.prefix_hits == 0


def altered(scale: float) -> Any:
    """An engine that serves other weights than the trainer has."""
    real = check_model.start

    def start(spec: Spec, loaded: Loaded, longest: int) -> Any:
        other = Loaded(spec, loaded.directory)
        with torch.no_grad():
            other.model.get_decoder().norm.weight.mul_(scale)
        attention.enable(other.model)
        return real(spec, other, longest)

    return start


def test_other_weights_are_a_mismatch(
    tiny_model: Path, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with one weight off is caught by log-probs; the first other token is told with both pieces."""
    monkeypatch.setattr(check_model, "start", altered(-1.0))
    report = check_engine(spec_for("native", reference), tiny_model, quiet)
    assert report.status == "mismatch"
    assert "off training's; rounding in float32 explains 0.001" in str(report.reason)
    assert report.parity is not None
    assert report.parity < 1
    parted = report.divergence
    assert parted is not None
    expected = reference[parted.prompt]
    assert parted.expected_id == expected.token_ids[parted.position]
    assert parted.expected_log_prob == expected.log_probs[parted.position]
    tokenizer = make_tokenizer()
    assert parted.expected_piece == tokenizer.decode([parted.expected_id])
    assert parted.found_piece == tokenizer.decode([parted.found_id])
    assert parted.found_piece != parted.expected_piece


def test_a_slightly_wrong_engine_is_a_mismatch_in_log_probs(
    tiny_model: Path, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights 5% off that leave every greedy token as it is do not pass."""
    monkeypatch.setattr(check_model, "start", altered(1.05))
    report = check_engine(spec_for("native", reference), tiny_model, quiet)
    assert report.status == "mismatch"
    assert "log-prob" in str(report.reason)


def test_an_engine_that_fails_while_it_samples_says_so(
    tiny_model: Path, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before stays, and the engine is closed."""
    real, closed = check_model.start, []

    def start(spec: Spec, loaded: Loaded, longest: int) -> Any:
        engine = real(spec, loaded, longest)
        generate, close = engine.generate, engine.close

        async def breaks(request: Any) -> Any:
            if request.request_id.startswith("sampled"):
                raise EngineError(f"logits of request {request.request_id} are not finite")
            return await generate(request)

        monkeypatch.setattr(engine, "generate", breaks)
        monkeypatch.setattr(engine, "close", lambda: (closed.append(True), close()))
        return engine

    monkeypatch.setattr(check_model, "start", start)
    report = check_engine(spec_for("native", reference), tiny_model, quiet)
    assert (report.status, report.parity, report.max_log_prob_gap) == ("failed", 1.0, None)
    assert "logits of request sampled-" in str(report.reason)
    assert closed == [True]


def test_a_gradient_that_is_not_finite_fails_training(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward may be right and the backward not: the parameter is named."""
    enable = attention.enable

    def poisoned(model: Any) -> None:
        enable(model)
        weight = model.get_decoder().layers[1].mlp.up_proj.weight
        weight.register_hook(lambda gradient: gradient * float("nan"))

    monkeypatch.setattr(attention, "enable", poisoned)
    report, answers = check_training(SPEC, tiny_model, quiet)
    assert report.status == "failed"
    assert "gradient of model.layers.1.mlp.up_proj.weight is not finite" in str(report.reason)
    assert answers is not None


def test_a_library_that_fails_is_named_with_its_place(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type, text and where in the code, in one line: nobody sees what the part's process prints."""

    def breaks(_model: Any) -> None:
        raise ValueError("no such\nlayer")

    monkeypatch.setattr(attention, "enable", breaks)
    for report in (
        check_training(SPEC, tiny_model, quiet)[0],
        check_engine(spec_for("native", None), tiny_model, quiet),
    ):
        assert report.status == "failed"
        assert re.fullmatch(r"ValueError: no such layer \(test_check_model\.py:\d+\)", str(report.reason))


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention training does not compute."""
    directory = tmp_path_factory.mktemp("sliding")
    tokenizer = make_tokenizer()
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MistralForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_a_refused_architecture_says_why_and_leaves_the_reference(sliding: Path) -> None:
    """Training and the native engine refuse by name; transformers' answers are there for other engines."""
    report, answers = check_training(SPEC, sliding, quiet)
    assert (report.status, report.architecture) == ("refused", "MistralForCausalLM")
    assert "sliding window attention" in str(report.reason)
    assert len(answers or []) == 6
    report = check_engine(spec_for("native", answers), sliding, quiet)
    assert report.status == "refused"
    assert "sliding window attention" in str(report.reason)


def test_prompts_keep_to_the_context(tiny_model: Path) -> None:
    """What is too long is cut; no room at all is refused with the option's name."""
    tokenizer = models.load_tokenizer(tiny_model)
    whole = check_model.make_prompts(tokenizer, 8, 16, None)
    cut = check_model.make_prompts(tokenizer, 8, 16, 48)
    assert max(map(len, whole)) > 32
    assert [len(prompt) for prompt in cut] == [min(len(prompt), 32) for prompt in whole]
    assert all(a == b[:32] for a, b in zip(cut, whole, strict=True))
    assert len(set(map(tuple, cut))) == 8
    with pytest.raises(Exception, match="--new-tokens 16 leaves no room"):
        check_model.make_prompts(tokenizer, 8, 16, 16)
