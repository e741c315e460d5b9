"""The controller's loop over scripted worker groups: which calls a step makes, with what, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core_trainer import checkpoint
from core_trainer.batching import TrainSample
from core_trainer.controller import BYPASS, EXACT, ON_POLICY, Controller, Step
from core_trainer.data import PromptSampler
from core_trainer.job import Job, RunSummary, StepReport
from core_trainer.metrics import TokenStats
from core_trainer.optimizer import OptimizerStats
from core_trainer.rewards import Component, RewardResult
from core_trainer.rollout.hybrid import Published
from core_trainer.rollout.sample import Group
from core_trainer.types import Prompt, Rollout, SamplingParams, Turn
from core_trainer.value_model import ValueStats
from core_trainer.workers.worker_group import WorkerGroup
from rlinsight import config, names, telemetry
from rlinsight.errors import CheckpointError, RewardError, TrainingError

Recorded = list[tuple[str, dict[str, Any]]]
Score = Callable[[Rollout], float | None]


class Workers:
    """A worker group of one role that answers from its own methods and remembers the calls."""

    def __init__(self, calls: list[str], role: str, world_size: int = 1) -> None:
        self.calls, self.role, self.world_size = calls, role, world_size

    def call(self, method: str, *args: Any, step: int | None = None, timeout_s: float | None = None) -> list[Any]:
        assert (timeout_s is not None) == (method == "sync_weights")
        return self.scatter(method, [], *args) if method == "score" else self.scatter(method, [None], *args)

    def scatter(
        self, method: str, parts: Sequence[Any], *args: Any, step: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        assert (timeout_s is not None) == (method == "sample")
        self.calls.append(f"{self.role}.{method}")
        if method == "score":
            return [self.score(*args)]  # type: ignore[attr-defined]
        return [getattr(self, method)(*([] if part is None else [part]), *args) for part in parts]

    def call_rank(self, rank: int, method: str, *args: Any, step: int | None = None) -> Any:
        return self.call(method, *args)[0]

    def split(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        return WorkerGroup.split(self, items)  # type: ignore[arg-type]

    def split_groups(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        return WorkerGroup.split_groups(self, samples)  # type: ignore[arg-type]

    def optim_step(self, step: int) -> OptimizerStats:
        return OptimizerStats(1.0, 1e-3, 1.0, {"mlp": 1.0})

    def save(self, directory: Path) -> None:
        (directory / "weights").write_text(self.role)


class Policy(Workers):
    """Samples responses whose length is the sample's index plus 1; keeps what it was asked to learn from."""

    ref_kl = 0.5  # per token

    def __init__(self, calls: list[str], world_size: int = 1) -> None:
        super().__init__(calls, "policy", world_size)
        self.trained: list[TrainSample] = []
        self.coefs: list[float] = []
        self.sampled: list[tuple[SamplingParams, Group]] = []
        self.ledger: list[Published] = []
        self.version = 0
        self.behind: dict[str, int] = {}  # by prompt: updates that the weights which answer it lack

    def optim_step(self, step: int) -> OptimizerStats:
        self.version += 1
        return super().optim_step(step)

    def sample(self, groups: Sequence[Group], params: SamplingParams) -> list[Rollout]:
        self.sampled += [(params, group) for group in groups]
        rollouts = []
        for group in groups:
            version = self.version - self.behind.get(group.prompt.prompt_id, 0)
            for j in range(group.size):
                turns = [turn(group.prompt, j + 1, version)]
                rollouts.append(Rollout(f"{group.group_id}-r{j}", group.group_id, j, group.prompt, turns, {}))
        return rollouts

    def log_probs(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        return {"old_log_probs": [np.full(s.num_tokens, -1.25, dtype=np.float32) for s in samples]}

    def current_log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        return [np.full(s.num_tokens, -1.25 + 0.1 * self.version, dtype=np.float32) for s in samples]

    def ref_log_probs(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        return {"ref_log_probs": [np.full(s.num_tokens, -1.5, dtype=np.float32) for s in samples]}

    def forward_backward(self, samples: list[TrainSample], kl_coef: float, record: bool) -> tuple[Any, ValueStats]:
        self.trained += samples if record else []
        self.coefs.append(kl_coef)
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        return TokenStats(num_tokens=tokens, ref_kl=self.ref_kl * tokens), ValueStats()

    def sync_weights(self) -> list[Published]:
        return self.ledger


class Reference(Workers):
    ref_log_probs = Policy.ref_log_probs


class Critic(Workers):
    fail_at: int | None = None

    def __init__(self, calls: list[str], role: str) -> None:
        super().__init__(calls, role)
        self.recorded: list[str] = []

    def values(self, samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        return {"values": [np.zeros(s.num_tokens, dtype=np.float32) for s in samples]}

    def forward_backward(self, samples: Sequence[TrainSample], record: bool) -> ValueStats:
        self.recorded += [sample.rollout_id for sample in samples] if record else []
        return ValueStats()


class Reward(Workers):
    """Scores each rollout with a function; None fails."""

    def __init__(self, calls: list[str], score: Score) -> None:
        super().__init__(calls, "reward")
        self.function = score

    def score(self, rollouts: Sequence[Rollout]) -> list[RewardResult]:
        results = []
        for rollout in rollouts:
            value = self.function(rollout)
            error = "lost" if value is None else None
            results.append(
                RewardResult(rollout.rollout_id, value, (Component("f", 1.0, value, None, None, 0.0, error),))
            )
        return results


class Watcher:
    """A reporter that remembers, and asks for a stop at the nth question."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[StepReport] = []
        self.stop_at, self.asked = stop_at, 0

    def stage(self, text: str) -> None:
        """Nobody watches."""

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def stop_requested(self) -> bool:
        self.asked += 1
        return self.stop_at is not None and self.asked >= self.stop_at


def turn(prompt: Prompt, length: int, version: int) -> Turn:
    return Turn("t", prompt.token_ids, [7] * length, [-1.0] * length, "x", "stop", version, 0, 0, 1)


PROMPTS = [Prompt(f"p/{i}", "p", "text", (i, 1, 2), str(i)) for i in range(10)]


class Bench:
    """A controller over scripted groups: two prompts a step, two rollouts each, in the order of the data."""

    def __init__(self, path: Path, score: Score, stop_at: int | None = None, world_size: int = 1, **sections: Any):
        tree = {
            "model": {"source": "nowhere"},
            "data": {"train": "d.jsonl", "shuffle": False},
            "reward": {"functions": [{"type": "numeric"}]},
            **sections,
            "rollout": {"group_size": 2, "max_new_tokens": 8, **sections.get("rollout", {})},
            "trainer": {"total_steps": 2, "prompts_per_step": 2, **sections.get("trainer", {})},
        }
        self.config = config.parse(tree)
        self.calls: list[str] = []
        self.policy = Policy(self.calls, world_size)
        algorithm = self.config.algorithm
        self.cluster = SimpleNamespace(
            policy=self.policy,
            reference=Reference(self.calls, "reference") if algorithm.kl and self.config.model.lora is None else None,
            critic=Critic(self.calls, "critic") if algorithm.model_critic else None,
            reward=Reward(self.calls, score),
            sampler=PromptSampler(PROMPTS, 2, 0, shuffle=False),
            validation_sets=[],
            fingerprint={},
            state=None,
            policy_version=0,
            replicas=["policy/0"],
            ledger=[],
        )
        self.job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None)
        self.watcher = Watcher(stop_at)

    def controller(self) -> Controller:
        return Controller(self.config, self.job, self.watcher, self.cluster)  # type: ignore[arg-type]

    def train(self) -> Any:
        return self.controller().train()

    def metric(self, name: str) -> list[float | None]:
        return [report.metrics.get(name, "absent") for report in self.watcher.steps]  # type: ignore[misc]

    def count(self, call: str) -> int:
        return self.calls.count(call)


def by_index(rollout: Rollout) -> float:
    """Rollouts of a group differ."""
    return float(rollout.sample_index)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Events by name, and the reasons of skipped phases as events called "skipped"."""
    seen: Recorded = []
    monkeypatch.setattr(telemetry, "event", lambda name, attributes, **_: seen.append((name, dict(attributes))))
    plain = telemetry.Span.set

    def watched(span: telemetry.Span, attributes: Any) -> None:
        if names.SKIPPED in attributes:
            seen.append(("skipped", dict(attributes)))
        plain(span, attributes)

    monkeypatch.setattr(telemetry.Span, "set", watched)
    return seen


def dropped(recorded: Recorded) -> list[tuple[str, str, int]]:
    events = [attributes for name, attributes in recorded if name == names.GROUP_DROPPED]
    return [(e[names.PROMPT_ID], e[names.REASON], e[names.BATCH_SIZE]) for e in events]


def skipped(recorded: Recorded) -> set[str]:
    return {attributes[names.SKIPPED] for name, attributes in recorded if name == "skipped"}


# Which rollouts are learned from --------------------------------------------------------------------------------------


def test_dynamic_sampling_refills_only_what_is_missing(tmp_path: Path, recorded: Recorded) -> None:
    """p/0 has no signal: one more prompt is drawn, as group 2 of the step; the next step goes on in the data."""
    bench = Bench(
        tmp_path,
        lambda r: 1.0 if r.prompt.prompt_id == "p/0" else by_index(r),
        algorithm={"shaping": {"dynamic_sampling": {"max_rounds": 3}}},
    )
    bench.train()
    drawn = [(group.group_id, group.prompt.prompt_id) for _, group in bench.policy.sampled]
    assert drawn == [
        ("a1-s000001-g0000", "p/0"),
        ("a1-s000001-g0001", "p/1"),
        ("a1-s000001-g0002", "p/2"),
        ("a1-s000002-g0000", "p/3"),
        ("a1-s000002-g0001", "p/4"),
    ]
    assert len({seed for _, group in bench.policy.sampled for seed in group.seeds}) == 10
    assert dropped(recorded) == [("p/0", "zero_variance", 2)]
    assert {s.group_id for s in bench.policy.trained[:4]} == {"a1-s000001-g0001", "a1-s000001-g0002"}
    assert bench.metric(names.M_SAMPLING_ROUNDS) == [2, 1]
    assert bench.metric(names.M_GROUPS_DROPPED) == [1, 0]
    assert bench.metric(names.M_REWARD_MEAN) == [pytest.approx(4 / 6), 0.5]  # of all that was sampled


def test_dynamic_sampling_is_bounded_and_a_step_of_nothing_ends_well(tmp_path: Path, recorded: Recorded) -> None:
    """Step 1 finds nothing in two rounds: no update, no metrics of one, weights as they were; step 2 trains."""
    bench = Bench(
        tmp_path,
        lambda r: 0.0 if int(r.prompt.prompt_id[2:]) < 4 else by_index(r),
        algorithm={"shaping": {"dynamic_sampling": {"max_rounds": 2}}, "kl": {"coef": 0.1}},
    )
    summary = bench.train()
    assert (summary.status, summary.step, summary.curve) == ("finished", 2, [0.0, 0.5])
    assert len(dropped(recorded)) == 4
    assert bench.metric(names.M_SAMPLING_ROUNDS) == [2, 1]
    for absent in (names.M_LOSS, names.M_GRAD_NORM, names.M_ADVANTAGE_ABS, names.M_KL_COEF):
        first, second = bench.metric(absent)
        assert first == "absent"
        assert isinstance(second, float)
    assert bench.count("policy.optim_step") == bench.count("policy.sync_weights") == 1
    assert bench.count("reference.ref_log_probs") == 1


def test_a_reward_that_failed_leaves_its_rollout_out(tmp_path: Path, recorded: Recorded) -> None:
    """p/0 loses one of three rollouts, p/1 two and has nothing to be compared with; metrics are of the rest."""

    def score(rollout: Rollout) -> float | None:
        lost = {"p/0": (0,), "p/1": (0, 1), "p/2": (0, 1, 2), "p/3": (0, 1, 2)}[rollout.prompt.prompt_id]
        return None if rollout.sample_index in lost else by_index(rollout)

    bench = Bench(
        tmp_path, score, rollout={"group_size": 3}, reward={"functions": [{"type": "numeric"}], "on_error": "drop"}
    )
    summary = bench.train()
    assert dropped(recorded) == [("p/1", "too_small", 3), ("p/2", "no_reward", 3), ("p/3", "no_reward", 3)]
    assert [s.rollout_id[-2:] for s in bench.policy.trained] == ["r1", "r2"]
    assert [float(s.advantages[0]) for s in bench.policy.trained] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)  # type: ignore[index]
    assert bench.metric(names.M_REWARD_MEAN) == [pytest.approx(5 / 3), None]
    assert bench.metric(names.M_REWARD_STD) == [pytest.approx(3**-0.5), None]
    assert bench.metric(names.M_ZERO_VARIANCE) == [0.5, None]
    assert bench.metric(names.M_LENGTH_MEAN) == [2, 2]
    assert summary.curve == [pytest.approx(5 / 3)]


def test_group_filters_look_at_means(tmp_path: Path, recorded: Recorded) -> None:
    """Groups outside the bounds are dropped and, without dynamic sampling, not replaced."""
    means = {"p/0": 0.0, "p/1": 0.5, "p/2": 1.0, "p/3": 0.25}
    bench = Bench(
        tmp_path,
        lambda r: means[r.prompt.prompt_id] + (0.125 if r.sample_index else -0.125),
        algorithm={
            "shaping": {
                "group_filters": [{"type": "too_hard", "min_reward": 0.25}, {"type": "too_easy", "max_reward": 0.75}]
            }
        },
    )
    bench.train()
    assert dropped(recorded) == [("p/0", "too_hard", 2), ("p/2", "too_easy", 2)]
    assert bench.metric(names.M_SAMPLING_ROUNDS) == [1, 1]


def test_what_old_weights_sampled_is_dropped_beyond_the_bound(tmp_path: Path, recorded: Recorded) -> None:
    """With dynamic sampling others are drawn in its place."""
    filters = [{"type": "stale", "max_staleness": 1}]
    bench = Bench(
        tmp_path,
        by_index,
        algorithm={"shaping": {"group_filters": filters, "dynamic_sampling": {"max_rounds": 2}}},
        trainer={"total_steps": 1},
    )
    bench.policy.behind = {"p/0": 2, "p/1": 1}
    bench.train()
    assert dropped(recorded) == [("p/0", "stale", 2)]
    assert len({s.group_id for s in bench.policy.trained}) == 2


def test_length_alone_is_no_signal_for_dynamic_sampling(tmp_path: Path, recorded: Recorded) -> None:
    """A group with equal rewards before the penalty on length is dropped, also where 0.1 - 0.6 + 0.6 is not 0.1."""
    assert 0.1 - 0.6 + 0.6 != 0.1
    bench = Bench(tmp_path, by_index, algorithm={"shaping": {"dynamic_sampling": {"max_rounds": 1}, "overlong": {}}})

    def score(rollouts: Sequence[Rollout]) -> list[RewardResult]:
        results = []
        for rollout in rollouts:
            value = 0.1 if rollout.prompt.prompt_id == "p/0" else by_index(rollout)
            parts = {"f": value, "overlong": -0.6 * rollout.sample_index}
            components = tuple(Component(name, 1.0, v, None, None, 0.0, None) for name, v in parts.items())
            results.append(RewardResult(rollout.rollout_id, sum(parts.values()), components))
        return results

    bench.cluster.reward.score = score
    bench.train()
    assert dropped(recorded) == [("p/0", "zero_variance", 2)]
    assert [float(s.advantages[0]) > 0 for s in bench.policy.trained] == [False, True] * 3  # type: ignore[index]


# Losses that see a whole mini-batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_are_chosen_before_each_update_from_its_mini_batch(tmp_path: Path, world_size: int) -> None:
    """Of all ranks, under the weights the update starts from: one of the mini-batch's tokens is penalised, and the
    ratio is that of the updates made since the old log-probs.
    """
    bench = Bench(
        tmp_path,
        by_index,
        world_size=world_size,
        algorithm={"num_epochs": 2, "policy_loss": {"type": "kl_cov"}},
        trainer={"total_steps": 1},
    )
    seen: list[tuple[int, set[float]]] = []
    plain = bench.policy.scatter

    def scatter(method: str, parts: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        if method == "forward_backward":
            samples = [sample for part in parts for sample in part]
            ratios = {round(float(ratio), 5) for sample in samples for ratio in sample.ratio}
            seen.append((sum(int(sample.clipped.sum()) for sample in samples), ratios))
        return plain(method, parts, *args, **options)

    bench.policy.scatter = scatter  # type: ignore[method-assign]
    bench.train()
    assert seen == [(1, {1.0}), (1, {round(float(np.exp(0.1)), 5)})]
    order = [call.removeprefix("policy.") for call in bench.calls if call.startswith("policy.")]
    update = ["current_log_probs", "forward_backward", "optim_step"]
    assert order == ["sample", "log_probs", *update, *update, "sync_weights", "save"]


@pytest.mark.parametrize("options", [{"num_mini_batches": 2}, {"num_epochs": 2}], ids=str)
def test_the_first_update_of_a_step_is_on_policy_whatever_a_pass_rounds(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Its old log-probs are those it starts from, in every step; the second one's are not."""
    bench = Bench(tmp_path, by_index, algorithm={**options, "policy_loss": {"type": "kl_cov"}})
    seen: list[float] = []
    plain = bench.policy.scatter

    def current_log_probs(samples: Sequence[TrainSample]) -> list[np.ndarray]:
        return [np.full(s.num_tokens, -1.2500001 if bench.policy.version % 2 == 0 else -1.0) for s in samples]

    def scatter(method: str, parts: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        if method == "forward_backward":
            seen.append(max(float(ratio) for part in parts for sample in part for ratio in sample.ratio))
        return plain(method, parts, *args, **options)

    bench.policy.current_log_probs = current_log_probs  # type: ignore[method-assign]
    bench.policy.scatter = scatter  # type: ignore[method-assign]
    bench.train()
    assert seen == [1.0, pytest.approx(np.exp(0.25))] * 2


def test_with_bypass_the_first_update_is_of_the_engines_log_probs(tmp_path: Path) -> None:
    """They are another policy's, so that their ratio is kept."""
    bench = Bench(tmp_path, by_index, algorithm={"correction": {"mode": "bypass"}, "policy_loss": {"type": "kl_cov"}})
    bench.train()
    ratios = [float(ratio) for sample in bench.policy.trained for ratio in sample.ratio]  # type: ignore[union-attr]
    assert ratios[0] == pytest.approx(np.exp(-0.25))


def test_other_losses_need_no_pass_before_an_update(tmp_path: Path) -> None:
    """Their tokens are looked at micro-batch by micro-batch."""
    bench = Bench(tmp_path, by_index, algorithm={"num_epochs": 2})
    bench.train()
    assert bench.count("policy.current_log_probs") == 0
    assert all(sample.token_loss is None for sample in bench.policy.trained)


# Greedy baselines -----------------------------------------------------------------------------------------------------


def test_remax_samples_one_greedy_rollout_of_each_prompt(tmp_path: Path, recorded: Recorded) -> None:
    """It is the baseline of its prompt, is marked as no rollout to learn from, and counts in no metric of training."""
    bench = Bench(
        tmp_path,
        lambda r: 0.25 if "greedy" in r.group_id else by_index(r),
        algorithm={"name": "remax", "kl": None},
    )
    bench.train()
    greedy = [(params, group) for params, group in bench.policy.sampled if params.temperature == 0]
    assert [(group.prompt.prompt_id, group.size, group.split) for _, group in greedy] == [
        (f"p/{i}", 1, "baseline") for i in range(4)
    ]
    assert len(bench.policy.trained) == 8
    assert [float(s.advantages[0]) for s in bench.policy.trained] == [-0.25, 0.75] * 4  # type: ignore[index]
    assert bench.metric(names.M_REWARD_MEAN) == [0.5, 0.5]
    assert bench.metric(names.M_LENGTH_MEAN) == [1.5, 1.5]
    assert dropped(recorded) == []


def test_a_prompt_whose_greedy_rollout_could_not_be_scored_is_dropped(tmp_path: Path, recorded: Recorded) -> None:
    """Without its baseline there is nothing to learn from."""
    bench = Bench(
        tmp_path,
        lambda r: None if r.group_id == "a1-s000001-g0001-greedy" else by_index(r),
        algorithm={"name": "remax", "kl": None},
    )
    bench.train()
    assert dropped(recorded) == [("p/1", "no_baseline", 2)]
    assert {s.group_id[-5:] for s in bench.policy.trained[:2]} == {"g0000"}


# Old log-probs and correction -----------------------------------------------------------------------------------------

DECOUPLED = {"importance": {"treatment": {"type": "truncate"}}}


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({}, ON_POLICY),
        ({"name": "dr_grpo"}, ON_POLICY),
        ({"name": "remax", "kl": None}, ON_POLICY),
        ({"kl": {"coef": 0.1}}, ON_POLICY),
        ({"name": "ppo", "num_mini_batches": 1, "kl": None}, ON_POLICY),
        ({"num_epochs": 2}, None),
        ({"num_mini_batches": 2}, None),
        ({"name": "rloo"}, None),  # KL in the reward
        ({"correction": DECOUPLED}, None),
        ({"correction": {"mode": "bypass"}}, BYPASS),
        ({"correction": {"mode": "bypass"}, "num_epochs": 2}, BYPASS),
        ({"name": "rloo", "correction": {"mode": "bypass"}}, BYPASS),
    ],
    ids=str,
)
def test_old_log_probs_are_computed_where_something_needs_them(
    tmp_path: Path, recorded: Recorded, algorithm: dict[str, Any], reason: str | None
) -> None:
    """One on-policy update skips the pass unless something looks before it; bypass takes the engine's."""
    bench = Bench(tmp_path, by_index, algorithm=algorithm)
    bench.train()
    assert bench.count("policy.log_probs") == (2 if reason is None else 0)
    assert (reason in skipped(recorded)) == (reason is not None)
    old = {None if s.old_log_probs is None else float(s.old_log_probs[0]) for s in bench.policy.trained}
    assert old == {{None: -1.25, ON_POLICY: None, BYPASS: -1.0}[reason]}


def test_exact_mode_computes_the_log_probs_of_older_weights(tmp_path: Path, recorded: Recorded) -> None:
    """The engine's are exact for the weights that sampled, which are not those the second step starts from."""
    bench = Bench(tmp_path, by_index, algorithm={"num_mini_batches": 2}, rollout={"exact": True})
    bench.policy.behind = {"p/2": 1}
    bench.train()
    assert bench.count("policy.log_probs") == 1


@pytest.mark.parametrize(
    ("algorithm", "skips"),
    [
        ({"name": "rloo"}, True),
        ({"num_mini_batches": 2}, True),
        ({"num_epochs": 2}, False),
    ],
    ids=str,
)
def test_exact_mode_takes_the_engines_where_the_update_checks_them(
    tmp_path: Path, recorded: Recorded, algorithm: dict[str, Any], skips: bool
) -> None:
    """Statistics are those of the last epoch, which could check nothing when there are several."""
    bench = Bench(tmp_path, by_index, algorithm=algorithm, rollout={"exact": True})
    bench.train()
    assert (EXACT in skipped(recorded)) == skips
    assert bench.count("policy.log_probs") == (0 if skips else 2)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo", "critic": {"type": "shared"}, "num_mini_batches": 1, "kl": None},
        {"advantage": {"type": "optimal_token_baseline"}},
    ],
)
def test_what_comes_from_the_same_pass_keeps_it(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """A shared critic's values and sums of squared probabilities cost no pass of their own, so it is not skipped."""
    bench = Bench(tmp_path, by_index, algorithm=algorithm)

    def log_probs(samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray]]:
        found = {"old_log_probs": -1.25, "values": 0.0, "sum_pi_squared": 0.5}
        return {name: [np.full(s.num_tokens, v, dtype=np.float32) for s in samples] for name, v in found.items()}

    bench.policy.log_probs = log_probs  # type: ignore[method-assign]
    bench.policy.save_value_head = bench.policy.save  # type: ignore[attr-defined]
    bench.train()
    assert bench.count("policy.log_probs") == 2


def test_decoupled_correction_weighs_tokens_and_drops_what_is_rejected(tmp_path: Path, recorded: Recorded) -> None:
    """ratio exp(-0.25) on every token. k1 of a rollout is 0.25 a token: at 0.3 only rollouts of one token are left."""
    rejection = {"estimator": "k1", "reduction": "sum", "high": 0.3}
    bench = Bench(tmp_path, by_index, algorithm={"correction": {**DECOUPLED, "rejection": rejection}})
    bench.train()
    short, long = bench.policy.trained[:2]
    assert short.weights == pytest.approx(np.exp([-0.25]))
    assert (long.weights.tolist(), long.loss_mask.tolist()) == ([0, 0], [False, False])  # type: ignore[union-attr]
    assert short.token_weight == pytest.approx(1 / 2)  # of two loss tokens in the step
    assert bench.metric(names.M_CORRECTION["rejected_token_fraction"]) == [pytest.approx(2 / 3)] * 2
    assert dropped(recorded) == []
    everything = Bench(
        tmp_path, by_index, algorithm={"correction": {"rejection": {**rejection, "high": 0.2}}, "num_mini_batches": 2}
    )
    everything.train()
    assert dropped(recorded) == [(f"p/{i}", "rejected", 2) for i in range(4)]
    assert everything.metric(names.M_GROUPS_DROPPED) == [2, 2]
    assert everything.count("policy.optim_step") == 0


# KL -------------------------------------------------------------------------------------------------------------------


def test_the_kl_coefficient_adapts_and_is_restored(tmp_path: Path) -> None:
    """By hand: KL 0.5 a token, target 0.25, horizon 40 and 4 rollouts: each step multiplies by 1 + 0.2 x 4 / 40."""
    algorithm = {"kl": {"coef": 0.1, "controller": {"type": "adaptive", "target": 0.25, "horizon": 40}}}
    bench = Bench(tmp_path, by_index, algorithm=algorithm)
    summary = bench.train()
    assert bench.policy.coefs == [0.1, pytest.approx(0.1 * 1.02)]
    assert bench.metric(names.M_KL_COEF) == bench.policy.coefs
    resumed = Bench(tmp_path, by_index, algorithm=algorithm, trainer={"total_steps": 3})
    resumed.cluster.state = checkpoint.resume(summary.checkpoint, {})
    resumed.train()
    assert resumed.policy.coefs == [pytest.approx(0.1 * 1.02**2, rel=1e-12)]
    assert [report.step for report in resumed.watcher.steps] == [3]


def test_adapters_need_no_reference_worker(tmp_path: Path) -> None:
    """The policy itself gives the reference's log-probs."""
    bench = Bench(tmp_path, by_index, model={"source": "nowhere", "lora": {}}, algorithm={"kl": {"coef": 0.1}})
    bench.train()
    assert bench.count("policy.ref_log_probs") == 2


# Updates --------------------------------------------------------------------------------------------------------------


def test_critic_warmup_leaves_the_policy_alone(tmp_path: Path) -> None:
    """Step 1 trains the critic only: no policy update, no metrics of one, the same policy_version."""
    algorithm = {"name": "ppo", "num_mini_batches": 2, "critic": {"type": "model", "warmup_steps": 1}}
    bench = Bench(tmp_path, by_index, algorithm=algorithm)
    controller = bench.controller()
    controller.train()
    assert bench.count("critic.optim_step") == 4
    assert bench.count("policy.optim_step") == 2
    assert controller.policy_version == 2
    assert bench.metric(names.M_GRAD_NORM) == ["absent", 1.0]
    assert bench.metric(names.M_CRITIC_GRAD_NORM) == [1.0, 1.0]
    assert bench.metric(names.M_CRITIC_GRAD_NORM_GROUPS["mlp"]) == [1.0, 1.0]
    assert bench.metric(names.M_VALUE_LOSS) == [0.0, 0.0]
    assert bench.metric(names.M_KL_COEF) == [0.05, 0.05]


def test_what_only_the_critic_learned_from_is_recorded_once(tmp_path: Path) -> None:
    """By the critic in its warm-up, by the policy after; both in the last epoch."""
    algorithm = {"name": "ppo", "num_mini_batches": 1, "num_epochs": 2, "critic": {"type": "model", "warmup_steps": 1}}
    bench = Bench(tmp_path, by_index, algorithm=algorithm)
    bench.train()
    by_step = [[f"a1-s00000{step}-g000{g}-r{j}" for g in (0, 1) for j in (0, 1)] for step in (1, 2)]
    assert sorted(bench.cluster.critic.recorded) == by_step[0]  # type: ignore[union-attr]
    assert sorted(sample.rollout_id for sample in bench.policy.trained) == by_step[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rollout_is_trained_once_an_epoch_on_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    """Also with fewer groups than ranks."""
    bench = Bench(tmp_path, by_index, world_size=world_size, algorithm={"num_epochs": 3, "num_mini_batches": 2})
    bench.train()
    trained = sorted(s.rollout_id for s in bench.policy.trained)  # of the last epoch, which is recorded
    assert trained == sorted(f"a1-s00000{step}-g000{g}-r{j}" for step in (1, 2) for g in (0, 1) for j in (0, 1))
    assert bench.count("policy.optim_step") == 2 * 3 * 2


# Ends ----------------------------------------------------------------------------------------------------------------


def test_a_stop_abandons_a_step_before_its_first_update_only(tmp_path: Path) -> None:
    """At every question whether to stop: the checkpoint is of the last finished step, and its data position too."""
    plan: dict[str, Any] = {"algorithm": {"num_mini_batches": 2, "kl": {"coef": 0.1}}}
    whole = Bench(tmp_path / "whole", by_index, **plan)
    whole.train()
    ends = set()
    for question in range(1, whole.watcher.asked + 1):
        bench = Bench(tmp_path / str(question), by_index, stop_at=question, **plan)
        summary = bench.train()
        state = checkpoint.read_state(summary.checkpoint)
        assert state.step == summary.step == len(bench.watcher.steps)
        assert state.sampler["position"] == 2 * summary.step
        assert bench.count("policy.optim_step") == 2 * summary.step
        ends.add((summary.status, summary.step))
    assert ends == {("interrupted", 0), ("interrupted", 1)}
    assert whole.watcher.asked == 2 * (1 + 4)  # each step: before it, and before reward, old, reference, train


def test_a_failure_before_the_update_keeps_the_finished_steps(tmp_path: Path) -> None:
    """The checkpoint is of step 1, with the data position before the failed step."""

    def score(rollout: Rollout) -> float:
        if rollout.prompt.prompt_id == "p/3":
            raise RewardError("lost")
        return by_index(rollout)

    with pytest.raises(RewardError):
        Bench(tmp_path, score).train()
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert (checkpoint.read_state(saved).step, checkpoint.read_state(saved).sampler["position"]) == (1, 2)


@pytest.mark.parametrize(("fails", "saved"), [("critic", ["step-000001"]), ("policy", [])])
def test_a_refused_update_is_saved_only_where_no_weights_have_moved(
    tmp_path: Path, fails: str, saved: list[str]
) -> None:
    """The critic goes first: when it refuses nothing has moved, when the policy refuses after it something has."""
    bench = Bench(tmp_path, by_index, algorithm={"name": "ppo", "num_mini_batches": 1, "kl": None})

    def refuse(step: int) -> OptimizerStats:
        if step == 2:
            raise TrainingError("not finite")
        return OptimizerStats(1.0, 1e-3, 1.0, {"mlp": 1.0})

    getattr(bench.cluster, fails).optim_step = refuse
    with pytest.raises(TrainingError):
        bench.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == saved


def test_a_failed_validation_keeps_the_step_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 is finished and saved when its validation raises, with the data position behind it."""
    bench = Bench(tmp_path, by_index)
    controller = bench.controller()

    def validate() -> bool:
        if controller.step == 1:
            raise RewardError("lost")
        return False

    monkeypatch.setattr(controller, "validate", validate)
    with pytest.raises(RewardError):
        controller.train()
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert (checkpoint.read_state(saved).step, checkpoint.read_state(saved).sampler["position"]) == (1, 2)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failed_validation_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """By the resume, before it trains on, also after the last step; and once, also where it made no new best."""
    tried: list[int] = []
    failing = [fails_at]

    def validate(*args: Any) -> list[Any]:
        tried.append(args[4])
        if args[4] in failing:
            raise RewardError("lost")
        return []

    monkeypatch.setattr("core_trainer.validation.validate", validate)
    monkeypatch.setattr("core_trainer.validation.best_metric", lambda *args: float(tried[-1]))
    validation = {"datasets": [{"source": "v.jsonl"}], "every": 1}
    bench = Bench(tmp_path, by_index, validation=validation, trainer={"keep_best": True})
    with pytest.raises(RewardError):
        bench.train()
    saved = checkpoint.checkpoints(tmp_path / "checkpoints")[-1]
    assert checkpoint.read_state(saved).validated == fails_at - 1
    failing.clear()
    for expected in ([fails_at, *range(fails_at + 1, 3)], []):
        tried.clear()
        bench.job = replace(bench.job, resume=saved)
        bench.cluster.state = checkpoint.resume(saved, {})
        bench.cluster.sampler.load_state_dict(bench.cluster.state.sampler)
        summary = bench.train()
        saved = summary.checkpoint
        assert (tried, summary.status, summary.step) == (expected, "finished", 2)
        assert checkpoint.best(tmp_path / "checkpoints") == saved
        assert checkpoint.read_state(saved).validated == 2


def test_the_best_checkpoint_is_written_when_validation_improves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation before the first step counts as the best of none yet; later ones are written where they beat it."""
    summary = validated(tmp_path, monkeypatch, [0.5, 0.25, 0.75, 0.6])
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["step-000002", "step-000003"]
    assert checkpoint.best(folder) == folder / "step-000002"
    assert summary.checkpoint is not None
    assert checkpoint.read_state(summary.checkpoint).best == checkpoint.Best("all/mean@1", 0.75, 2)


def validated(path: Path, monkeypatch: pytest.MonkeyPatch, values: Sequence[float | None]) -> RunSummary:
    """A run of three steps that keeps one checkpoint and the best, its validations scripted."""
    left = iter(values)
    monkeypatch.setattr("core_trainer.validation.validate", lambda *args: [])
    monkeypatch.setattr("core_trainer.validation.best_metric", lambda *args: next(left))
    bench = Bench(
        path,
        by_index,
        validation={"datasets": [{"source": "v.jsonl"}], "every": 1},
        trainer={"total_steps": 3, "keep_best": True, "keep_checkpoints": 1},
    )
    return bench.train()


def test_initial_weights_that_stay_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that only makes it worse leaves the checkpoint of step 0 as the best one."""
    summary = validated(tmp_path, monkeypatch, [0.5, 0.25, 0.1, 0.5])
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["step-000000", "step-000003"]
    assert checkpoint.best(folder) == folder / "step-000000"
    state = checkpoint.read_state(folder / "step-000000")
    assert (state.step, state.sampler["position"]) == (0, 0)
    assert summary.checkpoint is not None
    assert checkpoint.read_state(summary.checkpoint).best == checkpoint.Best("all/mean@1", 0.5, 0)


def test_a_validation_without_scores_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every reward failed it is said and training goes on; the next one with a score decides again."""
    said: list[str] = []
    monkeypatch.setattr(Watcher, "stage", lambda self, text: said.append(text))
    summary = validated(tmp_path, monkeypatch, [None, 0.25, None, 0.1])
    assert summary.status == "finished"
    assert [text for text in said if "made no" in text] == [
        f"validation of step {step} made no all/mean@1: too few samples could be scored" for step in (0, 2)
    ]
    assert checkpoint.best(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000001"


def test_a_checkpoint_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure after a checkpoint of its step, or right after a resume, leaves that one alone; a damaged one not."""

    def score(rollout: Rollout) -> float:
        if rollout.prompt.prompt_id == "p/3":
            raise RewardError("lost")
        return by_index(rollout)

    written: list[int] = []
    plain = checkpoint.write

    def write(folder: Path, state: checkpoint.TrainerState, *args: Any) -> Path:
        written.append(state.step)
        return plain(folder, state, *args)

    monkeypatch.setattr(checkpoint, "write", write)
    bench = Bench(tmp_path, score, trainer={"checkpoint_every": 1})
    with pytest.raises(RewardError):
        bench.train()
    assert written == [1]
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    bench.job = replace(bench.job, resume=saved)
    bench.cluster.state = checkpoint.resume(saved, {})
    for damaged in (False, True):
        if damaged:
            (saved / "weights").unlink()
        bench.cluster.sampler.load_state_dict(bench.cluster.state.sampler)
        with pytest.raises(RewardError):
            bench.train()
        assert written == [1] + damaged * [1]
    assert checkpoint.is_of(saved, 1)


class Counting(Controller):
    """Counts its steps in a state of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own: dict[str, Any] = {"steps": []}

    def state_dict(self) -> dict[str, Any]:
        return self.own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state

    def train_step(self, step: Step) -> None:
        self.own["steps"].append(step.index)
        super().train_step(step)


def test_state_of_a_subclass_is_saved_and_restored(tmp_path: Path) -> None:
    """A step that is given up leaves no trace in it; a controller that cannot load it says so."""
    bench = Bench(tmp_path, by_index, stop_at=7, trainer={"total_steps": 3})  # in step 2, before the update
    interrupted = Counting(bench.config, bench.job, bench.watcher, bench.cluster)  # type: ignore[arg-type]
    summary = interrupted.train()
    assert summary.step == 1
    state = checkpoint.resume(summary.checkpoint, {})  # type: ignore[arg-type]
    assert state.extra == interrupted.own == {"steps": [1]}
    resumed = Bench(tmp_path, by_index, trainer={"total_steps": 3})
    resumed.cluster.state = state
    controller = Counting(resumed.config, resumed.job, resumed.watcher, resumed.cluster)  # type: ignore[arg-type]
    controller.train()
    assert controller.own == {"steps": [1, 2, 3]}
    with pytest.raises(CheckpointError, match=r"holds state \(steps\) that Controller does not load"):
        resumed.train()
