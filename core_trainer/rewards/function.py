"""The user's own reward function: finding it, fitting its signature to the data, reading what it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core_trainer.rewards.types import Outcome, RewardInput, Verdict
from core_trainer.tasks import hint
from rlinsight.config import FunctionReward
from rlinsight.errors import ConfigError

_GIVEN = ("prompt", "response", "answer")


class _Function:
    """The function and the arguments it declares: prompt, response, answer, columns it names, kwargs."""

    def __init__(self, section: FunctionReward) -> None:
        """Imports the function. Raises ConfigError when it is not there or its arguments cannot be filled."""
        self.call = load_function(section.function)
        self._kwargs = section.kwargs
        self.is_async = inspect.iscoroutinefunction(self.call)
        parameters = inspect.signature(self.call).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._names = {p.name for p in named}
        for p in named:
            if p.kind is p.POSITIONAL_ONLY:
                raise ConfigError(f"{section.function}: {p.name!r} is positional-only; arguments are passed by name")
        for name in section.kwargs:
            if name in _GIVEN:
                raise ConfigError(f"{section.function}: kwargs.{name} is taken, it is given to every call; rename it")
            if name not in self._names and not self._takes_all:
                known = self._names - set(_GIVEN)
                raise ConfigError(
                    f"{section.function}: kwargs.{name}: the function has no such argument; {hint(name, known)}"
                )
        required = {p.name for p in named if p.default is p.empty}
        self.required_columns = frozenset(required - set(_GIVEN) - set(section.kwargs) - {"data_source"})

    def arguments(self, columns: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """What the function takes of ``columns``, the kwargs and ``given``, the latter first."""
        available = {**columns, **self._kwargs, **given}
        return available if self._takes_all else {k: v for k, v in available.items() if k in self._names}


class FunctionVerifier:
    """Calls ``function(prompt=, response=, answer=, <columns it names>, <kwargs>)`` with the arguments it declares."""

    def __init__(self, section: FunctionReward) -> None:
        """Raises ConfigError for a function that cannot be called."""
        self._function = _Function(section)
        self.is_async, self.required_columns = self._function.is_async, self._function.required_columns

    def __call__(self, item: RewardInput) -> list[Verdict] | Awaitable[list[Verdict]]:
        """Raises whatever the function raises, and TypeError or ValueError for what is no score."""
        prompt = item.prompt
        columns = {**prompt.columns, "data_source": prompt.data_source}
        given = {"prompt": prompt.text, "response": item.response, "answer": prompt.answer}
        result = self._function.call(**self._function.arguments(columns, given))
        return _verdicts_later(result) if self.is_async else _verdicts(result)


class BatchVerifier:
    """Calls the function once for many rollouts: prompt, response, answer and columns are lists, kwargs are not.

    A column that only some prompts have is None at the others.
    """

    def __init__(self, section: FunctionReward) -> None:
        """Raises ConfigError for a function that cannot be called."""
        self._function = _Function(section)
        self.is_async, self.required_columns = self._function.is_async, self._function.required_columns

    def __call__(self, items: Sequence[RewardInput]) -> list[Outcome] | Awaitable[list[Outcome]]:
        """One outcome per item. Raises whatever the function raises, and TypeError when it returns no such list."""
        prompts = [item.prompt for item in items]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        columns["data_source"] = [prompt.data_source for prompt in prompts]
        given = {
            "prompt": [prompt.text for prompt in prompts],
            "response": [item.response for item in items],
            "answer": [prompt.answer for prompt in prompts],
        }
        result = self._function.call(**self._function.arguments(columns, given))
        return _outcomes_later(result, len(items)) if self.is_async else _outcomes(result, len(items))


async def _outcomes_later(result: Awaitable[Any], size: int) -> list[Outcome]:
    return _outcomes(await result, size)


def _outcomes(result: Any, size: int) -> list[Outcome]:
    """What is no score at one place fails that rollout alone."""
    _refuse_coroutine(result)
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        raise TypeError(f"returned {type(result).__name__}; a batched function returns a list")
    if len(result) != size:
        raise ValueError(f"returned {len(result)} scores for {size} responses; return one for each")
    outcomes = []
    for score in result:
        try:
            outcomes.append(Outcome(tuple(_verdicts(score))))
        except (TypeError, ValueError) as error:
            outcomes.append(Outcome(error=str(error)))
    return outcomes


async def _verdicts_later(result: Awaitable[Any]) -> list[Verdict]:
    return _verdicts(await result)


def _verdicts(result: Any) -> list[Verdict]:
    _refuse_coroutine(result)
    if not isinstance(result, Mapping):
        return [Verdict(_number(result, ""))]
    if not result:
        raise ValueError("returned an empty mapping; return at least one component")
    return [Verdict(_number(value, f" for {part!r}"), part=str(part)) for part, value in result.items()]


def _refuse_coroutine(result: Any) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("returned a coroutine; declare the function with async def")


def _number(value: Any, where: str) -> float:
    if not isinstance(value, numbers.Real):  # bool and numpy scalars are Real
        raise TypeError(f"returned {type(value).__name__}{where}; return a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}{where}; return a finite number")
    return float(value)


def load_function(reference: str) -> Callable[..., Any]:
    """Import ``module:function`` or ``path/file.py:function``. Raises ConfigError saying what is not there."""
    location, _, name = reference.rpartition(":")
    try:
        module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{reference}: importing {location} failed: {describe(error)}; fix it") from None
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
        raise ConfigError(f"{reference}: {location} has no function {name!r}; {hint(name, known)}")
    if not callable(function):
        raise ConfigError(f"{reference}: {name!r} is {type(function).__name__}, not a function")
    return function


def _load_file(path: Path) -> Any:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"reward file {path.absolute()} does not exist")
    name = f"rlinsight_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    sys.path.insert(0, str(path.parent.absolute()))  # helpers beside the file, as when running it
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())  # a console script does not have it on the path
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"no module {name!r} in {os.getcwd()} or the Python path; write path/file.py:function for a file"
            ) from None
        raise


def describe(error: BaseException) -> str:
    """One line: type, message, and the place in the innermost frame."""
    text = " ".join(str(error).split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
