"""Algorithms by kind and name: those built in, and those a user adds in a file of their own.

A registered function is pure. Its positional parameters name the tensors it wants, its keyword-only parameters are the
options a config can set:

    @advantage("leave_best_out")
    def leave_best_out(rewards, groups, *, scale: float = 1.0): ...

What a function needs (a critic, a greedy rollout of each prompt, ...) follows from its parameters. Knows no algorithm
itself; importing ``core_trainer.algorithms`` registers the built-in ones.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from rlinsight.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

INPUTS: dict[str, dict[str, str]] = {  # of each kind: the tensors a function may ask for, B rollouts, T or M tokens
    "advantage": {
        "rewards": "[B] float64, the sum of token_rewards",
        "token_rewards": "[B, T] float64, the score on the last token, minus the KL where that is part of the reward",
        "mask": "[B, T] bool, loss tokens",
        "groups": "[B] int64, equal for the rollouts of a prompt",
        "values": "[B, T] float64, from the critic; needs algorithm.critic",
        "greedy_rewards": "[B] float64, reward of the greedy rollout of the same prompt",
        "components": "[B, K] float64, scores of the reward components",
        "component_weights": "[K] float64",
        "lengths": "[B] int64, loss tokens of each rollout",
        "old_log_probs": "[B, T], under the policy before the update",
        "sum_pi_squared": "[B, T], sum over the vocabulary of the squared probabilities",
    },
    "policy_loss": {
        "log_probs": "[M], under the policy being trained",
        "old_log_probs": "[M], under the policy before the update",
        "advantages": "[M]",
        "mask": "[M] bool, loss tokens",
        "sequences": "[M] int64, index of the rollout of each token",
    },
    "kl_estimator": {"log_probs": "[M], under the policy that sampled", "other": "[M], under the other policy"},
    "aggregation": {"num_loss_tokens": "[B] int64, loss tokens of each rollout"},
    "importance": {"ratio": "[B, T] float64, trainer over engine, of the token or of its rollout"},
    "group_filter": {
        "rewards": "[B] float64",
        "groups": "[B] int64, equal for the rollouts of a prompt",
        "staleness": "[B] int64, updates since the oldest weights that sampled a token of the rollout",
    },
}


class TokenLoss(NamedTuple):
    """What a policy loss returns, all [M]; masked tokens have loss 0 and are never clipped."""

    loss: Tensor
    ratio: Tensor  # importance ratio as the loss saw it, of the token or its rollout; carries no gradient
    clipped: Tensor  # bool, true where a bound took effect


@dataclass(frozen=True)
class Algorithm:
    """A registered function, and what its signature says."""

    kind: str
    name: str
    function: Callable[..., Any]
    place: str  # file:line, for messages
    inputs: tuple[str, ...]
    options: Mapping[str, Any]  # defaults; inspect.Parameter.empty where there is none
    _types: Mapping[str, TypeAdapter[Any]] = field(repr=False, compare=False)
    whole_mini_batch: bool = False  # of a policy loss: its tokens are those of the mini-batch, not of a micro-batch

    @property
    def title(self) -> str:
        """As messages name it."""
        return f"{self.kind.replace('_', ' ')} {self.name!r}"

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every option, given or default. Raises ConfigError for an unknown one, a wrong type, or a missing one."""
        for name in options:
            if name not in self.options:
                raise ConfigError(f"{self.title} has no option {name!r}; {_suggest(name, self.options, 'it has')}")
        resolved = {}
        for name, default in self.options.items():
            if name not in options and default is inspect.Parameter.empty:
                raise ConfigError(f"{self.title} needs the option {name!r}; set it")
            value = options.get(name, default)
            try:
                resolved[name] = self._types[name].validate_python(value, strict=True) if name in options else value
            except ValidationError as error:
                raise ConfigError(f"{self.title}: {name}={value!r}: {error.errors()[0]['msg']}") from error
        return resolved

    def call(self, available: Mapping[str, Tensor], options: Mapping[str, Any]) -> Any:
        """Call with those of the available tensors that it asks for. Raises ConfigError when one is missing."""
        for name in self.inputs:
            if name not in available:
                has = ", ".join(available) or "nothing"
                raise ConfigError(f"{self.title} needs {name} ({INPUTS[self.kind][name]}); there is {has}")
        return self.function(*(available[name] for name in self.inputs), **self.resolve(options))


_registered: dict[tuple[str, str], Algorithm] = {}
_of_plugins: dict[str, frozenset[tuple[str, str]]] = {}  # what each plugin registered, by its module's name


def advantage(name: str) -> Callable[[Function], Function]:
    """Register an advantage: returns [B] or [B, T] float64, or (advantages, returns [B, T])."""
    return _register("advantage", name)


def policy_loss(name: str, *, whole_mini_batch: bool = False) -> Callable[[Function], Function]:
    """Register a policy loss: returns TokenLoss.

    Its tokens are those of a micro-batch. With ``whole_mini_batch`` they are those of the mini-batch over all ranks, in
    float64, so that a token's loss may depend on any other's; that costs a forward pass before each update.
    """
    return _register("policy_loss", name, whole_mini_batch)


def kl_estimator(name: str) -> Callable[[Function], Function]:
    """Register a KL estimator: returns [M], one value a token."""
    return _register("kl_estimator", name)


def aggregation(name: str) -> Callable[[Function], Function]:
    """Register an aggregation: returns [B] float64, the weight of each loss token of a rollout in the loss."""
    return _register("aggregation", name)


def importance(name: str) -> Callable[[Function], Function]:
    """Register a treatment of importance ratios: returns [B, T] float64, the weights."""
    return _register("importance", name)


def group_filter(name: str) -> Callable[[Function], Function]:
    """Register a filter, named by the reason it drops a rollout for: returns [B] bool, true for those to keep."""
    return _register("group_filter", name)


def find(kind: str, name: str) -> Algorithm:
    """The algorithm of a kind called ``name``. Raises ConfigError with the closest name there is."""
    if (kind, name) not in _registered:
        close = _suggest(name, names(kind), "known")
        raise ConfigError(f"unknown {kind.replace('_', ' ')} {name!r}; {close}")
    return _registered[kind, name]


def names(kind: str) -> list[str]:
    """Registered names of a kind, sorted."""
    return sorted(name for of, name in _registered if of == kind)


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Run Python files of the user, whose decorated functions register themselves. A file runs once in a process.

    Raises ConfigError naming the file, and leaves nothing of it registered, when it is missing, no Python file, fails,
    or registers nothing.
    """
    for path in paths:
        file, module_name = _plugin(path)
        if module_name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(module_name, file)
        if not file.is_file() or file.suffix != ".py" or spec is None or spec.loader is None:
            raise ConfigError(f"plugin {file} is no Python file; give the path of a .py file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        before = dict(_registered)
        try:
            spec.loader.exec_module(module)
            if _registered == before:
                raise ConfigError("it registers nothing; decorate its functions, as with @advantage('name')")
        except Exception as error:  # a user's file may raise anything
            del sys.modules[module_name]
            _registered.clear()
            _registered.update(before)
            raise ConfigError(f"plugin {file}{_line_in(file, error)}: {_told(error)}") from error
        made = [key for key, algorithm in _registered.items() if before.get(key) is not algorithm]
        _of_plugins[module_name] = frozenset(made)


def registered_by(path: str | Path) -> frozenset[tuple[str, str]]:
    """Kinds and names of what a file that ``load_plugins`` has run registered."""
    return _of_plugins[_plugin(path)[1]]


def _plugin(path: str | Path) -> tuple[Path, str]:
    """A plugin's file, and what its module is called."""
    file = Path(path).expanduser().resolve()
    return file, f"rlinsight_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"


def _register(kind: str, name: str, whole_mini_batch: bool = False) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        algorithm = replace(_inspect(kind, name, function), whole_mini_batch=whole_mini_batch)
        taken = _registered.get((kind, name))
        if taken is not None and taken.place != algorithm.place:
            raise ConfigError(f"{algorithm.title} at {algorithm.place} is already taken by {taken.place}; rename it")
        _registered[kind, name] = algorithm
        return function

    return register


def _inspect(kind: str, name: str, function: Callable[..., Any]) -> Algorithm:
    """Read the signature. Raises ConfigError for a parameter that is neither a known input nor an option."""
    if not inspect.isfunction(function):
        raise ConfigError(f"{kind} {name!r}: {function!r} is no plain function; decorate a def")
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    hints = get_type_hints(function, include_extras=True)
    inputs, options, types = [], {}, {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{kind} {name!r} at {place} takes {parameter}; name every input and option")
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
            types[parameter.name] = TypeAdapter(hints.get(parameter.name, Any))
        elif parameter.name not in INPUTS[kind]:
            close = _suggest(parameter.name, INPUTS[kind], "inputs are")
            raise ConfigError(
                f"{kind} {name!r} at {place} asks for the unknown input {parameter.name!r}; {close}; options come "
                "after a *"
            )
        else:
            inputs.append(parameter.name)
    return Algorithm(kind, name, function, place, tuple(inputs), options, types)


def _suggest(name: str, known: Iterable[str], lead: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{lead} {', '.join(known) or 'none'}"


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _line_in(file: Path, error: Exception) -> str:
    """``:line`` of the file where the error passed through it, or nothing."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f":{lines[-1]}" if lines else ""
