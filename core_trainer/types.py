"""What travels between controller, engine, rewards and workers: token ids and floats, no tensors, no models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A dataset item to answer."""

    prompt_id: str  # stable across epochs: "<data_source>/<index>"
    data_source: str  # file name or task the item came from
    text: str  # after the chat template, for people and rewards
    token_ids: tuple[int, ...]  # [P]
    answer: str | None  # ground truth as text; None when the dataset has none
    columns: dict[str, Any] = field(default_factory=dict)  # extra dataset columns, passed to rewards


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples one request."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0  # keep words at least this likely relative to the likeliest; 0 is off
    repetition_penalty: float = 1.0  # divides the positive logits of words seen before and multiplies the others
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits, by token id
    stop: tuple[str, ...] = ()
    seed: int = 0
    num_top_log_probs: int = 0  # likeliest words to report beside each sampled token


@dataclass(slots=True)
class Turn:
    """One generate request of a rollout, as the engine answered it. Model output is never re-tokenised."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # [P]
    token_ids: list[int]  # [T] sampled, T >= 1 unless aborted; the end-of-turn token included when one was sampled
    rollout_log_probs: list[float]  # [T] at the sampling temperature, over the whole vocabulary
    text: str  # special tokens left out
    finish_reason: FinishReason
    policy_version: int  # of the weights that sampled it
    num_cached_tokens: int | None  # prompt tokens taken from another request's KV cache; None: the engine does not tell
    start_ns: int  # unix time of arrival at the engine
    end_ns: int
    replica: str = ""  # engine replica that answered
    carrier: dict[str, str] = field(default_factory=dict)  # W3C trace context of the turn's span
    token_policy_versions: list[int] | None = None  # [T] where weights changed while it was sampled; None: all the same
    top_log_probs: list[list[tuple[int, float]]] | None = None  # [T][k] token id and log-prob, likeliest first

    @property
    def policy_versions(self) -> list[int]:
        """Weights that sampled its tokens: one for all, or one each."""
        return self.token_policy_versions or [self.policy_version]


@dataclass(slots=True)
class Rollout:
    """One sampled trajectory: 1..n turns, one reward. One that failed has an ``error``, and may have no turns."""

    rollout_id: str
    group_id: str
    sample_index: int
    prompt: Prompt
    turns: list[Turn]
    carrier: dict[str, str]  # W3C trace context of the rollout's own trace
    reward: float | None = None  # None until it is scored, and for good when it could not be
    error: str | None = None  # class of what ended it, when its last request failed for good

    @property
    def response_text(self) -> str:
        """Text of all turns."""
        return "".join(turn.text for turn in self.turns)

    @property
    def policy_version(self) -> int:
        """Oldest weights that sampled a token of it; it has a turn."""
        return min(version for turn in self.turns for version in turn.policy_versions)

    @property
    def num_response_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def finish_reason(self) -> FinishReason:
        """How the last turn ended."""
        return "error" if self.error else self.turns[-1].finish_reason
