"""A rollout engine that answers from a script: per request a turn, an error, silence, or whatever the test wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode, WeightSync
from core_trainer.types import Turn
from rlinsight.errors import EngineError

Answer = Turn | BaseException | None  # None: no answer ever
Script = Callable[[GenerateRequest, int], Answer]


class ScriptedEngine:
    """Asks ``script`` what to do with a request, given how often it was asked about anything before."""

    name = "scripted"

    def __init__(self, script: Script | None = None, replica: str = "policy/0") -> None:
        self.script = script or (lambda request, _: turn(request))
        self.replica = replica
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.policy_version = 0

    async def generate(self, request: GenerateRequest) -> Turn:
        self.requests.append(request)
        answer = self.script(request, len(self.requests) - 1)
        await asyncio.sleep(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None
        answer.replica = answer.replica or self.replica
        return answer

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        answer = await self.generate(request)
        yield Chunk(answer.token_ids, answer.rollout_log_probs, answer)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def sync_weights(self, policy_version: int, _pause_mode: PauseMode = "wait") -> list[WeightSync]:
        self.calls.append(f"sync {policy_version}")
        self.policy_version = policy_version
        return [WeightSync(self.replica, 0, 0)]

    def forget(self) -> None:
        """There is no cache."""

    def sleep(self) -> int:
        self.calls.append("sleep")
        return 100

    def wake(self) -> int:
        self.calls.append("wake")
        return 10

    def close(self) -> None:
        self.calls.append("close")


def turn(request: GenerateRequest, tokens: int = 3, **changes: Any) -> Turn:
    """A good answer: token ids that count from 5, each of probability 1/e."""
    now = time.time_ns()
    facts: dict[str, Any] = {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "token_ids": list(range(5, 5 + tokens)),
        "rollout_log_probs": [-1.0] * tokens,
        "text": "x" * tokens,
        "finish_reason": "stop",
        "policy_version": 0,
        "num_cached_tokens": 0,
        "start_ns": now,
        "end_ns": now + 1000,
    }
    return Turn(**(facts | changes))


def dies_after(count: int) -> Script:
    """Every request after so many fails, as of an engine whose process is gone."""
    return lambda request, asked: turn(request) if asked < count else EngineError("the engine's process has ended")
