"""How rollouts are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section


class VllmSection(Section):
    """vLLM in the policy worker's process."""

    kv_cache_gib: float = Field(default=1.0, gt=0, description="memory of vLLM's KV cache, in GiB per worker")


class RolloutSection(Section):
    """How rollouts are sampled."""

    engine: Literal["native", "vllm"] = Field(
        default="native", description="rollout engine; native shares the policy's own weights, vllm holds a copy"
    )
    vllm: VllmSection = Field(default_factory=VllmSection, description="options of the vllm engine")
    group_size: int = Field(default=8, ge=1, description="rollouts per prompt")
    max_new_tokens: int = Field(default=256, ge=1, description="cap on sampled tokens of a rollout")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature; the same in training")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass")
    top_k: int | None = Field(default=None, ge=1, description="keep the k likeliest tokens; off when unset")
    stop: list[str] = Field(
        default_factory=list, description="strings that end a response, besides the end-of-turn token"
    )
    max_batch_size: int = Field(default=256, ge=1, description="rollouts decoded at once per worker")

    @model_validator(mode="after")
    def _engine_options(self) -> RolloutSection:
        # Defaults are let through, so that a resolved config can be loaded again.
        if self.engine != "vllm" and self.vllm != VllmSection():
            raise ValueError(f"vllm has no effect with engine {self.engine}; set engine: vllm or remove vllm")
        if self.engine == "vllm" and self.temperature < 0.01:
            raise ValueError(
                f"vLLM samples temperature={self.temperature:g} at 0.01; raise temperature or set engine: native"
            )
        return self
