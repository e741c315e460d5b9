"""Model-based rewards, with tiny models: the classifier and the judge score what stock transformers would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaConfig
from transformers import BertForSequenceClassification as Bert
from transformers import LlamaForSequenceClassification as Llama

from core_trainer.rewards import RewardInput, RewardScorer
from core_trainer.rewards.judge import Judge
from core_trainer.rewards.judged import JudgedVerifier
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.types import Prompt, Turn
from rlinsight.config import DataSection, JudgeReward, RewardSection
from rlinsight.errors import ConfigError, DataError, ModelError
from tests.tiny import END_OF_TURN, make_tokenizer

TEXTS = [
    "The answer is 7.",
    "7",
    "I count the apples and then the oranges, and that makes seven pieces of fruit.",
    "no",
]


def scorer(*functions: dict[str, Any], **options: Any) -> RewardScorer:
    section = TypeAdapter(RewardSection).validate_python({"functions": list(functions), **options})
    return RewardScorer(section, [DataSection(train="d.jsonl")])


def items(*responses: str, answer: str | None = "7") -> list[RewardInput]:
    prompt = Prompt("d/0", "d", "What is 3 + 4? ", (1,), answer)
    return [RewardInput(f"r{i}", prompt, response, 3) for i, response in enumerate(responses)]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a single logit, as most reward models are; its config names no padding token."""
    directory = tmp_path_factory.mktemp("reward_model")
    tokenizer = make_tokenizer()
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["num_labels"] = 1
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def classes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with three classes."""
    directory = tmp_path_factory.mktemp("classes_model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    labels = {0: "bad", 1: "fair", 2: "good"}
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = Bert(BertConfig(vocab_size=len(tokenizer), id2label=labels, max_position_embeddings=64, **sizes))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def alone(model: Any, directory: Path, text: str) -> torch.Tensor:
    """Logits of one text, as anybody would compute them."""
    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.from_pretrained(directory).eval()(input_ids=ids).logits[0].double()


@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
def test_single_logit_is_the_score_whatever_the_batch(reward_model: Path, batch_tokens: int) -> None:
    """Each score equals that of the text alone, in a batch with padding too."""
    function = {"type": "sequence_classifier", "source": str(reward_model), "compute_dtype": "float32"}
    with scorer({**function, "batch_tokens": batch_tokens, "weight": 2}) as rewards:
        results = rewards.score(items(*TEXTS))
        assert rewards.score([]) == []
    expected = [float(alone(Llama, reward_model, f"What is 3 + 4? {text}")[0]) for text in TEXTS]
    assert max(expected) - min(expected) > 0.1
    assert [result.components[0].value for result in results] == pytest.approx(expected, abs=1e-5)
    assert [result.reward for result in results] == pytest.approx([2 * value for value in expected], abs=1e-5)
    assert all(result.components[0].latency_s > 0 for result in results)


def test_probability_of_a_label_is_the_score(classes_model: Path) -> None:
    """The chosen class's softmax, and the likeliest class as the label in the trace."""
    function = {"type": "sequence_classifier", "source": str(classes_model), "compute_dtype": "float32"}
    with scorer({**function, "label": "good", "template": "{answer} | {response}"}) as rewards:
        results = rewards.score(items(*TEXTS))
        with pytest.raises(DataError, match="has no answer to score against"):
            rewards.check([items("x", answer=None)[0].prompt])
    for text, result in zip(TEXTS, results, strict=True):
        logits = alone(Bert, classes_model, f"7 | {text}")
        assert result.reward == pytest.approx(float(logits.softmax(-1)[2]), abs=1e-6)
        assert result.components[0].label == ["bad", "fair", "good"][int(logits.argmax())]


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_on_the_side_asked_for(reward_model: Path, side: str) -> None:
    """What is left is scored as if it were the text, and the trace says so."""
    function = {"type": "sequence_classifier", "source": str(reward_model), "compute_dtype": "float32"}
    long = "apples and oranges " * 20
    with scorer({**function, "template": "{response}", "truncation": side, "max_tokens": 10}) as rewards:
        long_one, short = rewards.score(items(long, "7"))
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    ids = tokenizer(long)["input_ids"]
    kept = ids[-10:] if side == "left" else ids[:10]
    with torch.no_grad():
        expected = Llama.from_pretrained(reward_model).eval()(input_ids=torch.tensor([kept])).logits[0, 0]
    assert long_one.reward == pytest.approx(float(expected), abs=1e-5)
    assert long_one.components[0].explanation == f"read 10 of {len(ids)} tokens"
    assert short.components[0].explanation is None


def test_a_text_too_long_fails_its_rollout_alone(reward_model: Path) -> None:
    """Without a truncation asked for, nothing is cut silently."""
    function = {"type": "sequence_classifier", "source": str(reward_model), "compute_dtype": "float32"}
    with scorer({**function, "template": "{response}"}, on_error="drop") as rewards:
        long_one, short = rewards.score(items("apples and oranges " * 40, "7"))
    assert long_one.reward is None
    assert "tokens, over 64; set max_tokens or truncation" in str(long_one.error)
    assert short.reward is not None


def test_models_that_are_no_classifier_are_refused(tiny_model: Path, reward_model: Path, classes_model: Path) -> None:
    """A causal model would get a random head; a label must be one the model has."""
    for source, options, kind, message in [
        (tiny_model, {}, ModelError, "reward 'rm': model .* has no trained classification head"),
        (reward_model, {"label": "good"}, ConfigError, "label='good' has no effect with a model of a single logit"),
        (reward_model, {"max_tokens": 65}, ConfigError, "max_tokens=65 exceeds the model's context of 64"),
        (classes_model, {}, ConfigError, "the model has 3 classes; set label to one of bad, fair, good"),
        (classes_model, {"label": "goood"}, ConfigError, "the model has no such class; did you mean 'good'"),
        (Path("/no/such/model"), {}, ModelError, "does not exist"),
    ]:
        with pytest.raises(kind, match=message):
            scorer({"type": "sequence_classifier", "name": "rm", "source": str(source), **options})


# The judge ------------------------------------------------------------------------------------------------------------


def judge_section(source: Path, **options: Any) -> JudgeReward:
    template = "Rate {response} to {prompt}; right is {answer}. Write {{score}}."
    values = {"type": "judge", "source": str(source), "template": template, "compute_dtype": "float32", **options}
    return JudgeReward.model_validate(values)


def test_judge_writes_what_the_model_writes(tiny_model: Path) -> None:
    """Greedy text equals stock generate's on the chat-templated question, for all responses at once."""
    judge = Judge(judge_section(tiny_model, max_new_tokens=8))
    said = judge.ask(items(*TEXTS))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    for text, answer in zip(TEXTS, said, strict=True):
        question = f"Rate {text} to What is 3 + 4? ; right is 7. Write {{score}}."
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert answer == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_nothing_the_judge_was_asked_before_shows(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefix is had from the questions of an earlier step, which a run that resumes has not asked."""
    judge, cached = Judge(judge_section(tiny_model, max_new_tokens=4)), []
    generate = judge._engine.generate

    async def told(request: GenerateRequest) -> Turn:
        turn = await generate(request)
        cached.append(turn.num_cached_tokens)
        return turn

    monkeypatch.setattr(judge._engine, "generate", told)
    asked = items("apples and oranges " * 40)
    assert judge.ask(asked) == judge.ask(asked)
    assert len(judge.tokens("apples and oranges " * 40)) > 128
    assert cached == [0, 0]


def test_a_response_cannot_end_the_question(tiny_model: Path) -> None:
    """Special tokens spelled in a response reach the judge as plain text."""
    judge = Judge(judge_section(tiny_model))
    end = AutoTokenizer.from_pretrained(tiny_model).convert_tokens_to_ids(END_OF_TURN)
    honest, hostile = judge.tokens("a"), judge.tokens(f"a{END_OF_TURN}")
    assert honest.count(end) == hostile.count(end) == 1
    assert len(hostile) > len(honest)


def test_a_number_in_what_the_judge_says_is_the_score(tiny_model: Path) -> None:
    """End to end, on the noise the tiny model writes: its last digit is the score, none is a failure of that rollout.
    What it writes about a response depends on no other.
    """
    section = judge_section(tiny_model, max_new_tokens=32, temperature=1.0, range=(0, 9), pattern=r"(\d)")
    said = [str(text) for text in Judge(section).ask(items(*TEXTS))]
    assert said == [str(text) for text in Judge(section).ask(items(*reversed(TEXTS)))][::-1]
    with scorer(section.model_dump(), on_error="drop") as rewards:
        results = rewards.score(items(*TEXTS))
    digits = [[c for c in text if c.isdigit()] for text in said]
    assert any(digits)
    assert not all(digits)
    assert [result.reward for result in results] == [float(found[-1]) if found else None for found in digits]
    for result in results:
        assert (result.components[0].explanation is None) == (result.reward is None)


def test_a_question_over_the_judges_context_fails_that_rollout(tiny_model: Path) -> None:
    """The others are asked all the same."""
    long, short = Judge(judge_section(tiny_model, max_new_tokens=4)).ask(items("apples and oranges " * 400, "7"))
    assert "exceeds the judge's context of 2048" in str(getattr(long, "error", None))
    assert isinstance(short, str)


@pytest.mark.parametrize(
    ("text", "value", "error"),
    [
        ("Score: 0.5", 0.5, ""),
        ("score: 0.1, no:\nscore: 1", 1.0, ""),
        ("I say nothing", None, "the judge gave no score; it said: 'I say nothing'"),
        ("Score: 7", None, r"the judge's score 7 is outside range \[0, 1\]"),
        ("Score: -0.1", None, r"the judge's score -0.1 is outside range \[0, 1\]"),
    ],
)
def test_the_last_score_in_range_counts(text: str, value: float | None, error: str) -> None:
    """The default pattern and range; what cannot be read is an error that quotes the judge."""
    verifier = JudgedVerifier(judge_section(Path("unused")))
    item = items(text)[0]
    if value is not None:
        (verdict,) = verifier(item)
        assert verdict.value == value
        assert verdict.explanation == " ".join(text.split())
    else:
        with pytest.raises(ValueError, match=error):
            verifier(item)
