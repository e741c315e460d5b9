"""DAPO's penalty on length is one more component of the reward, for training rollouts alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_trainer.job import Job
from core_trainer.types import Prompt, Rollout, Turn
from core_trainer.workers.base import Place
from core_trainer.workers.reward import RewardWorker
from rlinsight import config, telemetry
from rlinsight.errors import ConfigError

TREE = {
    "model": {"source": "m"},
    "data": {"train": "d.jsonl"},
    "reward": {"functions": [{"type": "numeric", "weight": 2.0}]},
    "rollout": {"max_new_tokens": 10},
    "algorithm": {"name": "dapo", "shaping": {"overlong": {"buffer": 4, "factor": 0.5}}},
    "validation": {"datasets": [{"source": "v.jsonl"}]},
}


def rollout(index: int, length: int) -> Rollout:
    prompt = Prompt(f"p/{index}", "p", "1 + 2?", (1, 2), "3")
    turn = Turn(f"t{index}", (1, 2), [1] * length, [-1.0] * length, "It is 3", "stop", 0, 0, 0, 1)
    return Rollout(f"r{index}", "g", index, prompt, [turn], {})


def test_the_penalty_grows_over_the_last_tokens_and_is_told_apart(tmp_path: Path) -> None:
    """Nothing up to 6 of 10 tokens, half the factor at 8, all of it at 10; validation is not shaped."""
    job = Job(run_id="r", attempt=1, run_dir=tmp_path, spool_dir=tmp_path / "spool", collector=None)
    worker = RewardWorker(Place("reward", 0, 1), job, config.parse(TREE), {})
    rollouts = [rollout(i, length) for i, length in enumerate((3, 6, 8, 10))]
    try:
        worker.start([each.prompt for each in rollouts])
        results = worker.score(rollouts)
        assert [result.reward for result in results] == pytest.approx([2.0, 2.0, 1.75, 1.5])
        assert [result.components[-1].name for result in results] == ["overlong"] * 4
        assert [result.components[-1].value for result in results] == pytest.approx([0.0, 0.0, -0.25, -0.5])
        unshaped = worker.score(rollouts, 1)
        assert [result.reward for result in unshaped] == [2.0] * 4
    finally:
        worker.close()
        telemetry.shutdown(0)


def test_a_reward_function_cannot_take_its_name() -> None:
    """Two components of one name could not be told apart."""
    reward = {"functions": [{"type": "numeric", "name": "overlong"}]}
    with pytest.raises(ConfigError, match="give it another name"):
        config.parse({**TREE, "reward": reward})
