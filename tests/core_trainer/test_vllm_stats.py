"""vLLM's statistics of single iterations become running totals, sampled when it matters. vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core_trainer.rollout.vllm import options
from core_trainer.rollout.vllm.stats import Iterations
from rlinsight import names, telemetry
from rlinsight.config import VllmSection
from rlinsight.errors import EngineError


def scheduler(running: int, waiting: int = 0, queries: int = 0, hits: int = 0) -> Any:
    """What vLLM's scheduler says of one iteration, by the names of its SchedulerStats."""
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def iteration(computed: int, sampled: int, preempted: int = 0) -> Any:
    """What was done in it, by the names of IterationStats."""
    return SimpleNamespace(
        prompt_token_stats=SimpleNamespace(computed=computed),
        num_generation_tokens=sampled,
        num_preempted_reqs=preempted,
    )


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Attributes of the engine samples recorded."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(telemetry, "event", lambda name, attributes: found.append({"name": name, **attributes}))
    return found


def test_iterations_add_up(samples: list[dict[str, Any]]) -> None:
    """Counters are sums over all iterations, levels those of the last; either part may be missing."""
    iterations = Iterations("vllm", "policy/0")
    iterations.record(scheduler(2, waiting=3, queries=40, hits=8), iteration(32, 2))
    iterations.record(None, iteration(0, 2, preempted=1))
    iterations.record(scheduler(1, queries=5), None)
    iterations.record_sleep_state(1, 1)
    last = samples[-1]
    assert {row["name"] for row in samples} == {names.ENGINE_SAMPLE}
    assert (last[names.RUNNING], last[names.WAITING_CAPACITY], last[names.WAITING_DEFERRED]) == (1, 0, 1)
    assert (last[names.ENGINE_PROMPT_TOKENS], last[names.ENGINE_OUTPUT_TOKENS]) == (32, 4)
    assert (last[names.PREFIX_QUERIES], last[names.PREFIX_HITS], last[names.ENGINE_PREEMPTIONS]) == (45, 8, 1)
    assert (last[names.KV_USAGE], last[names.AWAKE]) == (0.25, False)
    assert (last[names.ENGINE], last[names.REPLICA]) == ("vllm", "policy/0")


def test_beginning_and_end_of_work_are_sampled(samples: list[dict[str, Any]]) -> None:
    """Between them no more often than each half second: a hundred fast iterations are one sample."""
    iterations = Iterations("vllm", "policy/0")
    iterations.record(scheduler(4), iteration(8, 4))
    for _ in range(100):
        iterations.record(scheduler(4), iteration(0, 4))
    assert [row[names.ENGINE_OUTPUT_TOKENS] for row in samples] == [4]
    idle = scheduler(0)
    idle.num_skipped_waiting_reqs = 0
    iterations.record(idle, iteration(0, 4))
    assert [row[names.ENGINE_OUTPUT_TOKENS] for row in samples] == [4, 408]


def test_arguments_are_those_of_the_section() -> None:
    """Memory is in bytes, or a share of the GPU in its place; flags that are off do not reach a command line."""
    arguments = options.engine_arguments(VllmSection(kv_cache_gib=0.5), "float32", 8, 100)
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["max_model_len"] == 100
    words = options.command_line(arguments)
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2**29)
    assert "--enforce-eager" in words
    assert "--enable-sleep-mode" not in words
    shared = VllmSection(gpu_memory_utilization=0.7, sleep_level=1, tensor_parallel_size=2)
    arguments = options.engine_arguments(shared, "bfloat16", 8, 100)
    assert "kv_cache_memory_bytes" not in arguments
    assert (arguments["gpu_memory_utilization"], arguments["tensor_parallel_size"]) == (0.7, 2)
    assert "--enable-sleep-mode" in options.command_line(arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("given", [{"sleep_level": 1}, {"gpu_memory_utilization": 0.5}, {"tensor_parallel_size": 2}])
def test_options_of_gpus_are_refused_without_one(given: dict[str, Any]) -> None:
    """By name and value; the defaults are not."""
    options.check_platform(VllmSection())
    ((name, value),) = given.items()
    with pytest.raises(EngineError, match=f"rollout.vllm.{name}={value} needs a GPU"):
        options.check_platform(VllmSection(**given))
