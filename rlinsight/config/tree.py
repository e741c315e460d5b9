"""The whole config, and the combinations of sections that are refused."""

from __future__ import annotations

import hashlib
import json

from pydantic import Field, model_validator

from rlinsight.config.algorithm import AlgorithmSection
from rlinsight.config.base import Section
from rlinsight.config.data import DataSection
from rlinsight.config.model import ModelSection
from rlinsight.config.reward import RewardSection, TaskReward
from rlinsight.config.rollout import RolloutSection
from rlinsight.config.run import RunSection
from rlinsight.config.telemetry import TelemetrySection
from rlinsight.config.trainer import TrainerSection
from rlinsight.config.validation import ValidationSection


class Config(Section):
    """The whole run."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    validation: ValidationSection | None = Field(default=None, description="none when unset")
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} with {self.algorithm.name} gives zero advantages; "
                "set rollout.group_size >= 2"
            )
        if self.model.lora is not None and self.model.lora.sync == "adapter" and self.rollout.engine != "native":
            raise ValueError(
                f"model.lora.sync=adapter works with rollout.engine: native only, not {self.rollout.engine}; "
                "set model.lora.sync: merged"
            )
        groups, workers = self.trainer.prompts_per_step, self.trainer.num_workers
        if groups % workers:
            raise ValueError(
                f"trainer.prompts_per_step={groups} does not divide by trainer.num_workers={workers}; "
                f"set prompts_per_step to a multiple of {workers}"
            )
        if groups // workers < self.algorithm.num_mini_batches:
            raise ValueError(
                f"algorithm.num_mini_batches={self.algorithm.num_mini_batches} with {groups // workers} prompts "
                "per worker leaves a mini-batch empty; lower num_mini_batches or raise trainer.prompts_per_step"
            )
        if self.validation is not None:
            self.validation.check(self.rollout, self.reward)
        elif self.trainer.keep_best:
            raise ValueError(
                "trainer.keep_best has no effect without validation; add a validation section or remove it"
            )
        uses_task = any(isinstance(function, TaskReward) for function in self.reward.functions)
        if uses_task and not self.data.train.startswith("reasoning_gym:"):
            raise ValueError(
                f"reward type reasoning_gym needs data.train: reasoning_gym:<task>, not {self.data.train!r}"
            )
        return self

    def hash(self) -> str:
        """sha256 over the resolved values, so equal settings give equal hashes."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
