"""The loop, the optimizer and where they run."""

from __future__ import annotations

from pydantic import Field

from rlinsight.config.base import Section


class TrainerSection(Section):
    """The loop, the optimizer and where they run."""

    total_steps: int = Field(default=100, ge=1, description="optimizer iterations of the loop")
    prompts_per_step: int = Field(default=8, ge=1, description="prompts (groups) per step")
    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate of AdamW")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up; constant after")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW betas")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient norm is clipped to this")
    micro_batch_tokens: int = Field(
        default=4096, ge=1, description="tokens per forward and backward; memory, not results, depends on it"
    )
    num_workers: int = Field(default=1, ge=1, description="data-parallel policy workers")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 keeps only the last one")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")
