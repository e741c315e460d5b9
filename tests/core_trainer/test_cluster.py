"""How a run starts its Ray."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from ray._private.node import Node

from core_trainer import cluster
from rlinsight import config
from rlinsight.errors import WorkerError


@pytest.mark.parametrize("fails", [False, True])
def test_ray_starts_without_idle_services_and_a_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """While Ray starts, and no longer, its node has them replaced; SIGTERM stays launch's whatever becomes of it."""
    services = [getattr(Node, name) for name in cluster.IDLE_SERVICES]  # this Ray has each of them

    def init(*_: Any, num_cpus: int, **__: Any) -> None:
        assert num_cpus == 3
        assert [getattr(Node, name)(None) for name in cluster.IDLE_SERVICES] == [None] * 3
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if fails:
            raise Exception("The node timed out.\nIt is busy.")

    monkeypatch.setattr(cluster.ray, "init", init)
    handler = signal.getsignal(signal.SIGTERM)
    started = cluster.Cluster.__new__(cluster.Cluster)
    if fails:
        with pytest.raises(WorkerError, match=r"Ray did not start \(The node timed out. It is busy.\); free memory"):
            started._start_ray(3)
    else:
        started._start_ray(3)
    assert [getattr(Node, name) for name in cluster.IDLE_SERVICES] == services
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, 1 + 2),
        ({"algorithm": {"name": "ppo", "kl": {"coef": 0.1}}}, 1 + 2 * 3),
        ({"algorithm": {"kl": {"coef": 0.1}}, "model": {"source": "m", "lora": {}}}, 1 + 2),
        ({"rollout": {"engine": "vllm_server", "vllm": {"replicas": 3}}}, 1 + 2 + 3),
    ],
)
def test_every_worker_has_a_process_that_waits_for_it(tree: dict[str, Any], expected: int) -> None:
    """Reward, a policy each rank with what stands beside it, and the owners of servers: all are counted."""
    base = {
        "model": {"source": "m"},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "trainer": {"num_workers": 2},
    }
    assert cluster.num_processes(config.parse(base | tree)) == expected


def test_a_start_has_an_hour_or_as_long_as_requests_take() -> None:
    """A short ``request_timeout_s`` does not cut off the loading of a model, a long one is waited for."""
    base = {"model": {"source": "m"}, "data": {"train": "d.jsonl"}, "reward": {"functions": [{"type": "numeric"}]}}
    for rollout, expected in (({"request_timeout_s": 5}, 3600), ({"request_timeout_s": 4000, "retries": 1}, 8060)):
        assert cluster.start_limit_s(config.parse(base | {"rollout": rollout})) == expected
