"""Telemetry names are plain strings wherever they travel, and each is documented once."""

from __future__ import annotations

import copy
import pickle

import pytest

from rlinsight import names


def test_a_name_survives_the_trip_to_another_process() -> None:
    """Pickling and copying give an equal string, and register nothing twice."""
    carried = {names.ALGORITHM: "grpo"}
    assert pickle.loads(pickle.dumps(carried)) == copy.deepcopy(carried) == {"rl.algorithm": "grpo"}


def test_every_name_is_documented() -> None:
    """A name says what it means, and a metric how it was reduced."""
    assert [name for name in names.REGISTRY.values() if not name.doc] == []
    assert [name for name in names.METRICS.values() if name.agg is None] == []


def test_a_name_is_registered_once() -> None:
    """Two meanings for one name are refused at import."""
    with pytest.raises(ValueError, match="registered twice"):
        names.Name("rl.loop", "span", "again")
