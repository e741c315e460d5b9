"""The reward worker: scores rollouts in a process of its own and records every component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core_trainer.job import Job
from core_trainer.rewards import RewardInput, RewardResult, RewardScorer
from core_trainer.types import Prompt, Rollout
from core_trainer.workers.base import Place, Worker
from rlinsight import names, telemetry
from rlinsight.config import Config


class RewardWorker(Worker):
    """Scores rollouts with the configured reward functions."""

    BUCKETS: Mapping[str, str] = {"score": "productive"}

    def __init__(self, place: Place, job: Job, config: Config, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.config = config
        self.scorer: RewardScorer | None = None

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Load every reward function. Raises ConfigError for one that cannot be used, DataError for the first prompt
        that no response could score on.
        """
        self.scorer = RewardScorer(self.config.reward, self.config.data)
        self.scorer.check(prompts)

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Reward of each rollout, in order."""
        items = [RewardInput(rollout.rollout_id, rollout.prompt, rollout.response_text) for rollout in rollouts]
        assert self.scorer is not None, "start comes first"
        results = self.scorer.score(items)
        for rollout, result in zip(rollouts, results, strict=True):
            _record(rollout, result)
        return [result.reward for result in results]

    def close(self) -> bool:
        """End the verifier processes and deliver what is recorded."""
        if self.scorer is not None:
            self.scorer.close()
        return super().close()


def _record(rollout: Rollout, result: RewardResult) -> None:
    """In the rollout's trace: one event per component, one for their sum."""
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
        known = {name: value for name, value in attributes.items() if value is not None}
        telemetry.event(names.REWARD_COMPONENT, known, carrier=rollout.carrier)
    errors = [component.error for component in result.components if component.error is not None]
    scored = {**identity, names.REWARD_VALUE: result.reward, names.STATUS: "error" if errors else "ok"}
    if errors:
        scored[names.REASON] = errors[0]
    telemetry.event(names.ROLLOUT_SCORED, scored, carrier=rollout.carrier)
