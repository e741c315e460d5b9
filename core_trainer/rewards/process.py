"""Entry point of a verifier process: loads the functions, answers calls, dies with its parent.

Owns: running user code away from the trainer. A plain function blocks the process, whose parent kills it when its time
is up; async functions run side by side and are cancelled here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from core_trainer.rewards.function import BatchVerifier, describe
from core_trainer.rewards.messages import Call, Ready, Refused, Reply, Setup, Traits
from core_trainer.rewards.types import Outcome, RewardInput, Verifier
from core_trainer.rewards.verifiers import make_verifier
from rlinsight.errors import ConfigError


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, until it closes."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    setup: Setup = connection.recv()
    verifiers: list[Verifier | BatchVerifier] = []
    for function in setup.functions:
        try:
            verifiers.append(make_verifier(function, setup.datasets))
        except ConfigError as error:
            connection.send(Refused(str(error)))
            return
    connection.send(Ready(tuple(Traits(v.is_async, v.required_columns) for v in verifiers)))
    asyncio.run(_serve(connection, verifiers))


def _die_with_parent() -> None:
    """The parent holds the other end of stdin, so it closes however the parent ends; user code may never return."""
    sys.stdin.buffer.read()
    os._exit(1)


async def _serve(connection: Connection, verifiers: list[Verifier | BatchVerifier]) -> None:
    loop = asyncio.get_running_loop()
    closed = loop.create_future()
    running: set[asyncio.Task[None]] = set()

    def on_call() -> None:
        try:
            call: Call = connection.recv()
        except EOFError:
            loop.remove_reader(connection.fileno())
            closed.set_result(None)
            return
        task = loop.create_task(_answer(connection, call, verifiers[call.function]))
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_reader(connection.fileno(), on_call)
    await closed


async def _answer(connection: Connection, call: Call, verifier: Verifier | BatchVerifier) -> None:
    started = time.perf_counter()
    outcomes, error = (), None
    try:
        async with asyncio.timeout(call.timeout_s) as limit:
            outcomes = await _outcomes(verifier, call.items)
    except TimeoutError as raised:
        error = f"timed out after {call.timeout_s:g} s" if limit.expired() else describe(raised)
    except (Exception, SystemExit) as raised:
        error = describe(raised)
    latency_s = time.perf_counter() - started
    connection.send(Reply(call.call_id, outcomes, latency_s) if error is None else call.failed(error, latency_s))


async def _outcomes(verifier: Verifier | BatchVerifier, items: tuple[RewardInput, ...]) -> tuple[Outcome, ...]:
    if isinstance(verifier, BatchVerifier):
        result = verifier(items)
        return tuple(await result if inspect.isawaitable(result) else result)
    (item,) = items
    result = verifier(item)
    return (Outcome(tuple(await result if inspect.isawaitable(result) else result)),)


if __name__ == "__main__":
    main()
