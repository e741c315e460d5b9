"""From YAML and overrides to a config, with errors that say what to change."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from rlinsight.config.reward import RewardFunction
from rlinsight.config.sft import SftConfig
from rlinsight.config.tree import Config
from rlinsight.errors import ConfigError

Tree = TypeVar("Tree", bound=Config | SftConfig)


def load(path: Path, overrides: list[str] | None = None, kind: type[Tree] = Config) -> Tree:
    """Read a YAML file and apply dotted overrides such as ``trainer.total_steps=3``.

    ``kind`` is the tree it must fit: Config of `rlinsight train`, or SftConfig of `rlinsight sft`. Raises ConfigError
    naming the key's path, the value and the fix.
    """
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; see configs/quickstart.yaml for one to start from")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}, not a mapping of sections; start it with 'model:'")
    for override in overrides or []:
        _apply_override(tree, override)
    return parse(tree, str(path), kind)


def parse(tree: dict[str, Any], origin: str = "config", kind: type[Tree] = Config) -> Tree:
    """Validate a mapping. Raises ConfigError with one line per problem."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(problem, kind) for problem in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: " + "; ".join(dict.fromkeys(lines))) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. trainer.total_steps=3")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from None
    node: Any = tree
    *parents, leaf = key.split(".")
    for i, part in enumerate(parents):
        if isinstance(node, list):
            node = _list_item(node, part, override)
            continue
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict | list):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[: i + 1])} is a value, not a section")
        node = child
    if isinstance(node, list):
        _list_item(node, leaf, override)
        node[int(leaf)] = value
    else:
        node[leaf] = value


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"override {override!r}: {index!r} is not an index below {len(items)}")
    return items[int(index)]


def _explain(problem: Any, tree: type[BaseModel]) -> str:
    """One pydantic error as 'path: what is wrong with which value; what fixes it'."""
    location = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    # A discriminated union inserts its tag after the list index; the YAML has no such level.
    if len(location) >= 4 and location[:2] == ["reward", "functions"]:
        location = location[:3] + location[4:]
    path = ".".join(str(part) for part in location)
    kind, value = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(location[:-1], problem, tree)
        close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if kind == "missing":
        return f"{path}: missing; add it"
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}={value!r}: {message[0].lower()}{message[1:]}"


def _keys_at(location: list[Any], problem: Any, tree: type[BaseModel]) -> list[str]:
    """Field names of the section at ``location``."""
    model = tree
    for part in location:
        if isinstance(part, int) or part not in model.model_fields:
            continue
        annotation = model.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
        else:  # the list of reward functions: take the variant named by the tag
            tag = next((p for p in problem["loc"][3:4] if isinstance(p, str)), "")
            for variant in get_args(get_args(RewardFunction)[0]):
                if tag in get_args(variant.model_fields["type"].annotation):
                    model = variant
    return sorted(model.model_fields)


def schema(kind: type[BaseModel] = Config) -> dict[str, Any]:
    """JSON schema of the YAML, for editors and the documentation."""
    return TypeAdapter(kind).json_schema()
