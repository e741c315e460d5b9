"""What vLLM tells of its iterations, as our engine samples."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from core_trainer.rollout.serving import SAMPLE_INTERVAL_S, EngineState, record_state


class Iterations:
    """Totals over the iterations of one vLLM engine. Its own statistics are of the last iteration alone."""

    def __init__(self, engine: str, replica: str) -> None:
        self.engine, self.replica = engine, replica
        self._state = EngineState(
            running=0, prefix_queries=0, prefix_hits=0, prompt_tokens=0, generation_tokens=0, preemptions=0, awake=True
        )
        self._sampled_at = 0.0

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Take in vLLM's SchedulerStats and IterationStats, either of which may be None, and record a sample now and
        then: when work begins, each SAMPLE_INTERVAL_S, and when none is left.
        """
        before, state = self._state, self._state
        if iteration is not None:
            state = replace(
                state,
                prompt_tokens=_sum(state.prompt_tokens, iteration.prompt_token_stats.computed),
                generation_tokens=_sum(state.generation_tokens, iteration.num_generation_tokens),
                preemptions=_sum(state.preemptions, iteration.num_preempted_reqs),
            )
        if scheduler is not None:
            prefix = scheduler.prefix_cache_stats
            state = replace(
                state,
                running=scheduler.num_running_reqs,
                waiting_capacity=scheduler.num_waiting_reqs,
                waiting_deferred=scheduler.num_skipped_waiting_reqs,
                kv_usage=scheduler.kv_cache_usage,
                prefix_queries=_sum(state.prefix_queries, prefix.queries if prefix else 0),
                prefix_hits=_sum(state.prefix_hits, prefix.hits if prefix else 0),
            )
        self._state = state
        if _busy(before) != _busy(state) or time.monotonic() - self._sampled_at >= SAMPLE_INTERVAL_S:
            self.sample()

    def set_awake(self, awake: bool) -> None:
        """Weights and cache are in device memory, or not."""
        self._state = replace(self._state, awake=awake)
        self.sample()

    def sample(self) -> None:
        """Record the state as it is."""
        self._sampled_at = time.monotonic()
        record_state(self.engine, self.replica, self._state)


def _sum(total: int | None, more: int) -> int:
    return (total or 0) + more


def _busy(state: EngineState) -> bool:
    return bool(state.running or state.waiting_capacity or state.waiting_deferred)
