"""The reward worker: scores rollouts in a process of its own and records every component.

Loads torch only for what needs it, a reward model or the penalty on length: most runs start this worker in a quarter
of the processor time that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from core_trainer.job import Job
from core_trainer.rewards import Component, ComponentFailed, RewardInput, RewardResult, RewardScorer
from core_trainer.types import Prompt, Rollout
from core_trainer.workers.base import Place, Worker, use_threads
from rlinsight import names, telemetry
from rlinsight.config import ClassifierReward, Config, JudgeReward
from rlinsight.config.shaping import OVERLONG, OverlongSection
from rlinsight.errors import RewardError


class RewardWorker(Worker):
    """Scores rollouts with the configured reward functions."""

    BUCKETS: Mapping[str, str] = {"score": "productive"}

    def __init__(self, place: Place, job: Job, config: Config, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.config = config
        self.scorer: RewardScorer | None = None

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Load every reward function and model. Raises ConfigError or ModelError for one that cannot be used, DataError
        for the first prompt that no response could score on.
        """
        if any(isinstance(function, ClassifierReward | JudgeReward) for function in self.config.reward.functions):
            use_threads(self.place.world_size)
        validation = self.config.validation.datasets if self.config.validation is not None else []
        datasets = [self.config.data, *(dataset.as_data(self.config.data) for dataset in validation)]
        self.scorer = RewardScorer(self.config.reward, datasets)
        self.scorer.check(prompts)

    def score(self, rollouts: Sequence[Rollout], dataset: int = 0) -> list[RewardResult]:
        """Reward and components of each rollout, in order; ``dataset`` is 0 for training, n for the nth of validation.

        Raises RewardError when a component failed and ``reward.on_error`` is fail; what failed is recorded first.
        """
        assert self.scorer is not None, "start comes first"
        items = [
            RewardInput(rollout.rollout_id, rollout.prompt, rollout.response_text, rollout.num_response_tokens, dataset)
            for rollout in rollouts
        ]
        try:
            results = self.scorer.score(items)
        except ComponentFailed as failure:
            self._record(rollouts, failure.results)
            raise RewardError(str(failure)) from None
        section = self.config.algorithm.shaping.overlong
        if section is not None and dataset == 0:
            results = _with_overlong(rollouts, results, section, self.config.rollout.max_new_tokens)
        self._record(rollouts, results)
        return results

    def close(self) -> bool:
        """End the verifier processes and deliver what is recorded."""
        try:
            if self.scorer is not None:
                self.scorer.close()
        finally:
            delivered = super().close()
        return delivered

    def _record(self, rollouts: Sequence[Rollout], results: Sequence[RewardResult]) -> None:
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        drops = self.config.reward.on_error == "drop"
        for result in results:
            _record(by_id[result.rollout_id], result, "dropped" if drops else "error")


def _with_overlong(
    rollouts: Sequence[Rollout], results: Sequence[RewardResult], section: OverlongSection, max_length: int
) -> list[RewardResult]:
    """Add DAPO's penalty on length as one more component; a rollout without reward gets none."""
    import torch

    from core_trainer.algorithms.shaping import overlong

    buffer = section.buffer or max(1, max_length // 5)
    lengths = torch.tensor([rollout.num_response_tokens for rollout in rollouts])
    penalties = overlong(lengths, max_length=max_length, buffer=buffer, factor=section.factor).tolist()
    added = []
    for result, penalty in zip(results, penalties, strict=True):
        component = Component(OVERLONG, 1.0, penalty, None, None, 0.0, None)
        reward = None if result.reward is None else result.reward + penalty
        added.append(replace(result, reward=reward, components=(*result.components, component)))
    return added


def _record(rollout: Rollout, result: RewardResult, failed: str) -> None:
    """In the rollout's trace: one event per component, one for their sum. ``failed`` is the status of a failure."""
    identity = {names.ROLLOUT_ID: rollout.rollout_id, names.GROUP_ID: rollout.group_id}
    for component in result.components:
        attributes = {
            **identity,
            names.COMPONENT: component.name,
            names.COMPONENT_WEIGHT: component.weight,
            names.COMPONENT_LATENCY: component.latency_s,
            names.COMPONENT_VALUE: component.value,
            names.COMPONENT_LABEL: component.label if component.error is None else "error",
            names.COMPONENT_EXPLANATION: component.explanation if component.error is None else component.error,
        }
        telemetry.event(names.REWARD_COMPONENT, _known(attributes), carrier=rollout.carrier)
    if result.reward is None and result.error is None:  # the run ended before every component had spoken
        return
    scored = {
        **identity,
        names.REWARD_VALUE: result.reward,
        names.STATUS: "ok" if result.error is None else failed,
        names.REASON: result.error,
    }
    telemetry.event(names.ROLLOUT_SCORED, _known(scored), carrier=rollout.carrier)


def _known(attributes: Mapping[Any, str | float | None]) -> dict[str, str | float]:
    return {name: value for name, value in attributes.items() if value is not None}
