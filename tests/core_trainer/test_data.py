"""Datasets become checked, tokenised prompts in a resumable order, or a one-line error naming the row."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_trainer.data import PromptSampler, load_prompts
from core_trainer.types import Prompt
from rlinsight import config
from rlinsight.config import DataSection
from rlinsight.errors import CheckpointError, ConfigError, DataError
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
ADDITION = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "operators": ["+"], "allow_parentheses": False}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def load(train: str, seed: int = 1, **options: Any) -> list[Prompt]:
    return load_prompts(DataSection(train=train, **options), TOKENIZER, seed)


def test_jsonl_row_becomes_prompt(tmp_path: Path) -> None:
    """Prompt text goes through the chat template; answer becomes text; other columns stay with the prompt."""
    train = jsonl(tmp_path / "sums.jsonl", {"prompt": "1 + 2?", "answer": 3, "level": "easy"}, "", {"prompt": "x"})
    first, second = load(train, system_prompt="Be brief.", prompt_suffix=" Now!")
    assert first.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2? Now!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(first.token_ids) == TOKENIZER.encode(first.text, add_special_tokens=False)
    assert (first.prompt_id, first.data_source, first.answer) == ("sums/0", "sums", "3")
    assert first.columns == {"level": "easy"}
    assert (second.prompt_id, second.answer) == ("sums/1", None)


def test_chat_messages_and_parquet(tmp_path: Path) -> None:
    """Messages are templated as they are: the suffix joins the last user message, their system message stays."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    table = pyarrow.table({"prompt": [messages], "gold": [2.5], "data_source": ["mine"], "tags": [["a", "b"]]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    (prompt,) = load(str(tmp_path / "d.parquet"), answer_column="gold", system_prompt="unused", prompt_suffix="!")
    assert prompt.text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU!<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.prompt_id, prompt.answer, prompt.columns) == ("mine/0", "2.5", {"tags": ["a", "b"]})


def test_no_chat_template_means_plain_text(tmp_path: Path) -> None:
    """A base model sees the prompt text alone; what needs a template is refused."""
    base = make_tokenizer()
    base.chat_template = None
    train = jsonl(tmp_path / "d.jsonl", {"prompt": "1 + 2 ="})
    (prompt,) = load_prompts(DataSection(train=train, prompt_suffix=" "), base, seed=1)
    assert prompt.text == "1 + 2 = "
    with pytest.raises(ConfigError, match="system_prompt is set, but the model has no chat template"):
        load_prompts(DataSection(train=train, system_prompt="S"), base, seed=1)
    chat = jsonl(tmp_path / "c.jsonl", {"prompt": [{"role": "user", "content": "U"}]})
    with pytest.raises(DataError, match="line 1: holds chat messages, but the model has no chat template"):
        load_prompts(DataSection(train=chat), base, seed=1)


def test_task_prompts_carry_what_the_task_scores() -> None:
    """reasoning_gym items are generated from the seed, with question and metadata as columns."""
    options: dict[str, Any] = {"task_args": ADDITION, "size": 5, "prompt_suffix": " Answer with a number."}
    prompts = load("reasoning_gym:basic_arithmetic", **options)
    assert len(prompts) == 5
    question = prompts[0].columns["question"]
    assert re.fullmatch(r"Calculate \d+ \+ \d+\.", question)
    assert f"{question} Answer with a number.<|im_end|>" in prompts[0].text
    assert prompts[0].answer == str(eval(prompts[0].columns["metadata"]["expression"]))
    assert prompts[0].prompt_id == "basic_arithmetic/0"
    assert load("reasoning_gym:basic_arithmetic", **options) == prompts
    assert load("reasoning_gym:basic_arithmetic", seed=2, **options) != prompts
    options["task_args"] = {**ADDITION, "seed": 1}
    assert load("reasoning_gym:basic_arithmetic", seed=2, **options) == prompts


@pytest.mark.parametrize(
    ("train", "task_args", "message"),
    [
        ("basic_arithmetics", {}, "has no task 'basic_arithmetics'; did you mean 'basic_arithmetic'?"),
        ("chain_sum", {"max_digit": 1}, "task_args.max_digit: task chain_sum has no such argument; did you mean 'max_"),
        ("chain_sum", {"min_terms": "few"}, "data.task_args.min_terms='few': input should be a valid integer"),
        ("basic_arithmetic", {"format_style": "odd"}, "task_args.format_style='odd': input should be 'simple' or 'nat"),
        ("chain_sum", {"max_terms": 1}, "do not work with reasoning_gym:chain_sum: max_terms must be >= min_terms"),
        ("chain_sum", {"size": 3}, "data.task_args.size=3: set data.size instead"),
    ],
)
def test_task_errors_name_the_argument(train: str, task_args: dict[str, Any], message: str) -> None:
    """A wrong task, argument or value is one line that names it."""
    with pytest.raises(ConfigError) as caught:
        load(f"reasoning_gym:{train}", task_args=task_args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_task_argument_with_a_wrong_hint_is_let_through() -> None:
    """rearc hints int for a float argument: the hint, which its own default breaks, refuses nothing."""
    assert load("reasoning_gym:rearc", task_args={"diff_ub": 0.3}, size=1, max_prompt_tokens=100_000)


GOOD = {"prompt": "fine", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "d.jsonl holds no prompts"),
        ([GOOD, "{not json"], "d.jsonl line 2 is not valid JSON"),
        ([GOOD, "", [1, 2]], "d.jsonl line 3 holds list, not an object"),
        ([GOOD, {"promt": "x"}], "d.jsonl line 2: no column 'prompt' (data.prompt_column); did you mean 'promt'?"),
        ([{"prompt": 3}], "line 1: 'prompt' is int; give text or a list of messages"),
        ([{"prompt": None}], "line 1: 'prompt' is NoneType"),
        ([{"prompt": "  "}], "line 1: 'prompt' is empty"),
        ([{"prompt": []}], "line 1: 'prompt' is an empty list"),
        ([{"prompt": [{"role": "user"}]}], "line 1: message 0 of 'prompt' is not an object with text 'role'"),
        ([{"prompt": [{"role": "assistant", "content": "hi"}]}], "line 1: 'prompt' ends with an assistant message"),
        ([{"prompt": "x", "answer": [1]}], "line 1: 'answer' is list; give text or a number"),
        ([{"prompt": "x", "answer": True}], "line 1: 'answer' is bool"),
        ([{"prompt": "x", "data_source": 1}], "line 1: 'data_source' is int"),
        ([GOOD, {"prompt": "word " * 99}], "line 2: prompt has"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    """A row that cannot be trained on stops the run with its file, line and fix."""
    with pytest.raises(DataError) as caught:
        load(jsonl(tmp_path / "d.jsonl", *rows), max_prompt_tokens=60)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_named_answer_column_must_exist(tmp_path: Path) -> None:
    """A dataset may have no answers, but an answer column the config names must be there."""
    train = jsonl(tmp_path / "d.jsonl", {"prompt": "x", "solution": "1"})
    with pytest.raises(DataError, match=r"no column 'solutoin' \(data.answer_column\); did you mean 'solution'"):
        load(train, answer_column="solutoin")


def test_bad_files_are_named(tmp_path: Path) -> None:
    """A missing, foreign or damaged file is one line."""
    with pytest.raises(DataError, match=r"none.jsonl does not exist"):
        load(str(tmp_path / "none.jsonl"))
    (tmp_path / "d.csv").write_text("prompt\n")
    with pytest.raises(DataError, match=r"d.csv is neither .jsonl nor .parquet"):
        load(str(tmp_path / "d.csv"))
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"d.parquet cannot be read as Parquet"):
        load(str(tmp_path / "d.parquet"))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.jsonl is not UTF-8 text after line 0"):
        load(str(tmp_path / "latin.jsonl"))


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """overlong_prompts: drop keeps the rest with their ids and says how many went; none left is an error."""
    train = jsonl(tmp_path / "d.jsonl", {"prompt": "word " * 99}, GOOD)
    with caplog.at_level(logging.WARNING):
        (kept,) = load(train, max_prompt_tokens=60, overlong_prompts="drop")
    assert kept.prompt_id == "d/1"
    assert "dropped 1 of 2 prompts over data.max_prompt_tokens=60" in caplog.text
    with pytest.raises(DataError, match=r"all 1 prompts of .* are over data.max_prompt_tokens=60"):
        load(train, max_prompt_tokens=60, overlong_prompts="drop", size=1)


def test_columns_of_generated_tasks_cannot_be_renamed() -> None:
    """prompt_column would do nothing for a task, so it is refused."""
    tree = {
        "model": {"source": "m"},
        "data": {"train": "reasoning_gym:chain_sum", "prompt_column": "q"},
        "reward": {"functions": [{"type": "numeric"}]},
    }
    with pytest.raises(ConfigError, match="prompt_column has no effect with reasoning_gym:chain_sum"):
        config.parse(tree)


def numbered(count: int) -> list[Prompt]:
    return [Prompt(f"d/{i}", "d", f"text {i}", (i,), None) for i in range(count)]


@given(
    count=st.integers(1, 30),
    per_step=st.integers(1, 30),
    before=st.integers(0, 12),
    after=st.integers(1, 12),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_sampler_resumes_the_same_stream(
    count: int, per_step: int, before: int, after: int, seed: int, shuffle: bool
) -> None:
    """Stopping after any step and resuming from its (JSON) state gives the stream of an uninterrupted run."""
    per_step = min(per_step, count)
    whole = PromptSampler(numbered(count), per_step, seed, shuffle)
    stream = [whole.next_step() for _ in range(before + after)]
    first = PromptSampler(numbered(count), per_step, seed, shuffle)
    for _ in range(before):
        first.next_step()
    resumed = PromptSampler(numbered(count), per_step, seed, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [resumed.next_step() for _ in range(after)] == stream[before:]


@given(count=st.integers(1, 20), per_step=st.integers(1, 20), seed=st.integers(0, 5))
def test_every_epoch_visits_every_prompt_once(count: int, per_step: int, seed: int) -> None:
    """The stream, cut into epochs, is one permutation after another, whatever the step size."""
    per_step = min(per_step, count)
    sampler = PromptSampler(numbered(count), per_step, seed, shuffle=True)
    drawn = [prompt.prompt_id for _ in range(3 * count) for prompt in sampler.next_step()]
    for epoch in range(3):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == sorted(p.prompt_id for p in numbered(count))


def test_epochs_and_seeds_differ_and_unshuffled_keeps_order() -> None:
    """Each epoch and each seed has its own order; shuffle: false keeps the file's."""

    def epochs(seed: int, shuffle: bool) -> list[list[str]]:
        sampler = PromptSampler(numbered(20), 20, seed, shuffle)
        return [[prompt.prompt_id for prompt in sampler.next_step()] for _ in range(2)]

    first, second = epochs(1, True)
    assert first != second
    assert epochs(2, True)[0] != first
    assert epochs(1, False) == [[p.prompt_id for p in numbered(20)]] * 2


def test_sampler_refuses_other_data_and_small_data() -> None:
    """A position in other data means nothing; fewer prompts than a step takes is an error, not a repeat."""
    state = PromptSampler(numbered(4), 2, 1, True).state_dict()
    with pytest.raises(CheckpointError, match="position is in other data"):
        PromptSampler(numbered(5), 2, 1, True).load_state_dict(state)
    with pytest.raises(CheckpointError, match="position is in other data"):
        PromptSampler(numbered(4), 2, 7, True).load_state_dict(state)
    for change in ({"answer": "other"}, {"token_ids": (9,)}):
        changed = [replace(prompt, **change) for prompt in numbered(4)]
        with pytest.raises(CheckpointError, match="position is in other data"):
            PromptSampler(changed, 2, 1, True).load_state_dict(state)
    with pytest.raises(DataError, match=r"has 4 prompts, fewer than trainer.prompts_per_step=8"):
        PromptSampler(numbered(4), 8, 1, True)
