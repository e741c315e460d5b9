"""What the controller makes of rollouts that failed and of engines that are stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core_trainer import checkpoint
from core_trainer.rollout.engine import WeightSync
from core_trainer.rollout.hybrid import Published
from core_trainer.rollout.sample import Group
from core_trainer.types import Rollout, SamplingParams
from core_trainer.workers import worker_group
from core_trainer.workers.base import Worker
from core_trainer.workers.worker_group import WorkerGroup
from rlinsight import names
from rlinsight.errors import EngineError, WorkerError
from tests.core_trainer import test_controller
from tests.core_trainer.test_controller import Bench, Recorded, by_index, dropped

recorded = test_controller.recorded  # the fixture


def alerts(recorded: Recorded) -> list[str]:
    return [attributes[names.ALERT_RULE] for name, attributes in recorded if name == names.ALERT]


def failing(bench: Bench, fails: Callable[[Rollout], bool]) -> Bench:
    """Rollouts of which ``fails`` come back with an error."""
    plain = bench.policy.sample

    def sample(groups: Sequence[Group], params: SamplingParams) -> list[Rollout]:
        rollouts = plain(groups, params)
        for rollout in rollouts:
            if fails(rollout):
                rollout.error, rollout.turns = "RequestTimeout", []
        return rollouts

    bench.policy.sample = sample  # type: ignore[method-assign]
    return bench


def test_failed_rollouts_make_groups_smaller_or_drop_them_by_name(tmp_path: Path, recorded: Recorded) -> None:
    """p/0 loses one of three, p/1 two and has nothing to compare the last with, p/2 all: they are in no metric but
    their own, and never scored.
    """
    lost = {"p/0": (0,), "p/1": (0, 1), "p/2": (0, 1, 2), "p/3": ()}
    scored: list[str] = []

    def score(rollout: Rollout) -> float:
        scored.append(rollout.rollout_id)
        return by_index(rollout)

    bench = failing(
        Bench(tmp_path, score, rollout={"group_size": 3, "on_error": "drop"}),
        lambda r: r.sample_index in lost[r.prompt.prompt_id],
    )
    summary = bench.train()
    assert summary.status == "finished"
    assert dropped(recorded) == [("p/1", "too_small", 1), ("p/2", "engine_error", 3)]
    assert [s.rollout_id[-8:] for s in bench.policy.trained] == ["g0000-r1", "g0000-r2"] + [
        f"g0001-r{j}" for j in range(3)
    ]
    assert len(scored) == 3 + 3
    assert bench.metric(names.M_FAILED_ROLLOUTS) == [3, 3]
    assert bench.metric(names.M_GROUPS_DROPPED) == [1, 1]
    assert bench.metric(names.M_LENGTH_MEAN) == [pytest.approx(8 / 3), 2]
    assert alerts(recorded) == ["failed_rollouts"]


def test_dynamic_sampling_makes_up_for_groups_that_failed(tmp_path: Path, recorded: Recorded) -> None:
    """Another prompt is drawn in the place of p/0."""
    algorithm = {"shaping": {"dynamic_sampling": {"max_rounds": 2}}}
    bench = failing(
        Bench(tmp_path, by_index, rollout={"on_error": "drop"}, algorithm=algorithm),
        lambda r: r.prompt.prompt_id == "p/0",
    )
    bench.train()
    assert {s.group_id for s in bench.policy.trained[:4]} == {"a1-s000001-g0001", "a1-s000001-g0002"}
    assert bench.metric(names.M_SAMPLING_ROUNDS) == [2, 1]
    assert bench.metric(names.M_GROUPS_DROPPED) == [1, 0]
    assert dropped(recorded) == [("p/0", "engine_error", 2)]


def test_a_greedy_rollout_that_failed_drops_its_group(tmp_path: Path, recorded: Recorded) -> None:
    """Without a baseline there is nothing to learn from; the greedy group itself is nobody's loss."""
    bench = failing(
        Bench(tmp_path, by_index, rollout={"on_error": "drop"}, algorithm={"name": "remax", "kl": None}),
        lambda r: r.group_id == "a1-s000001-g0001-greedy",
    )
    bench.train()
    assert dropped(recorded) == [("p/1", "no_baseline", 2)]


def test_a_step_without_a_single_rollout_ends_the_run(tmp_path: Path, recorded: Recorded) -> None:
    """An engine that is dead does not run through the data: step 1 is saved, with the data position behind it."""
    bench = failing(
        Bench(tmp_path, by_index, rollout={"on_error": "drop"}), lambda r: r.group_id.startswith("a1-s000002")
    )
    with pytest.raises(EngineError, match=r"all 4 rollouts of step 2 failed \(RequestTimeout\); see view errors"):
        bench.train()
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert (checkpoint.read_state(saved).step, checkpoint.read_state(saved).sampler["position"]) == (1, 2)


def ledger(version: int, served: str | None = "good") -> list[Published]:
    return [Published(version, "good", WeightSync("policy/0", 0, 0, checksum_served=served))]


@pytest.mark.parametrize(
    ("served", "found"), [("good", []), (None, []), ("stale", ["stale_engine"])], ids=["well", "unknown", "stale"]
)
def test_a_stale_sync_is_an_alert_and_training_goes_on(
    tmp_path: Path, recorded: Recorded, served: str | None, found: list[str]
) -> None:
    """In the step it happens in, by default."""
    bench = Bench(tmp_path, by_index)
    bench.policy.sync_weights = lambda: ledger(0, served)  # type: ignore[method-assign]
    assert bench.train().status == "finished"
    assert alerts(recorded) == found


def test_or_the_run_stops_after_the_step(tmp_path: Path, recorded: Recorded) -> None:
    """Which is whole: its checkpoint can be resumed from."""
    bench = Bench(tmp_path, by_index, rollout={"on_stale": "fail"})
    bench.policy.sync_weights = lambda: ledger(0, "stale")  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"policy/0 serves weights stale .*; set rollout.on_stale: alert to go"):
        bench.train()
    (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert (checkpoint.read_state(saved).step, checkpoint.read_state(saved).sampler["position"]) == (1, 2)
    assert len(bench.watcher.steps) == 1
    assert alerts(recorded) == ["stale_engine"]


def test_an_engine_that_is_stale_from_the_start_never_samples(tmp_path: Path, recorded: Recorded) -> None:
    """The first sync counts too."""
    bench = Bench(tmp_path, by_index, rollout={"on_stale": "fail"})
    bench.cluster.ledger = [ledger(0), ledger(0, "stale")]
    with pytest.raises(EngineError, match="serves weights stale"):
        bench.train()
    assert bench.calls == []
    assert alerts(recorded) == ["stale_engine"]


def test_a_replica_that_does_not_take_the_first_weights_is_an_alert(tmp_path: Path, recorded: Recorded) -> None:
    """Known by the workers' word, though no sync ever had it."""
    bench = Bench(tmp_path, by_index)
    bench.cluster.replicas = ["policy/0", "policy/1"]
    bench.cluster.ledger = [ledger(0)]
    bench.train()
    assert alerts(recorded) == ["lost_replica"]


@pytest.mark.parametrize("on_stale", ["alert", "fail"])
def test_rollouts_of_older_weights_are_found_before_they_are_learned_from(
    tmp_path: Path, recorded: Recorded, on_stale: str
) -> None:
    """The engine got version 1 after step 1, and step 2 is sampled by version 0."""
    bench = Bench(tmp_path, by_index, rollout={"on_stale": on_stale})
    bench.policy.behind = {"p/2": 1, "p/3": 1}
    bench.policy.sync_weights = lambda: ledger(1)  # type: ignore[method-assign]
    if on_stale == "alert":
        bench.train()
        assert len(bench.policy.trained) == 8
    else:
        with pytest.raises(
            EngineError, match=r"with weights of policy_version 0, it was given 1; set rollout.on_stale"
        ):
            bench.train()
        assert len(bench.policy.trained) == 4
        (saved,) = checkpoint.checkpoints(tmp_path / "checkpoints")
        assert checkpoint.read_state(saved).step == 1
    assert alerts(recorded) == ["stale_rollouts"]


def test_servers_that_keep_their_weights_are_not_stale(tmp_path: Path, recorded: Recorded) -> None:
    """They were never given others, whatever version was published."""
    servers = {"engine": "openai", "openai": {"urls": ["http://127.0.0.1:1"], "weights": "none"}}
    bench = Bench(tmp_path, by_index, rollout=servers)
    bench.policy.sync_weights = lambda: ledger(5, None)  # type: ignore[method-assign]
    assert bench.train().status == "finished"
    assert alerts(recorded) == []


def test_steps_that_never_sync_are_not_stale(tmp_path: Path, recorded: Recorded) -> None:
    """What is old is told by what the engine was given, not by what was trained since."""
    bench = Bench(tmp_path, by_index)
    bench.policy.sync_weights = list  # type: ignore[method-assign]
    controller = bench.controller()
    controller.train()
    assert controller.policy_version == 2
    assert alerts(recorded) == []


@pytest.mark.parametrize("method", ["sample", "start", "sync_weights"])
def test_a_worker_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """After the time given, and at once from then on: a checkpoint asked of it would wait for ever."""
    waited: list[float | None] = []

    def get(references: list[Any], timeout: float | None = None) -> Any:
        waited.append(timeout)
        raise worker_group.GetTimeoutError("no answer")

    class Actor:
        def __getattr__(self, name: str) -> Any:
            return Actor()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return Actor()

    monkeypatch.setattr(worker_group.ray, "get", get)
    monkeypatch.setattr(worker_group.ray, "remote", Actor())
    group = WorkerGroup(Worker, "policy", 2)
    ask = partial(group.scatter, method, [[], []]) if method == "sample" else partial(group.call, method)
    with pytest.raises(WorkerError, match=f"a policy worker has not answered {method} for 7 s: it hangs; go on from"):
        ask(timeout_s=7)
    with pytest.raises(WorkerError, match=f"has not answered {method} for 7 s"):
        group.call_rank(0, "save")
    assert waited == [7]
