"""An algorithm of one's own, in one file: MaxRL with replay.

    python docs/examples/maxrl_replay.py configs/quickstart.yaml

The advantage, (r - mean_g) / mean_g, makes the update follow the logarithm of the pass rate: a prompt counts the more
the less often it is solved (arXiv 2602.02710). Replay is a phase of its own, after sampling: a group whose rewards are
all equal teaches nothing and is dropped, and an earlier one that had something to teach takes its place. Older weights
sampled its tokens, so rollout correction counts each of them pi / pi_sampled times, at most twice. The memory is in no
checkpoint: a resumed run begins with an empty one.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml

import rlinsight
from core_trainer.algorithms.registry import advantage
from core_trainer.batch import to_samples
from core_trainer.controller import Controller, Step
from core_trainer.types import Rollout
from rlinsight import names

ALGORITHM = {
    "plugins": [__file__],  # so that every worker has the advantage too
    "advantage": {"type": "maxrl"},
    "correction": {"importance": {"level": "token", "treatment": {"type": "truncate", "high": 2.0}}},
    "shaping": {"dynamic_sampling": {"max_rounds": 1}},  # drops groups of equal rewards, and samples no others
}


@advantage("maxrl")
def maxrl(rewards: torch.Tensor, groups: torch.Tensor, *, epsilon: float = 1e-6) -> torch.Tensor:
    """(r - mean_g) / (mean_g + epsilon) for rewards of 0 and above. [B], [B] -> [B]."""
    means = torch.stack([rewards[groups == group].mean() for group in groups])
    return (rewards - means) / (means + epsilon)


class ReplayController(Controller):
    """GRPO's step with one more phase."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: deque[list[Rollout]] = deque(maxlen=4 * self.config.trainer.prompts_per_step)

    def train_step(self, step: Step) -> None:
        """The step, phase by phase."""
        self.collect(step)
        self.replay(step)
        if step.samples:
            self.old_log_probs(step)
            self.estimate_advantages(step)
            self.update(step)
            self.sync(step)

    def replay(self, step: Step) -> None:
        """Fill the step up with groups from memory, drawn by seed and step, and remember its own."""
        with self.phase("rl.replay") as phase:
            fresh = [list(group) for _, group in groupby(step.rollouts, key=lambda rollout: rollout.group_id)]
            missing = self.config.trainer.prompts_per_step - len(fresh)
            draw = random.Random(f"{self.config.run.seed}/{step.index}")
            old = draw.sample(list(self.memory), min(missing, len(self.memory)))
            step.rollouts += [rollout for group in old for rollout in group]
            step.samples = to_samples(step.rollouts)
            self.memory.extend(fresh)
            phase.set({names.NUM_PROMPTS: len(old), names.BUCKET: "overhead"})


if __name__ == "__main__":
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    rlinsight.train({**config, "algorithm": ALGORITHM}, controller=ReplayController)
