"""Steps with phases of one's own, and what the step's numbers count then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer import checkpoint
from core_trainer.algorithms import registry
from core_trainer.batch import to_samples
from core_trainer.batching import TrainSample
from core_trainer.controller import Controller, Step
from core_trainer.types import Rollout
from rlinsight import names
from rlinsight.errors import ConfigError, TrainingError
from tests.core_trainer import test_controller
from tests.core_trainer.test_controller import DECOUPLED, Bench, Recorded, by_index, dropped

recorded = test_controller.recorded  # the fixture
STALE = {"type": "stale", "max_staleness": 1}


class Sampling(Controller):
    """Samples and scores without ``collect``, trains on it twice, and has a metric of its own."""

    def train_step(self, step: Step) -> None:
        step.rollouts = self.sample(step, self.draw(step, 2))
        self.score(step, step.rollouts)
        step.samples = to_samples(step.rollouts)
        self.old_log_probs(step)
        self.estimate_advantages(step)
        if step.samples:
            self.update(step)
            self.update(step)
            self.sync(step)
        step.metrics["mine/answer"] = 42.0


class Idle(Controller):
    """Does nothing at all."""

    def train_step(self, step: Step) -> None:
        """Neither samples nor trains."""


def run(bench: Bench, kind: type[Controller]) -> Controller:
    controller = kind(bench.config, bench.job, bench.watcher, bench.cluster)  # type: ignore[arg-type]
    controller.train()
    return controller


def test_a_step_without_collect_may_update_twice(tmp_path: Path, recorded: Recorded) -> None:
    """Each update counts once in policy_version; a loss is of the last call's; a metric of one's own is recorded."""
    bench = Bench(tmp_path, by_index, algorithm={"num_mini_batches": 2, "num_epochs": 3})
    controller = run(bench, Sampling)
    assert bench.count("policy.optim_step") == controller.policy_version == 2 * 2 * 2 * 3
    mine = [a[names.METRIC_VALUE] for name, a in recorded if a.get(names.METRIC_NAME) == "mine/answer"]
    assert mine == bench.metric("mine/answer") == [42.0, 42.0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"exact": True}, "algorithm": {"correction": DECOUPLED}},
            "correction has no effect with rollout.ex",
        ),
        (
            {"rollout": {"exact": True}, "algorithm": {"correction": {"mode": "bypass"}}},
            "correction.mode=bypass has no effect with rollout.exact=auto and one epoch",
        ),
        (
            {
                "rollout": {"exact": True},
                "algorithm": {"correction": {"mode": "bypass"}, "policy_loss": {"clip_high": 0.3}},
            },
            "correction.mode=bypass has no effect",
        ),
        ({"algorithm": {"shaping": {"group_filters": [STALE]}}}, "stale drops nothing with rollout.engine native"),
    ],
)
def test_what_only_older_rollouts_need_is_refused_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str
) -> None:
    """Before anything starts; a controller of one's own may learn from them."""

    def start(*args: Any) -> Any:
        raise KeyError("it starts")

    monkeypatch.setattr("core_trainer.controller.Cluster", start)
    bench = Bench(tmp_path, by_index, **sections)
    with pytest.raises(ConfigError, match=message):
        Controller.run(bench.config, bench.job, bench.watcher)
    with pytest.raises(KeyError, match="it starts"):
        Sampling.run(bench.config, bench.job, bench.watcher)


def test_a_second_update_needs_old_log_probs(tmp_path: Path) -> None:
    """With one mini-batch their pass is skipped; a second update would take its own forward for the old weights'."""
    bench = Bench(tmp_path, by_index)
    with pytest.raises(TrainingError, match="updates the policy again in step 1 on samples without old log-probs"):
        run(bench, Sampling)
    assert bench.count("policy.optim_step") == 1
    assert checkpoint.checkpoints(tmp_path / "checkpoints") == []


def test_losses_are_means_over_the_mini_batches_they_sum(tmp_path: Path) -> None:
    """Two updates of two mini-batches each, of loss 3: the step's is 3 however often it is updated."""
    bench = Bench(tmp_path, by_index, algorithm={"num_mini_batches": 2})
    plain = bench.policy.forward_backward

    def forward_backward(samples: list[TrainSample], kl_coef: float, record: bool) -> Any:
        stats, values = plain(samples, kl_coef, record)
        stats.loss = 3.0
        return stats, values

    bench.policy.forward_backward = forward_backward  # type: ignore[method-assign]
    run(bench, Sampling)
    assert bench.metric(names.M_LOSS) == [3.0, 3.0]


def test_rejection_needs_no_collect(tmp_path: Path, recorded: Recorded) -> None:
    """All is rejected: the groups are counted from nothing."""
    rejection = {"estimator": "k1", "reduction": "sum", "high": 0.2}
    bench = Bench(tmp_path, by_index, algorithm={"correction": {**DECOUPLED, "rejection": rejection}})
    run(bench, Sampling)
    assert bench.metric(names.M_GROUPS_DROPPED) == [2, 2]
    assert len(dropped(recorded)) == 4


def test_a_step_of_nothing_has_no_lengths_and_no_speed(tmp_path: Path) -> None:
    """Absent rather than an error."""
    bench = Bench(tmp_path, by_index)
    run(bench, Idle)
    assert bench.metric(names.M_LENGTH_MEAN) == bench.metric(names.M_GEN_TOKENS_PER_S) == [None, None]


def test_greedy_tokens_count_in_the_speed_of_generation(tmp_path: Path) -> None:
    """Two groups of responses of 1 and 2 tokens, and a greedy one of 1 token of each: 8 tokens in their time."""
    bench = Bench(tmp_path, by_index, algorithm={"name": "remax", "kl": None}, trainer={"total_steps": 1})
    steps: list[Step] = []

    class Watched(Controller):
        def train_step(self, step: Step) -> None:
            steps.append(step)
            super().train_step(step)

    run(bench, Watched)
    assert bench.metric(names.M_GEN_TOKENS_PER_S) == [pytest.approx(8 / steps[0].sampling_s)]


def test_a_filter_that_splits_a_group_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, rather than leave an advantage a rollout that has no other to be compared with."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @registry.group_filter("positive")
    def positive(rewards: Any) -> Any:
        return rewards > 0

    algorithm = {"plugins": ["mine.py"], "shaping": {"group_filters": [{"type": "positive"}]}}
    with pytest.raises(ConfigError, match="group filter 'positive' keeps some rollouts of a group and not others"):
        Bench(tmp_path, by_index, algorithm=algorithm).train()
    assert checkpoint.checkpoints(tmp_path / "checkpoints") == []


def test_an_advantage_of_ones_own_that_compares_groups_is_given_no_group_of_one(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a built-in one: p/0 loses one of two rollouts, and the best of no others would be -inf."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @registry.advantage("leave_best_out")
    def leave_best_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        others = (groups[:, None] == groups) & ~torch.eye(len(groups), dtype=torch.bool)
        return rewards - rewards.expand(len(groups), -1).masked_fill(~others, -torch.inf).amax(dim=1)

    def score(rollout: Rollout) -> float | None:
        return None if (rollout.prompt.prompt_id, rollout.sample_index) == ("p/0", 0) else by_index(rollout)

    bench = Bench(
        tmp_path,
        score,
        algorithm={"plugins": ["mine.py"], "advantage": {"type": "leave_best_out"}},
        reward={"functions": [{"type": "numeric"}], "on_error": "drop"},
        trainer={"total_steps": 1},
    )
    bench.train()
    assert dropped(recorded) == [("p/0", "too_small", 2)]
    assert [float(s.advantages[0]) for s in bench.policy.trained] == [-1, 1]  # type: ignore[index]


def test_the_kl_that_is_steered_is_of_the_weights_before_the_update(tmp_path: Path) -> None:
    """By hand: d = -1.25 + 1.5, k3 = exp(-0.25) + 0.25 - 1 = 0.0288, just under the target, where the updated
    policy is at 0.5, far over it. 4 rollouts of a horizon of 40.
    """
    kl = {"coef": 0.1, "controller": {"type": "adaptive", "target": 0.03, "horizon": 40}}
    bench = Bench(tmp_path, by_index, algorithm={"kl": kl, "num_mini_batches": 2})
    bench.train()
    error = (np.exp(-0.25) + 0.25 - 1) / 0.03 - 1
    assert -0.2 < error < 0
    assert bench.metric(names.M_KL_COEF) == [0.1, pytest.approx(0.1 * (1 + error * 4 / 40), rel=1e-6)]
