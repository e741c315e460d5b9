"""docs/algorithms.md says what the registry and the presets say."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

import core_trainer.algorithms  # registers what is built in
from core_trainer.algorithms import registry
from rlinsight import config
from rlinsight.config.presets import Preset

assert core_trainer.algorithms
PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def _table(heading: str) -> dict[str, list[str]]:
    """The section's first table: cells of each row behind the first, by the name in the first."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = section[section.index("|---") :].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): rest for name, *rest in cells}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("Advantages", "advantage"), ("Policy losses", "policy_loss"), ("Aggregation", "aggregation")],
)
def test_every_function_has_its_row(heading: str, kind: str) -> None:
    """Neither page nor registry has a name the other lacks."""
    assert sorted(_table(heading)) == registry.names(kind)


def test_every_estimator_and_filter_is_on_the_page() -> None:
    """Those a config can name."""
    assert set(_table("KL to the reference")) == set(registry.names("kl_estimator"))
    for name in registry.names("group_filter"):
        assert name in PAGE


@pytest.mark.parametrize(("heading", "kind"), [("Advantages", "advantage"), ("Policy losses", "policy_loss")])
def test_options_stand_with_their_defaults(heading: str, kind: str) -> None:
    """The last column is what may be set, and what it is when nobody does."""
    for name, cells in _table(heading).items():
        options = registry.find(kind, name).options
        assert cells[-1] == ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in options.items()), name


def test_papers_are_those_of_the_docstrings() -> None:
    """Each arXiv number of a row is in the docstring of its function."""
    for heading, kind in (("Advantages", "advantage"), ("Policy losses", "policy_loss")):
        for name, cells in _table(heading).items():
            assert cells[1], f"{name} names no source"
            for number in re.findall(r"\d{4}\.\d{5}", cells[1]):
                assert number in (inspect.getdoc(registry.find(kind, name).function) or ""), (name, number)


@pytest.mark.parametrize("name", get_args(Preset))
def test_presets_are_what_their_rows_say(name: str) -> None:
    """Parts, KL, mini-batches and extras of each recipe, and no part of it left out."""
    parsed = _parse({"name": name}).algorithm
    advantage, loss, aggregation, kl, num_mini_batches, also, _ = _table("Presets")[name]
    for cell, section in ((advantage, parsed.advantage), (loss, parsed.policy_loss)):
        defaults = type(section).model_fields
        given = section.model_dump(exclude={"type"})
        changed = [f"`{key}: {json.dumps(value)}`" for key, value in given.items() if value != defaults[key].default]
        assert cell == ", ".join([section.type, *changed])
    assert aggregation == parsed.aggregation
    assert kl == (f"{parsed.kl.coef} {parsed.kl.estimator} {parsed.kl.where}" if parsed.kl else "")
    assert int(num_mini_batches) == parsed.num_mini_batches
    shaping = parsed.shaping.model_dump()
    extras = [key for key in ("dynamic_sampling", "overlong") if shaping[key] is not None]
    assert also == ", ".join([*extras, *(["critic"] if parsed.critic else [])])
    assert (parsed.num_epochs, parsed.entropy_coef, parsed.correction) == (1, 0, None)


def test_what_a_function_may_ask_for_is_complete() -> None:
    """The page lists every input of every kind a plugin can register from the config."""
    kinds = {name: re.findall(r"`(\w+)`", cells[0]) for name, cells in _table("One of your own").items()}
    for kind, inputs in kinds.items():
        assert sorted(inputs) == sorted(registry.INPUTS[kind]), kind
    assert set(kinds) == set(registry.INPUTS)


def test_the_page_s_plugin_works(tmp_path: Path) -> None:
    """Its file registers both functions, and its YAML selects them with an option."""
    code, snippet = re.findall(r"```python\n([^`]*)```\n\n((?: {4}.*\n)+)", PAGE)[0]
    (tmp_path / "mine.py").write_text(code)
    parsed = _parse(yaml.safe_load(snippet)["algorithm"]).algorithm
    before = dict(registry._registered)
    try:
        registry.load_plugins([tmp_path / "mine.py"])
        algorithm = registry.find("advantage", parsed.advantage.type)
        inputs = {"rewards": torch.tensor([1.0, 0.0, 3.0, 5.0]).double(), "groups": torch.tensor([0, 0, 1, 1])}
        assert algorithm.call(inputs, parsed.advantage.model_dump(exclude={"type"})).tolist() == [0.5, -0.5, -1, 1]
        tokens = {
            "log_probs": torch.tensor([-1.0, -2.0]),
            "advantages": torch.tensor([2.0, 1.0]),
            "mask": torch.tensor([True, False]),
        }
        assert registry.find("policy_loss", parsed.policy_loss.type).call(tokens, {}).loss.tolist() == [2, 0]
    finally:
        registry._registered.clear()
        registry._registered.update(before)


def test_yaml_on_the_page_is_valid() -> None:
    """Every indented block of YAML, and every option of the shaping table, makes a config."""
    blocks = [block for block in re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE) if "algorithm:" in block]
    assert len(blocks) == 3
    for block in blocks:
        _parse(yaml.safe_load(block)["algorithm"])
    for options in _table("Shaping"):
        _parse({"shaping": yaml.safe_load(options)})


def _parse(algorithm: dict[str, object]) -> config.Config:
    return config.parse(
        {
            "model": {"source": "some/model"},
            "data": {"train": "data.jsonl"},
            "reward": {"functions": [{"type": "numeric"}]},
            "algorithm": algorithm,
        }
    )
