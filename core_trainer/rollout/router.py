"""Many replicas as one engine: which of them a request goes to, and which of them may be used at all.

Requests of a session stay on one replica, which has their prefix, unless it is far busier than another. A replica that
failed is left alone for a while, longer each time, and then has to take the current weights again before it gets a
request: it may have been started anew. Whether a failed request is made again is its caller's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode, RolloutEngine, WeightSync
from core_trainer.types import Turn
from rlinsight import names, telemetry
from rlinsight.errors import EngineError, RequestRefused

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
# A session's replica is left for the least loaded one when it is ahead of it by so many requests of this size, and half
# as much again as it has. Below that, computing the prefix again costs more than the wait.
SPILL_REQUESTS, SPILL_RATIO = 8, 1.5

logger = logging.getLogger(__name__)


class PausingEngine(RolloutEngine, Protocol):
    """One that can be told what becomes of requests in flight when its weights change."""

    def sync_weights(self, policy_version: int, pause_mode: PauseMode = "wait") -> list[WeightSync]:
        """See RolloutEngine."""
        ...


@dataclass(eq=False, slots=True)
class Replica:
    """An engine and what the router knows of it."""

    engine: PausingEngine
    load: int = 0  # tokens of prompt and response of the requests it has, at most
    num_routed: int = 0
    failures: int = 0  # in a row
    out_until: float | None = None  # on the router's clock; None: it may be used
    restoring: asyncio.Task[None] | None = None
    push: Future[list[WeightSync] | EngineError] | None = None  # of the weights, the last one since it is out

    @property
    def name(self) -> str:
        """Its name in telemetry."""
        return self.engine.replica

    @property
    def may_take_weights(self) -> bool:
        """False when it did not take them since it failed, or hangs while it is given them."""
        if self.out_until is None or self.push is None:
            return True
        if not self.push.done() or self.push.cancelled() or self.push.exception() is not None:
            return False
        return not isinstance(self.push.result(), EngineError)


class Router:
    """Rollout engine over several. One event loop drives it at a time."""

    def __init__(
        self,
        engines: Sequence[PausingEngine],
        clock: Callable[[], float] = time.monotonic,
        come_back: bool = True,
    ) -> None:
        """``come_back``: whether somebody may start a dead replica again, which requests wait for while all are out."""
        self.replicas = [Replica(engine) for engine in engines]
        self.name = engines[0].name
        self.replica = engines[0].replica if len(engines) == 1 else "router"
        self.policy_version = 0
        self._clock, self._come_back = clock, come_back
        # A replica that hangs keeps its thread; with a pool of its own nothing else waits for that.
        self._threads = ThreadPoolExecutor(len(engines), "restore")
        self._sessions: dict[str, Replica] = {}
        self._at: dict[str, Replica] = {}  # by request id, until answered

    def sync_weights(self, policy_version: int, pause_mode: PauseMode = "wait") -> list[WeightSync]:
        """All at once. A replica that does not take them is not used until it does; EngineError when none did.

        Those that have failed to before, or hang, are left to ``_restore``: each would cost every sync its silence.
        """
        self.policy_version = policy_version
        self._sessions.clear()  # what the old weights computed is of no use
        asked = [replica for replica in self.replicas if replica.may_take_weights] or self.replicas
        with ThreadPoolExecutor(len(asked)) as pool:
            results = list(pool.map(partial(self._sync_alone, pause_mode=pause_mode), asked))
        synced: list[WeightSync] = []
        failed: list[tuple[Replica, EngineError, int, int]] = []
        for replica, (result, start_ns, end_ns) in zip(asked, results, strict=True):
            if isinstance(result, EngineError):
                self._failed(replica, result)
                replica.push = Future()  # it took none: only _restore brings it back
                replica.push.set_result(result)
                failed.append((replica, result, start_ns, end_ns))
            else:
                self._works(replica)
                synced += [replace(sync, start_ns=start_ns, end_ns=end_ns) for sync in result]
        if len(failed) == len(asked):
            raise failed[0][1]
        for replica, error, start_ns, end_ns in failed:  # the caller records those that took them
            facts = self._facts(replica) | {names.ERROR_TYPE: type(error).__name__}
            telemetry.record_span(names.WEIGHT_SYNC, start_ns, end_ns, facts, error=error)
        return synced

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample on one replica. Raises what it raises, with the replica's name; also when it is cancelled."""
        with self._routed(request, await self._pick(request)) as replica:
            return await replica.engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The same, as tokens arrive. Leaving the iteration early aborts the request."""
        with self._routed(request, await self._pick(request)) as replica:
            async with aclosing(replica.engine.stream(request)) as chunks:  # type: ignore[type-var]  # a generator
                async for chunk in chunks:
                    yield chunk

    def abort(self, request_id: str) -> None:
        """Wherever it is."""
        if request_id in self._at:
            self._at[request_id].engine.abort(request_id)

    def forget(self) -> None:
        """All of them."""
        for replica in self.replicas:
            replica.engine.forget()

    def sleep(self) -> int:
        """All that are not out; the sum."""
        return self._sum(lambda engine: engine.sleep())

    def wake(self) -> int:
        """Likewise."""
        return self._sum(lambda engine: engine.wake())

    def close(self) -> None:
        """All of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for replica in self.replicas:
            replica.engine.close()

    # Which replica ----------------------------------------------------------------------------------------------------

    async def _pick(self, request: GenerateRequest) -> Replica:
        """The replica for a request; waits for one that is out only when all are."""
        self._restore_due()
        if not any(replica.out_until is None for replica in self.replicas):
            await self._next_back()
        return self.choose(request)

    def choose(self, request: GenerateRequest) -> Replica:
        """The session's replica or the least loaded one, of those that may be used; one in ``request.avoid`` last."""
        ready = [replica for replica in self.replicas if replica.out_until is None]
        ready = [replica for replica in ready if replica.name not in request.avoid] or ready
        least = min(ready, key=lambda replica: (replica.load, replica.num_routed))
        if request.session is None:
            return least
        usual = self._sessions.get(request.session)
        if usual is None or usual not in ready:
            usual = self._sessions[request.session] = least
        ahead = usual.load - least.load
        is_far_ahead = ahead >= SPILL_REQUESTS * _cost(request) and usual.load >= SPILL_RATIO * least.load
        return least if is_far_ahead else usual

    @contextmanager
    def _routed(self, request: GenerateRequest, replica: Replica) -> Iterator[Replica]:
        """Keeps count of a request while its replica has it, and of the replica's failures."""
        cost = _cost(request)
        replica.load += cost
        replica.num_routed += 1
        self._at[request.request_id] = replica
        failures = replica.failures
        try:
            yield replica
        except RequestRefused as error:
            error.replica = replica.name
            raise
        except EngineError as error:
            error.replica = replica.name
            self._failed(replica, error)
            raise
        except asyncio.CancelledError as error:
            # Who asked had no more time for it. Its next try should not meet the same silence.
            error.replica = replica.name  # type: ignore[attr-defined]  # an EngineError has it
            self._failed(replica, EngineError("it did not answer in time"))
            raise
        else:
            if replica.failures == failures and replica.out_until is None:  # it has not failed since
                replica.failures = 0
        finally:
            replica.load -= cost
            self._at.pop(request.request_id, None)

    # Which may be used ------------------------------------------------------------------------------------------------

    def _failed(self, replica: Replica, error: Exception) -> None:
        if replica.out_until is not None:
            return  # another request of it said so
        replica.failures += 1
        backoff = min(FIRST_BACKOFF_S * 2 ** (replica.failures - 1), LONGEST_BACKOFF_S)
        replica.out_until = self._clock() + backoff
        logger.warning("rollout replica %s is left out for %g s: %s", replica.name, backoff, error)

    def _works(self, replica: Replica) -> None:
        if replica.out_until is not None:
            logger.warning("rollout replica %s is used again", replica.name)
        replica.out_until = replica.push = None

    def _sync_alone(self, replica: Replica, pause_mode: PauseMode) -> tuple[list[WeightSync] | EngineError, int, int]:
        """What came of it, and when it began and ended. Not while it is still given older ones."""
        start_ns = time.time_ns()
        if replica.push is not None:
            wait([replica.push])
        return self._sync(replica, pause_mode), start_ns, time.time_ns()

    def _sync(self, replica: Replica, pause_mode: PauseMode = "wait") -> list[WeightSync] | EngineError:
        try:
            return replica.engine.sync_weights(self.policy_version, pause_mode)
        except EngineError as error:
            return error

    def _sum(self, call: Callable[[RolloutEngine], int]) -> int:
        total = 0
        for replica in self.replicas:
            if replica.out_until is None:
                try:
                    total += call(replica.engine)
                except EngineError as error:
                    self._failed(replica, error)
        return total

    def _facts(self, replica: Replica) -> dict[str, str | int]:
        return {
            names.POLICY_VERSION: self.policy_version,
            names.ENGINE: self.name,
            names.REPLICA: replica.name,
            names.BUCKET: "overhead",
        }

    def _restore_due(self) -> None:
        """Start to bring back those whose time is over."""
        for replica in self.replicas:
            is_due = replica.out_until is not None and replica.out_until <= self._clock()
            if is_due and replica.restoring is None:
                replica.restoring = asyncio.create_task(self._restore(replica))

    async def _restore(self, replica: Replica) -> None:
        """Give a replica the weights again; if it takes them it may be used."""
        try:
            with telemetry.span(names.WEIGHT_SYNC, self._facts(replica)) as span:
                result = await self._push(replica)
                if isinstance(result, EngineError):
                    span.set({names.ERROR_TYPE: type(result).__name__})
                    raise result
                (synced,) = result
                span.set({names.BYTES: synced.moved, names.CHECKSUM_SERVED: synced.checksum_served})
            self._works(replica)
        except Exception as error:  # whatever it is, the replica stays out, and whoever waits for it goes on
            replica.out_until = None
            self._failed(replica, error)
        finally:
            replica.restoring = None

    async def _push(self, replica: Replica) -> list[WeightSync] | EngineError:
        """Have it take the weights, in a thread that outlives the event loop if it hangs; one at a time."""
        if replica.push is not None and not replica.push.done():
            await asyncio.wrap_future(replica.push)  # from an earlier event loop
        replica.push = self._threads.submit(copy_context().run, self._sync, replica)
        return await asyncio.wrap_future(replica.push)

    async def _next_back(self) -> None:
        """Wait until a replica is back; how long is for the caller to say. Where dead ones stay dead it raises
        EngineError once each was given the weights in vain.
        """
        tried: set[str] = set()
        while all(replica.out_until is not None for replica in self.replicas):
            if not self._come_back and len(tried) == len(self.replicas):
                raise EngineError(f"no rollout replica can be used, all have failed: {', '.join(sorted(tried))}")
            self._restore_due()
            restoring = {replica.name: replica.restoring for replica in self.replicas if replica.restoring is not None}
            due = [replica.out_until or 0.0 for replica in self.replicas if replica.restoring is None]
            delay = max(min(due) - self._clock(), 0.0) if due else None
            if restoring:
                done, _ = await asyncio.wait(restoring.values(), timeout=delay, return_when=asyncio.FIRST_COMPLETED)
                tried |= {name for name, task in restoring.items() if task in done}
            else:
                await asyncio.sleep(delay or 0.0)


def _cost(request: GenerateRequest) -> int:
    """Tokens a request may take."""
    return len(request.prompt_token_ids) + request.params.max_new_tokens
