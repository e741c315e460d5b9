"""Prompts: from files or generated tasks to token ids, and the order in which steps draw them.

Owns: reading JSONL and Parquet, checking every row, the chat template, the resumable sampler.
Does not own: generated tasks (tasks.py), the tokenizer (given), rewards (they read ``Prompt.answer`` and
``Prompt.columns``). Needs no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import random
from array import array
from collections.abc import Iterator
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_trainer import tasks
from core_trainer.types import Prompt
from rlinsight.config import DataSection
from rlinsight.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TOKENIZE_ROWS = 1024  # rows tokenised per call: the fast tokenizer works in parallel inside one call


def load_prompts(section: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Prompt]:
    """All prompts of ``section``, checked, templated and tokenised, in file order.

    ``seed`` seeds generated tasks unless ``task_args`` has one. Raises DataError naming file and row, or ConfigError.
    """
    if section.system_prompt is not None and not tokenizer.chat_template:
        raise ConfigError("data.system_prompt is set, but the model has no chat template to put it in; remove it")
    rows = itertools.islice(_rows(section, seed), section.size)
    prompts: list[Prompt] = []
    num_rows = 0
    while chunk := list(itertools.islice(rows, _TOKENIZE_ROWS)):
        texts = [_render(row, where, section, tokenizer) for where, row in chunk]
        # The chat template writes its own special tokens; plain text gets the tokenizer's (a BOS, for most).
        encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
        for (where, row), text, token_ids in zip(chunk, texts, encoded, strict=True):
            if _fits(len(token_ids), where, section):
                prompts.append(_prompt(row, where, num_rows, text, token_ids, section))
            num_rows += 1
    if not num_rows:
        raise DataError(f"{section.train} holds no prompts; give it at least one row")
    if not prompts:
        raise DataError(
            f"all {num_rows} prompts of {section.train} are over data.max_prompt_tokens={section.max_prompt_tokens}; "
            "raise it"
        )
    if len(prompts) < num_rows:
        dropped = num_rows - len(prompts)
        logger.warning(
            "dropped %d of %d prompts over data.max_prompt_tokens=%d", dropped, num_rows, section.max_prompt_tokens
        )
    return prompts


# Rows: (where, row), ``where`` being what an error calls the row ------------------------------------------------------


def _rows(section: DataSection, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if section.train.startswith(tasks.PREFIX):
        return tasks.rows(section, seed)
    path = Path(section.train).expanduser()
    if not path.exists():
        raise DataError(f"data.train: {path} does not exist; give a .jsonl or .parquet file, or reasoning_gym:<task>")
    if path.suffix in (".jsonl", ".ndjson"):
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise DataError(f"data.train: {path} is neither .jsonl nor .parquet; convert it to one of them")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{where} is not valid JSON: {error}; write one object per line") from None
                if not isinstance(row, dict):
                    raise DataError(f"{where} holds {type(row).__name__}, not an object; write one object per line")
                yield where, row
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text after line {number}; convert it to UTF-8") from None
    except OSError as error:
        raise DataError(f"data.train: {path} cannot be read: {error.strerror}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_TOKENIZE_ROWS)
            for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
                yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None


# One row to one prompt ------------------------------------------------------------------------------------------------


def _render(row: dict[str, Any], where: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text the model continues."""
    value = _column(row, where, "prompt_column", section.prompt_column)
    if isinstance(value, str):
        if not (value + section.prompt_suffix).strip():
            raise DataError(f"{where}: {section.prompt_column!r} is empty; remove the row")
        if not tokenizer.chat_template:
            return value + section.prompt_suffix
        messages = [{"role": "user", "content": value}]
    else:
        messages = _messages(value, where, section.prompt_column)
        if not tokenizer.chat_template:
            raise DataError(
                f"{where}: holds chat messages, but the model has no chat template; give plain text prompts"
            )
    if section.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": section.system_prompt})
    if section.prompt_suffix:
        asked = [message for message in messages if message["role"] == "user"]
        if not asked:
            raise DataError(f"{where}: has no user message for data.prompt_suffix; add one or remove prompt_suffix")
        asked[-1]["content"] += section.prompt_suffix

    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise DataError(f"{where}: refused by the model's chat template: {error}; change the messages") from None


def _messages(value: Any, where: str, column: str) -> list[dict[str, str]]:
    """A copy of the row's chat messages, checked to be what a template can render and a model can answer."""
    if not isinstance(value, list):
        raise DataError(f"{where}: {column!r} is {type(value).__name__}; give text or a list of messages")
    if not value:
        raise DataError(f"{where}: {column!r} is an empty list of messages; remove the row")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: message {i} of {column!r} is not an object with text 'role' and 'content'")
    if value[-1]["role"] == "assistant":
        raise DataError(f"{where}: {column!r} ends with an assistant message; end it with what the model answers")
    return [dict(message) for message in value]


def _prompt(
    row: dict[str, Any], where: str, index: int, text: str, token_ids: list[int], section: DataSection
) -> Prompt:
    source = row.get("data_source", Path(section.train).stem)
    if not isinstance(source, str):
        raise DataError(f"{where}: 'data_source' is {type(source).__name__}; give text")
    taken = (section.prompt_column, section.answer_column, "data_source")
    return Prompt(
        prompt_id=f"{source}/{index}",
        data_source=source,
        text=text,
        token_ids=tuple(token_ids),
        answer=_answer(row, where, section),
        columns={name: value for name, value in row.items() if name not in taken},
    )


def _answer(row: dict[str, Any], where: str, section: DataSection) -> str | None:
    """The ground truth as text. A dataset may have none, but a column the config names must be there."""
    # By value: the resolved config that a resumed run reads spells the default out.
    if section.answer_column != type(section).model_fields["answer_column"].default:
        value = _column(row, where, "answer_column", section.answer_column)
    else:
        value = row.get(section.answer_column)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"{where}: {section.answer_column!r} is {type(value).__name__}; give text or a number, or another column "
        "that a reward function reads"
    )


def _column(row: dict[str, Any], where: str, option: str, name: str) -> Any:
    if name not in row:
        raise DataError(f"{where}: no column {name!r} (data.{option}); {tasks.hint(name, row)}")
    return row[name]


def _fits(length: int, where: str, section: DataSection) -> bool:
    if length <= section.max_prompt_tokens:
        return True
    if section.overlong_prompts == "drop":
        return False
    raise DataError(
        f"{where}: prompt has {length} tokens, over data.max_prompt_tokens={section.max_prompt_tokens}; "
        "raise it, or set data.overlong_prompts: drop"
    )


def check_lengths(prompts: list[Prompt], context: int | None, max_new_tokens: int) -> None:
    """Raise DataError for the first prompt that leaves no room for a response in the model's context."""
    for prompt in prompts:
        if context is not None and len(prompt.token_ids) + max_new_tokens > context:
            raise DataError(
                f"prompt {prompt.prompt_id} has {len(prompt.token_ids)} tokens; with rollout.max_new_tokens="
                f"{max_new_tokens} it exceeds the model's context of {context}; lower max_new_tokens, or set "
                "data.max_prompt_tokens with data.overlong_prompts: drop"
            )


class PromptSampler:
    """Endless stream of prompts, ``prompts_per_step`` at a time, that resumes where a checkpoint left it.

    Each epoch visits every prompt once, in an order drawn from (seed, epoch). A step that reaches the end of an epoch
    goes on into the next, so no prompt is skipped; only such a step may hold the same prompt twice.
    """

    def __init__(self, prompts: list[Prompt], prompts_per_step: int, seed: int, shuffle: bool) -> None:
        """Raises DataError when the dataset is smaller than one step."""
        if len(prompts) < prompts_per_step:
            raise DataError(
                f"the dataset has {len(prompts)} prompts, fewer than trainer.prompts_per_step={prompts_per_step}; "
                "lower it or add prompts"
            )
        self._prompts, self._prompts_per_step, self._seed, self._shuffle = prompts, prompts_per_step, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order()

    def next_step(self, count: int | None = None) -> list[Prompt]:
        """The next ``count`` prompts, by default those of a step."""
        count = self._prompts_per_step if count is None else count
        step: list[Prompt] = []
        while len(step) < count:
            if self._position == len(self._prompts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            take = self._order[self._position : self._position + count - len(step)]
            step += [self._prompts[i] for i in take]
            self._position += len(take)
        return step

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position, with a fingerprint of the data and the seed it is a position in."""
        return {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the stream. Raises CheckpointError when the data or its order is another than at the checkpoint."""
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                "the checkpoint's position is in other data: prompts, answers, run.seed or data.shuffle have changed; "
                "restore them or start a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:  # stdlib: its shuffle is the same on every platform and version
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._seed if self._shuffle else None}".encode())
        for prompt in self._prompts:
            digest.update(f"{prompt.prompt_id}\0{prompt.answer}\0".encode("utf-8", "surrogatepass"))
            digest.update(array("q", prompt.token_ids).tobytes())
        return digest.hexdigest()
