"""Where prompts come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlinsight.config.base import Section


class DataSection(Section):
    """Where prompts come from."""

    train: str = Field(description="path to .jsonl or .parquet, or reasoning_gym:<task>")
    task_args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the reasoning_gym task, e.g. max_digits: 1"
    )
    size: int | None = Field(
        default=None, ge=1, description="prompts to generate (reasoning_gym) or to keep (files); all when unset"
    )
    prompt_column: str = Field(default="prompt", description="column with text, or a list of {role, content} messages")
    answer_column: str = Field(default="answer", description="column with the ground truth passed to the reward")
    system_prompt: str | None = Field(
        default=None, description="system message of prompts that have none; the chat template's own when unset"
    )
    prompt_suffix: str = Field(default="", description="text added to the end of the last user message")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="longest prompt after the chat template")
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="what a prompt over max_prompt_tokens does"
    )
    shuffle: bool = Field(default=True, description="new order each epoch, from the run's seed")

    @model_validator(mode="after")
    def _no_idle_options(self) -> DataSection:
        if self.task_args and not self.train.startswith("reasoning_gym:"):
            raise ValueError(
                f"task_args only apply to reasoning_gym:<task>, and train is {self.train!r}; remove task_args"
            )
        # Defaults are let through, so that a resolved config can be loaded again.
        fields = type(self).model_fields
        named = [key for key in ("prompt_column", "answer_column") if getattr(self, key) != fields[key].default]
        if named and self.train.startswith("reasoning_gym:"):
            raise ValueError(f"{named[0]} has no effect with {self.train}: items are generated; remove it")
        return self
