"""The config tree refuses what it cannot run, naming path, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinsight import config
from rlinsight.errors import ConfigError

MINIMAL = {
    "model": {"source": "some/model"},
    "data": {"train": "data.jsonl"},
    "reward": {"functions": [{"type": "numeric"}]},
}


def with_value(path: str, value: object) -> dict:
    tree: dict = {section: dict(values) for section, values in MINIMAL.items()}
    section, key = path.split(".")
    tree.setdefault(section, {})[key] = value
    return tree


def test_minimal_config_gets_defaults() -> None:
    """A model, data and a reward are all a config must say."""
    parsed = config.parse(MINIMAL)
    assert parsed.rollout.group_size == 8
    assert parsed.algorithm.name == "grpo"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (with_value("trainer.total_step", 3), "trainer.total_step: unknown key; did you mean 'total_steps'?"),
        (with_value("trainer.total_steps", 0), "trainer.total_steps=0: input should be greater than or equal to 1"),
        (with_value("trainer.total_steps", "many"), "trainer.total_steps='many': input should be a valid integer"),
        (with_value("rollout.temperature", 0), "rollout.temperature=0: input should be greater than 0"),
        (with_value("data.task_args", {"a": 1}), "task_args only apply to reasoning_gym:<task>"),
        (with_value("reward.functions", [{"type": "numeric"}, {"type": "numeric"}]), "two reward functions are called"),
        (with_value("reward.functions", [{"type": "regex", "pattern": "("}]), "is not a regular expression"),
        (with_value("reward.functions", [{"type": "numeric", "tolerence": 1}]), "did you mean 'tolerance'?"),
        (with_value("reward.concurrency", 8), "concurrency=8 has no effect: numeric make no calls"),
        (with_value("reward.functions", [{"type": "reasoning_gym"}]), "needs data.train: reasoning_gym:<task>"),
        (with_value("reward.functions", [{"type": "nope"}]), "reward.functions.0"),
        ({"model": {"source": "x"}}, "data: missing"),
    ],
)
def test_bad_values_are_refused_by_path(tree: dict, message: str) -> None:
    """Every refusal names the key's path, the value and the fix, on one line."""
    with pytest.raises(ConfigError) as refusal:
        config.parse(tree)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_overrides_reach_nested_keys_and_lists(tmp_path: Path) -> None:
    """Dotted overrides set scalars, create missing sections and index into lists."""
    file = tmp_path / "c.yaml"
    file.write_text("model: {source: m}\ndata: {train: d.jsonl}\nreward: {functions: [{type: numeric}]}\n")
    parsed = config.load(file, ["trainer.total_steps=3", "reward.functions.0.weight=2.5", 'rollout.stop=["\\n"]'])
    assert parsed.trainer.total_steps == 3
    assert parsed.reward.functions[0].weight == 2.5
    assert parsed.rollout.stop == ["\n"]


@pytest.mark.parametrize(
    "override", ["trainer.total_steps", "=3", "trainer..x=1", "model.source.x=1", "reward.functions.7.weight=1"]
)
def test_bad_overrides_are_refused(tmp_path: Path, override: str) -> None:
    """An override that cannot be placed is an error, never ignored."""
    file = tmp_path / "c.yaml"
    file.write_text("model: {source: m}\ndata: {train: d.jsonl}\nreward: {functions: [{type: numeric}]}\n")
    with pytest.raises(ConfigError, match="override"):
        config.load(file, [override])


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "not valid YAML"), ("- 1\n", "not a mapping"), ("", "not a mapping")]
)
def test_unreadable_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Broken YAML and YAML that is no mapping are told apart from bad values."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        config.load(file)
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / "missing.yaml")


def test_config_is_frozen_and_hash_follows_values() -> None:
    """A parsed config cannot change, and its hash depends on values only."""
    parsed = config.parse(MINIMAL)
    with pytest.raises(Exception, match="frozen"):
        parsed.trainer.total_steps = 5  # type: ignore[misc]
    assert parsed.hash() == config.parse(MINIMAL).hash()
    assert parsed.hash() != config.parse(with_value("trainer.total_steps", 5)).hash()


def test_a_switch_spelled_as_yaml_reads_it_is_understood() -> None:
    """An unquoted ``text: off`` is a boolean to YAML and the mode to us; true is no mode."""
    assert config.parse(with_value("telemetry.text", False)).telemetry.text == "off"
    with pytest.raises(ConfigError, match=r"telemetry.text=True"):
        config.parse(with_value("telemetry.text", True))


def test_an_empty_stop_string_is_refused() -> None:
    """It is part of every text, so every response would end with its first token."""
    with pytest.raises(ConfigError, match=r"rollout\.stop\.1=''"):
        config.parse(with_value("rollout.stop", ["\n", ""]))
