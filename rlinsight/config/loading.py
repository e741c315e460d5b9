"""From YAML and overrides to a config, with errors that say what to change."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Tag, TypeAdapter, ValidationError

from rlinsight.config.functions import PLUGIN
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
    path, model = _resolve(location, tree)
    where = ".".join(str(part) for part in path)
    kind, value = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = sorted(model.model_fields) if model else []
        close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if kind == "missing":
        return f"{where}: missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = ", ".join(f"{tag!r}" for tag in _variants_at(location, tree) if tag != PLUGIN)
        return f"{where}: type must be one of {tags}"
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}={value!r}: {message[0].lower()}{message[1:]}"


def _resolve(location: Sequence[Any], tree: type[BaseModel]) -> tuple[list[Any], type[BaseModel] | None]:
    """A problem's place as the YAML has it, and the section its last key belongs to.

    A tagged union puts its tag into the place; the YAML has no such level.
    """
    path: list[Any] = []
    annotation: Any = tree
    owner = None
    for part in location:
        variants = _variants(annotation)
        if isinstance(part, str) and part in variants:
            annotation = variants[part]
            continue
        path.append(part)
        annotation, owner = _child(annotation, part)
    return path, owner


def _variants_at(location: Sequence[Any], tree: type[BaseModel]) -> dict[str, Any]:
    annotation: Any = tree
    for part in location:
        annotation, _ = _child(annotation, part)
    return _variants(annotation)


def _child(annotation: Any, part: Any) -> tuple[Any, type[BaseModel] | None]:
    """What stands under a key or an index, and the section that has the key."""
    annotation = _required(annotation)
    if get_origin(annotation) is list:
        return get_args(annotation)[0], None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(part)
        return (field.annotation if field else None), annotation
    return None, None


def _required(annotation: Any) -> Any:
    """Without Annotated's metadata and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    members = [member for member in get_args(annotation) if member is not type(None)]
    is_optional = get_origin(annotation) in (Union, UnionType) and len(members) == 1
    return _required(members[0]) if is_optional else annotation


def _variants(annotation: Any) -> dict[str, Any]:
    """Tag to section, of a union of sections."""
    annotation = _required(annotation)
    found: dict[str, Any] = {}
    for member in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ():
        tags = [item.tag for item in get_args(member)[1:] if isinstance(item, Tag)]
        member = _required(member)
        if get_origin(member) in (Union, UnionType):
            found |= _variants(member)
        elif isinstance(member, type) and issubclass(member, BaseModel):
            for tag in tags or get_args(member.model_fields["type"].annotation):
                found[tag] = member
    return found


def schema(kind: type[BaseModel] = Config) -> dict[str, Any]:
    """JSON schema of the YAML, for editors and the documentation."""
    return TypeAdapter(kind).json_schema()
