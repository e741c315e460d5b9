"""What vLLM tells of its iterations, as our engine samples."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from core_trainer.rollout.serving import SAMPLE_INTERVAL_S, EngineState, record_state


class Iterations:
    """Totals over the iterations of one vLLM engine, whose own statistics are of the last one alone.

    Has the methods that vLLM's engine calls of its StatLoggerManager.
    """

    def __init__(self, engine: str, replica: str) -> None:
        self.engine, self.replica = engine, replica
        self._state = EngineState(
            running=0, prefix_queries=0, prefix_hits=0, prompt_tokens=0, generation_tokens=0, preemptions=0, awake=True
        )
        self._sampled_at = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int | None = None
    ) -> None:
        """Take in SchedulerStats and IterationStats, either of which may be None.

        Records a sample when work begins, each SAMPLE_INTERVAL_S, and when none is left.
        """
        before, state = self._state, self._state
        if iteration_stats is not None:
            state = replace(
                state,
                prompt_tokens=_sum(state.prompt_tokens, iteration_stats.prompt_token_stats.computed),
                generation_tokens=_sum(state.generation_tokens, iteration_stats.num_generation_tokens),
                preemptions=_sum(state.preemptions, iteration_stats.num_preempted_reqs),
            )
        if scheduler_stats is not None:
            prefix = scheduler_stats.prefix_cache_stats
            state = replace(
                state,
                running=scheduler_stats.num_running_reqs,
                waiting_capacity=scheduler_stats.num_waiting_reqs,
                waiting_deferred=scheduler_stats.num_skipped_waiting_reqs,
                kv_usage=scheduler_stats.kv_cache_usage,
                prefix_queries=_sum(state.prefix_queries, prefix.queries if prefix else 0),
                prefix_hits=_sum(state.prefix_hits, prefix.hits if prefix else 0),
            )
        self._state = state
        if _busy(before) != _busy(state) or time.monotonic() - self._sampled_at >= SAMPLE_INTERVAL_S:
            self._sample()

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """The engine went to sleep (1) or woke (0)."""
        self._state = replace(self._state, awake=not sleep)
        self._sample()

    def log(self) -> None:
        """Nothing to write."""

    def _sample(self) -> None:
        self._sampled_at = time.monotonic()
        record_state(self.engine, self.replica, self._state)


def _sum(total: int | None, more: int) -> int:
    return (total or 0) + more


def _busy(state: EngineState) -> bool:
    return bool(state.running or state.waiting_capacity or state.waiting_deferred)
