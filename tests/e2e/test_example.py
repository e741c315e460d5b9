"""The documented example of an algorithm of one's own runs, and what it adds is in the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.test_train import Project

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "maxrl_replay.py"
COIN = '''
def coin(response):
    """Half of a random model's answers are right: groups of two learn or not by chance."""
    return len(response) % 2
'''


def test_it_is_one_file_of_under_80_lines() -> None:
    """What the platform promises about a new algorithm."""
    assert len(EXAMPLE.read_text().splitlines()) < 80


def test_its_advantage_and_its_phase_are_in_the_store(tmp_path: Path, tiny_model: Path) -> None:
    """Dropped groups are replaced by older ones, whose tokens carry importance weights; all of it links."""
    project = Project(tmp_path, tiny_model)
    (tmp_path / "coin.py").write_text(COIN)
    project.tree["reward"]["functions"][0]["function"] = "coin.py:coin"
    project.tree["rollout"] |= {"group_size": 2}
    project.tree["trainer"] |= {"total_steps": 3, "prompts_per_step": 8}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(project.tree))
    result = subprocess.run(
        [sys.executable, EXAMPLE, "config.yaml"], cwd=tmp_path, text=True, capture_output=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr

    phases = project.rows("SELECT step, phase FROM phases WHERE phase = 'replay' ORDER BY step")
    assert [row["step"] for row in phases] == [1, 2, 3]
    dropped = project.rows("SELECT step, reason, count(*) AS n FROM dropped_groups GROUP BY ALL ORDER BY step")
    assert {row["reason"] for row in dropped} == {"zero_variance"}
    replayed = project.rows(
        "SELECT t.step, count(DISTINCT s.group_id) AS n FROM rollout_training t JOIN rollout_samples s "
        "USING (run_id, rollout_id) WHERE t.step > s.step GROUP BY t.step ORDER BY t.step"
    )
    assert [(row["step"], row["n"]) for row in replayed] == [
        (row["step"], row["n"]) for row in dropped if row["step"] > 1
    ]  # memory held enough after the first step
    fresh = project.rows("SELECT min(weight) AS low, max(weight) AS high FROM tokens WHERE step_trained = step")
    assert fresh[0]["low"] == pytest.approx(1, abs=1e-3)
    assert fresh[0]["high"] == pytest.approx(1, abs=1e-3)
    (old,) = project.rows("SELECT min(weight) AS low, max(weight) AS high FROM tokens WHERE step_trained > step")
    assert 0 < old["low"] < 0.99
    assert 1.01 < old["high"] <= 2
    advantages = project.rows(
        "SELECT t.advantage, r.reward FROM rollout_training t JOIN rollouts r USING (run_id, rollout_id)"
    )
    assert len(advantages) > 16
    for row in advantages:  # of two rollouts one was right, so the mean is 0.5
        assert row["advantage"] == pytest.approx((row["reward"] - 0.5) / 0.5, abs=1e-4)
    for row in project.rows("SELECT * FROM v_linkage"):
        assert row["linked"] == row["n"] > 0, row
    assert all(row["fraction"] >= 0.95 for row in project.rows("SELECT fraction FROM v_phase_coverage"))
