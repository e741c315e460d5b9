"""The models a run loads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rlinsight.config.base import Section


class LoraSection(Section):
    """Train low-rank adapters and leave the model as it is (arXiv 2106.09685).

    The reference is the model with its adapters off, so a KL term loads no second model. There is no dropout: the
    policy that is trained has to be the one that was sampled from.
    """

    rank: int = Field(default=16, ge=1, description="rank of each adapter")
    alpha: float = Field(default=32.0, gt=0, description="an adapter is scaled by alpha / rank")
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="linear layers to adapt, by name such as q_proj; all-linear is every one but the output layer",
    )
    sync: Literal["merged", "adapter"] = Field(
        default="merged",
        description="what the rollout engine gets. merged: weights with the adapter added, fastest to sample from, "
        "rounded once more than training's. adapter: the adapter alone, computed as training does; native engine only",
    )

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: str | list[str]) -> str | list[str]:
        if not targets:
            raise ValueError("targets is empty, so there is nothing to train; name layers or write all-linear")
        return targets


class ModelSection(Section):
    """The policy to train."""

    source: str = Field(
        description="safetensors directory, Hugging Face id, .gguf file, or package:<name> of a package that ships one"
    )
    revision: str | None = Field(default=None, description="hub revision; hub ids only")
    master_dtype: Literal["float32", "compute"] = Field(
        default="float32",
        description="precision the optimizer updates; with 'compute' in bfloat16, small updates round to nothing",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="precision of forward and backward; auto picks bfloat16 where the processor has it"
    )
    lora: LoraSection | None = Field(default=None, description="train adapters only; null trains every weight")
