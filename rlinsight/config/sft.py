"""The config of a supervised run: the same sections, without what only sampling needs."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section
from rlinsight.config.data import DataSection
from rlinsight.config.model import ModelSection
from rlinsight.config.run import RunSection
from rlinsight.config.telemetry import TelemetrySection
from rlinsight.config.trainer import TrainerSection


class SftDataSection(DataSection):
    """Prompts and the responses to learn, which stand in ``answer_column``."""

    max_response_tokens: int = Field(
        default=1024, ge=1, description="longest response, the token that ends it included"
    )
    overlong_responses: Literal["error", "drop"] = Field(
        default="error", description="what a response over max_response_tokens does"
    )
    validation_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="share of the examples held out for the validation loss, by run.seed"
    )


class SftSection(Section):
    """Cross-entropy of the responses, mean over the tokens of a step; prompts are not trained on."""

    name: Literal["sft"] = Field(default="sft", description="supervised fine-tuning")


class SftTrainerSection(TrainerSection):
    """The loop, the optimizer and where they run."""

    # Unset as long as epochs say how long to train; the schedule then ends where they do.
    total_steps: int | None = Field(default=None, ge=1, description="optimizer steps, instead of epochs")  # type: ignore[assignment]
    epochs: int = Field(default=1, ge=1, description="passes over the examples")
    prompts_per_step: int = Field(default=8, ge=1, description="examples per step")
    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate of AdamW")
    validate_every: int = Field(
        default=0, ge=0, description="steps between validations; 0 validates before the first step and after the last"
    )

    @model_validator(mode="after")
    def _one_length(self) -> SftTrainerSection:
        if self.total_steps is not None and self.epochs != type(self).model_fields["epochs"].default:
            raise ValueError(f"epochs={self.epochs} has no effect with total_steps={self.total_steps}; remove one")
        return self


class SftConfig(Section):
    """A supervised run."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: SftDataSection
    algorithm: SftSection = Field(default_factory=SftSection)
    trainer: SftTrainerSection = Field(default_factory=SftTrainerSection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)

    @model_validator(mode="after")
    def _combinations(self) -> SftConfig:
        for option in ("validate_every", "keep_best"):
            if getattr(self.trainer, option) and not self.data.validation_fraction:
                raise ValueError(
                    f"trainer.{option} has no effect without validation; set data.validation_fraction or remove it"
                )
        if self.model.lora is not None and self.model.lora.sync != type(self.model.lora).model_fields["sync"].default:
            raise ValueError("model.lora.sync has no effect without a rollout engine; remove it")
        return self

    def hash(self) -> str:
        """sha256 over the resolved values, so equal settings give equal hashes."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
