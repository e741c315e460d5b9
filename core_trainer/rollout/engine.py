"""What the trainer asks of a rollout engine, whichever it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from core_trainer.types import SamplingParams, Turn
from rlinsight.otlp import AttributeValue

PauseMode = Literal["wait", "keep", "abort"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to sample: token ids in, token ids and log-probs out. Batching is the engine's business."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    carrier: Mapping[str, str] = field(default_factory=dict)  # W3C trace context of the turn's span
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)  # the rollout's identity, for telemetry
    session: str | None = None  # requests of one session share prefixes; a router keeps them on one replica
    avoid: frozenset[str] = frozenset()  # replicas that failed on it before; a router takes another while there is one


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a request as they come. The last one carries the whole turn."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class WeightSync:
    """What one replica's weight sync did."""

    replica: str
    moved: int  # bytes copied into the engine; 0 when it shares the policy's weights
    refreshed: int  # bytes of the engine's own packed copies rewritten in place
    pause_mode: PauseMode = "wait"  # what became of the requests in flight
    in_flight: int = 0  # requests when the sync began
    aborted: int = 0  # of those
    checksum_served: str | None = None  # of the weights the replica has now; None where it cannot tell
    start_ns: int | None = None  # unix times of its own part, where others took theirs meanwhile
    end_ns: int | None = None


class RolloutEngine(Protocol):
    """Asynchronous and per request. ``replica`` is its name in telemetry; a router's replicas have names of their own.

    An engine records each request it served, as a child of ``GenerateRequest.carrier``, and what it was doing while it
    ran, through ``serving.py``.
    """

    name: str
    replica: str

    def sync_weights(self, policy_version: int) -> list[WeightSync]:
        """Serve the policy's current weights from the next request on; one entry a replica. Called between generations.

        Raises EngineError when a replica did not take them.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. An aborted one returns what it has, with finish_reason abort.

        Raises EngineError when the engine cannot take the request or fails while sampling it.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The same, token by token as they are sampled. Leaving the iteration early aborts the request."""
        ...

    def forget(self) -> None:
        """Drop keys and values that later requests could share, so that none is computed in other shapes for what came
        before it. A server keeps its own.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored, since it may have just finished."""
        ...

    def sleep(self) -> int:
        """Give device memory (KV cache, weights of its own) back before training; returns bytes freed, 0 on a CPU."""
        ...

    def wake(self) -> int:
        """Take it again before generating; returns bytes taken."""
        ...

    def close(self) -> None:
        """Release what the engine holds outside its Python objects: processes, sockets."""
        ...
