"""The loop, the optimizer and where they run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section


class TrainerSection(Section):
    """The loop, the optimizer and where they run."""

    total_steps: int = Field(default=100, ge=1, description="optimizer iterations of the loop")
    prompts_per_step: int = Field(default=8, ge=1, description="prompts (groups) per step")
    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate of AdamW")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up; lr_schedule after")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the learning rate falls after warm-up, until total_steps"
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="share of the peak that linear and cosine fall towards"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW betas")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient norm is clipped to this")
    micro_batch_tokens: int = Field(
        default=4096,
        ge=1,
        description="tokens per forward and backward: memory depends on it, results only up to rounding of log-probs",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="keep only each layer's input for the backward pass and compute the rest again: "
        "less memory, about a third more time, the same gradients",
    )
    num_workers: int = Field(default=1, ge=1, description="data-parallel policy workers")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 keeps only the last one")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")
    keep_best: bool = Field(
        default=False, description="write a checkpoint at the best validation so far and keep it until it is beaten"
    )

    @model_validator(mode="after")
    def _betas(self) -> TrainerSection:
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas={list(self.adam_betas)}: each must be at least 0 and below 1")
        return self

    @model_validator(mode="after")
    def _schedule(self) -> TrainerSection:
        if self.lr_schedule == "constant":
            if self.min_lr_ratio:
                raise ValueError(
                    f"min_lr_ratio={self.min_lr_ratio:g} has no effect with lr_schedule=constant; "
                    "set lr_schedule: linear or cosine, or remove min_lr_ratio"
                )
        elif self.total_steps is not None and self.warmup_steps >= self.total_steps:  # None: a supervised run's epochs
            raise ValueError(
                f"lr_schedule={self.lr_schedule} never begins: warmup_steps={self.warmup_steps} of "
                f"total_steps={self.total_steps}; lower warmup_steps or set lr_schedule: constant"
            )
        return self
