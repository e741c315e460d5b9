"""Generated tasks: reasoning_gym datasets, by the name and arguments the config gives.

Owns: finding a task, checking its arguments by name and type, its items as dataset rows.
Does not own: templates and tokens (data.py), scores (rewards/task.py asks the dataset made here).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rlinsight.config import DataSection
from rlinsight.errors import ConfigError

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset

PREFIX = "reasoning_gym:"

# What tasks raise for arguments they cannot use: they check with asserts, or fail on the way.
_ERRORS = (AssertionError, ValueError, TypeError, IndexError, KeyError, ZeroDivisionError)


def rows(section: DataSection, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Generated items; the question and the task's metadata stay with the prompt, for the task's own score."""
    task = make(section, seed)
    name = section.train.removeprefix(PREFIX)
    try:
        for number, item in enumerate(task):
            row = {section.prompt_column: item["question"], section.answer_column: item["answer"], "data_source": name}
            yield f"{section.train} item {number}", row | {"question": item["question"], "metadata": item["metadata"]}
    except _ERRORS as error:
        _refuse(section, error)


def make(section: DataSection, seed: int) -> ProceduralDataset:
    """The reasoning_gym dataset of ``section``. Raises ConfigError for an unknown task, argument or value."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = section.train.removeprefix(PREFIX)
    if name not in DATASETS:
        raise ConfigError(f"data.train: reasoning_gym has no task {name!r}; {hint(name, DATASETS)}")
    arguments = {"seed": seed, **_arguments(name, DATASETS[name][1], section.task_args)}
    if section.size is not None:
        arguments["size"] = section.size
    try:
        return reasoning_gym.create_dataset(name, **arguments)
    except _ERRORS as error:
        _refuse(section, error)


def _refuse(section: DataSection, error: BaseException) -> NoReturn:
    raise ConfigError(
        f"data.task_args={section.task_args} do not work with {section.train}: {error}; change them"
    ) from None


def _arguments(task: str, config_class: type, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked by name and type against the task's config dataclass."""
    if "size" in given:
        raise ConfigError(f"data.task_args.size={given['size']!r}: set data.size instead")
    known = {field.name: field for field in dataclasses.fields(config_class) if field.name != "size"}
    hints = get_type_hints(config_class)
    checked = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"data.task_args.{name}: task {task} has no such argument; {hint(name, known)}")
        try:
            checked[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            if _fits_hint(hints[name], known[name].default):
                message = error.errors()[0]["msg"]
                raise ConfigError(f"data.task_args.{name}={value!r}: {message[0].lower()}{message[1:]}") from None
            checked[name] = value  # the task's own default breaks its hint, so the hint proves nothing
    return checked


def _fits_hint(hint: Any, default: Any) -> bool:
    try:
        TypeAdapter(hint).validate_python(default)
    except ValidationError:
        return default is dataclasses.MISSING
    return True


def hint(name: str, known: Iterable[str]) -> str:
    """End of an error about a misspelt name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    names = sorted(known)
    return f"known: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
