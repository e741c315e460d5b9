"""What the trainer asks of a rollout engine, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from core_trainer.types import SamplingParams, Turn


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to sample: token ids in, token ids and log-probs out. Batching is the engine's business."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class SyncedBytes:
    """What a weight sync cost."""

    moved: int  # bytes copied into the engine; 0 when it shares the policy's weights
    refreshed: int  # bytes of the engine's own packed copies rewritten in place


class RolloutEngine(Protocol):
    """Asynchronous and per request."""

    name: str

    def sync_weights(self, policy_version: int) -> SyncedBytes:
        """Serve the policy's current weights from the next request on. Called between generations."""
        ...

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. An aborted one returns what it has, with finish_reason abort.

        Raises RlinsightError when the engine cannot take the request or fails while sampling it.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored, since it may have just finished."""
        ...
