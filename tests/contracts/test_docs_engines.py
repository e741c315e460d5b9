"""docs/engines.md says what a config can choose, what it is by default, and which engine takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import duckdb
import pytest
from pydantic import BaseModel, ValidationError

from core_trainer.checks import TOLERANCE
from rlinsight import schema
from rlinsight.config import RolloutSection

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
ENGINES = get_args(RolloutSection.model_fields["engine"].annotation)
OTHERWISE: dict[str, Any] = {  # than by default
    "exact": "mkl",
    "native.kv_cache_gib": 3.0,
    "native.prefill_tokens": 64,
    "vllm.kv_cache_gib": 2.0,
    "vllm.gpu_memory_utilization": 0.5,
    "vllm.sleep_level": 1,
    "vllm.replicas": 2,
    "vllm.tensor_parallel_size": 2,
    "openai.server": "sglang",
    "openai.model": "m",
    "openai.api_key_env": "KEY",
    "openai.weights": "none",
    "openai.weights_dir": "/shared",
    "openai.timeout_s": 5.0,
}
URLS = {"urls": ["http://127.0.0.1:8000"]}


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table of a section, or of the page's head."""
    section = PAGE.split(f"\n## {heading}\n")[1] if heading else PAGE
    table = section[section.index("|---") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


OPTIONS = {name.strip("`"): rest for name, *rest in rows("Options")}


def options(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option with its default, by its dotted path."""
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from options(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", default


def test_every_engine_has_its_row_and_column() -> None:
    """Neither page nor config has an engine the other lacks."""
    assert sorted(row[0].strip("`") for row in rows("")) == sorted(ENGINES)
    head = PAGE.split("\n## What each can do\n\n")[1].splitlines()[0]
    assert sorted(re.findall(r"`(\w+)`", head)) == sorted(ENGINES)


def test_every_option_stands_with_its_default() -> None:
    """Neither page nor config has an option the other lacks."""
    assert {name: cells[0] for name, cells in OPTIONS.items()} == {
        name: f"`{json.dumps(default)}`" for name, default in options(RolloutSection)
    }


@pytest.mark.parametrize("name", [name for name, cells in OPTIONS.items() if cells[1] != "all"])
def test_an_option_is_taken_where_the_page_says_and_refused_elsewhere(name: str) -> None:
    """Each option of some engines alone, tried on every engine."""
    section, _, key = name.partition(".")
    takes = OPTIONS[name][1].split(", ")
    assert set(takes) < set(ENGINES)
    for engine in ENGINES:
        tree: dict[str, Any] = {"engine": engine}
        if engine == "openai":
            tree["openai"] = dict(URLS)
        if name == "openai.urls":
            tree["openai"] = dict(URLS)
        elif section == name:
            tree[name] = OTHERWISE[name]
        else:
            tree[section] = tree.get(section, {}) | {key: OTHERWISE[name]}
        if engine in takes:
            RolloutSection.model_validate(tree)
        else:
            with pytest.raises(ValidationError, match=r"no effect|needs|works with"):
                RolloutSection.model_validate(tree)


def test_the_tolerances_are_those_of_the_check() -> None:
    """As the page and the command's help say them."""
    from rlinsight import cli

    assert f"{TOLERANCE['float32']:g} nats in float32, {TOLERANCE['bfloat16']:g} in bfloat16" in PAGE
    text = " ".join(str(cli.check_model.__doc__).split())
    assert f"{TOLERANCE['float32']:g} apart in float32 and {TOLERANCE['bfloat16']:g} in bfloat16" in text


def test_queries_of_the_page_run() -> None:
    """Tables, columns, views and macros it names exist."""
    path = Path(":memory:")
    with duckdb.connect() as con:
        schema.apply(con, path)
        queries = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
        assert len(queries) == 3
        for query in queries:
            con.execute(query).fetchall()
        known = {file.name for file in schema.files()}
    words = re.findall(r"(?:[Vv]iew|[Mm]acros?) `(\w+)`(?:, `(\w+)`)?(?: and `(\w+)`)?", PAGE)
    named = {word for found in words for word in found if word}
    assert named >= {"turn_requests", "engine_starvation", "stragglers", "decode_after_sync"}
    assert named <= known


def test_pages_it_points_to_exist() -> None:
    """Every link."""
    folder = Path(__file__).parents[2] / "docs"
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (folder / target).exists(), target
