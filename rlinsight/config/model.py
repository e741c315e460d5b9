"""The models a run loads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlinsight.config.base import Section


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
