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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from core_trainer.rewards.types import RewardInput, Verdict
from core_trainer.tasks import hint
from rlinsight.config import FunctionReward
from rlinsight.errors import ConfigError

_GIVEN = ("prompt", "response", "answer")


class FunctionVerifier:
    """Calls ``function(prompt=, response=, answer=, <columns it names>, <kwargs>)`` with the arguments it declares."""

    def __init__(self, section: FunctionReward) -> None:
        """Imports the function. Raises ConfigError when it is not there or its arguments cannot be filled."""
        self._function = load_function(section.function)
        self._kwargs = section.kwargs
        self.is_async = inspect.iscoroutinefunction(self._function)
        parameters = inspect.signature(self._function).parameters.values()
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

    def __call__(self, item: RewardInput) -> list[Verdict] | Awaitable[list[Verdict]]:
        """Raises whatever the function raises, and TypeError or ValueError for what is no score."""
        available = {
            **item.prompt.columns,
            "data_source": item.prompt.data_source,
            **self._kwargs,
            "prompt": item.prompt.text,
            "response": item.response,
            "answer": item.prompt.answer,
        }
        taken = available if self._takes_all else {k: v for k, v in available.items() if k in self._names}
        result = self._function(**taken)
        return _verdicts_later(result) if self.is_async else _verdicts(result)


async def _verdicts_later(result: Awaitable[Any]) -> list[Verdict]:
    return _verdicts(await result)


def _verdicts(result: Any) -> list[Verdict]:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("returned a coroutine; declare the function with async def")
    if not isinstance(result, Mapping):
        return [Verdict(_number(result, ""))]
    if not result:
        raise ValueError("returned an empty mapping; return at least one component")
    return [Verdict(_number(value, f" for {part!r}"), part=str(part)) for part, value in result.items()]


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
