"""Every config that ships can be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinsight import config

SHIPPED = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_configs_are_shipped() -> None:
    """Those that the pages name exist, so the parametrised test below is not empty."""
    assert {"ppo.yaml", "quickstart.yaml", "sft.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_config_loads_and_survives_a_round_trip(path: Path) -> None:
    """A shipped config is valid, and its resolved form parses to the same run."""
    kind = config.SftConfig if path.name == "sft.yaml" else config.Config
    loaded = config.load(path, kind=kind)
    assert config.parse(loaded.model_dump(mode="json"), kind=kind).hash() == loaded.hash()
