"""The reward of a rollout: its components, weighted and summed.

Owns: calling the verifiers, what a failed one does (``on_error``), early checks of the dataset against them.
Does not own: the verifiers, nor the processes that the ones which could hang run in (pool.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Self

from core_trainer.rewards.messages import Call, Reply, Setup
from core_trainer.rewards.numeric import NumericVerifier, answer_number
from core_trainer.rewards.pool import ProcessPool
from core_trainer.rewards.types import Component, RewardInput, RewardResult, Verdict
from core_trainer.tasks import hint
from core_trainer.types import Prompt
from rlinsight.config import (
    DataSection,
    MathVerifyReward,
    NumericReward,
    RewardFunction,
    RewardSection,
    component_name,
)
from rlinsight.errors import DataError, RewardError


class RewardScorer:
    """Scores rollouts in batches. Holds processes: close it, or use it in a ``with``."""

    def __init__(self, section: RewardSection, data: DataSection) -> None:
        """Loads every function. Raises ConfigError when one cannot be used as configured."""
        self._section = section
        self._numeric = {i: NumericVerifier(f) for i, f in enumerate(section.functions) if isinstance(f, NumericReward)}
        pooled = [function for function in section.functions if not isinstance(function, NumericReward)]
        self._pooled = pooled
        self._pool = ProcessPool(Setup(tuple(pooled), data), section.concurrency) if pooled else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the verifier processes."""
        if self._pool is not None:
            self._pool.close()

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise DataError for the first prompt a function could not score whatever the response."""
        needs_answer = any(isinstance(f, NumericReward | MathVerifyReward) for f in self._section.functions)
        traits = self._pool.traits if self._pool is not None else ()
        for prompt in prompts:
            if needs_answer and prompt.answer is None:
                raise DataError(f"prompt {prompt.prompt_id} has no answer to score against; set data.answer_column")
            if self._numeric:
                try:
                    answer_number(prompt.answer)
                except ValueError as error:
                    raise DataError(f"prompt {prompt.prompt_id}: {error}; reward numeric needs one") from None
            for function, trait in zip(self._pooled, traits, strict=True):
                for column in sorted(trait.required_columns - prompt.columns.keys()):
                    raise DataError(
                        f"prompt {prompt.prompt_id} has no column {column!r}, which reward "
                        f"{component_name(function)!r} takes; {hint(column, prompt.columns)}"
                    )

    def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per item, in order. Raises RewardError at the first failure when ``on_error`` is fail."""
        replies = self._ask_pool(items)
        results = []
        for position, item in enumerate(items):
            components: list[Component] = []
            pooled = iter(replies[position])
            for index, function in enumerate(self._section.functions):
                reply = self._score_here(index, item) if index in self._numeric else next(pooled)
                self._fail_if_told_to(function, item, reply)
                components += _components(function, reply)
            reward = sum((c.weight * c.value for c in components if c.value is not None), 0.0)
            results.append(RewardResult(item.rollout_id, reward, tuple(components)))
        return results

    def _ask_pool(self, items: Sequence[RewardInput]) -> dict[int, list[Reply]]:
        """Replies of the pooled functions by item, in the functions' order."""
        if self._pool is None:
            return defaultdict(list)
        calls = [
            Call(position * len(self._pooled) + i, i, item, function.timeout_s)
            for position, item in enumerate(items)
            for i, function in enumerate(self._pooled)
        ]
        replies = self._pool.run(calls, stop_on_error=self._section.on_error == "fail")
        by_item = defaultdict[int, list[Reply]](list)
        for call in calls:
            if call.call_id in replies:
                reply = replies[call.call_id]
                self._fail_if_told_to(self._pooled[call.function], call.item, reply)
                by_item[call.call_id // len(self._pooled)].append(reply)
        return by_item

    def _score_here(self, index: int, item: RewardInput) -> Reply:
        started = time.perf_counter()
        verdicts, error = list[Verdict](), None
        try:
            verdicts = self._numeric[index](item)
        except ValueError as raised:
            error = str(raised)
        return Reply(0, tuple(verdicts), error, time.perf_counter() - started)

    def _fail_if_told_to(self, function: RewardFunction, item: RewardInput, reply: Reply) -> None:
        if reply.error is not None and self._section.on_error == "fail":
            raise RewardError(
                f"reward {component_name(function)!r} on rollout {item.rollout_id}: {reply.error}; "
                "fix it, or set reward.on_error: zero to count such rollouts as 0"
            )


def _components(function: RewardFunction, reply: Reply) -> list[Component]:
    """A function that scores several things gives a component for each, named function/part."""
    name, weight, latency = component_name(function), function.weight, reply.latency_s
    if reply.error is not None:
        return [Component(name, weight, None, "error", None, latency, reply.error)]
    return [
        Component(f"{name}/{v.part}" if v.part else name, weight, v.value, v.label, v.explanation, latency, None)
        for v in reply.verdicts
    ]
