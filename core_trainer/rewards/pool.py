"""Verifier processes: started on demand, killed when a call outlives its time, replaced when they die.

Owns: the processes and which calls are in flight where. Does not own: what the verdicts mean (scorer.py).
Processes rather than threads, because a thread that hangs in user code cannot be stopped; a plain subprocess rather
than multiprocessing, because that would import the trainer's main module again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import wait

from core_trainer.rewards.messages import Call, Ready, Refused, Reply, Setup, Traits
from rlinsight.errors import ConfigError, RewardError

START_S = 60.0  # to import the functions and what they need
ASYNC_GRACE_S = 1.0  # an async call is cancelled inside its process first
GROW_AFTER_S = 0.05  # quick verifiers are served by one process; another starts when no answer came for this long


_SLOW_START = f"reward functions took over {START_S:g} s to load; look at what they import"


class _Process:
    """One verifier process and its calls in flight."""

    def __init__(self, setup: Setup) -> None:
        self.connection, theirs = Pipe()
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "core_trainer.rewards.process", str(theirs.fileno())],
            stdin=subprocess.PIPE,  # never written: its end tells the child that the parent is gone
            stdout=2,  # what user code prints must not mix with the output of a command
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the trainer's to handle, and a kill takes the child's children along
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self.traits: tuple[Traits, ...] | None = None  # set once ready
        self.calls: dict[int, tuple[Call, float]] = {}  # by id, with the time it must be answered by
        self.start_by = time.monotonic() + START_S
        self.sent_at = 0.0  # when it got its newest call
        self.connection.send(setup)

    @property
    def deadline(self) -> float:
        """When something must have been heard from it; infinity while it is idle."""
        if self.traits is None:
            return self.start_by
        return min((deadline for _, deadline in self.calls.values()), default=float("inf"))

    def send(self, call: Call, grace_s: float) -> None:
        self.sent_at = time.monotonic()
        self.calls[call.call_id] = (call, self.sent_at + call.timeout_s + grace_s)
        self.connection.send(call)

    def kill(self) -> int:
        """Stop it and its children at once; returns its exit code (negative: the signal that ended it)."""
        os.killpg(self._popen.pid, signal.SIGKILL)  # not waited for yet, so the id is still its own
        code = self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self.connection.close()
        return code


class ProcessPool:
    """Runs calls in at most ``concurrency`` processes. Not for use from several threads."""

    def __init__(self, setup: Setup, concurrency: int) -> None:
        """Starts one process, so that a function that cannot be used is found now. Raises ConfigError."""
        self._setup, self._concurrency = setup, concurrency
        self._processes: list[_Process] = []
        self._last_reply = 0.0  # monotonic clock
        self._alone: set[int] = set()  # async calls that had their process killed: each is tried again by itself
        first = self._start()
        try:
            if not first.connection.poll(START_S):
                raise RewardError(_SLOW_START)
            self._receive(first)
        except RewardError as error:
            self.close()
            raise ConfigError(str(error)) from None
        assert first.traits is not None  # the first message is Ready, or was refused above
        self.traits = first.traits

    def run(self, calls: list[Call], stop_on_error: bool) -> dict[int, Reply]:
        """Replies by call id: one for each call, or with ``stop_on_error`` those up to and with the first error."""
        pending, replies = deque(calls), dict[int, Reply]()
        self._last_reply = time.monotonic()
        self._alone.clear()
        try:
            while len(replies) < len(calls):
                self._dispatch(pending)
                for process in self._heard_from(bool(pending)):
                    replies.update((reply.call_id, reply) for reply in self._collect(process, pending))
                if stop_on_error and any(reply.has_failed for reply in replies.values()):
                    break
        finally:
            for process in [process for process in self._processes if process.calls]:
                self._kill(process)
        return replies

    def close(self) -> None:
        """Stop all processes."""
        for process in list(self._processes):
            self._kill(process)

    def _dispatch(self, pending: deque[Call]) -> None:
        """Send what fits. A plain call needs a process to itself; async calls share one."""
        for _ in range(len(pending)):
            in_flight = sum(len(process.calls) for process in self._processes)
            if in_flight >= self._concurrency:
                return
            call = pending.popleft()
            process = next((p for p in self._processes if p.traits and self._accepts(p, call)), None)
            if process is None:
                pending.append(call)
                continue
            try:
                process.send(call, ASYNC_GRACE_S if self.traits[call.function].is_async else 0.0)
            except ConnectionError:  # it ended while idle
                self._kill(process)
                pending.append(call)
        waited = time.monotonic() - self._last_reply > GROW_AFTER_S
        if pending and (not self._processes or (waited and len(self._processes) < self._concurrency)):
            self._start()
            self._last_reply = time.monotonic()

    def _accepts(self, process: _Process, call: Call) -> bool:
        return not process.calls or all(self._shares(c) for c in [call, *(c for c, _ in process.calls.values())])

    def _shares(self, call: Call) -> bool:
        return self.traits[call.function].is_async and call.call_id not in self._alone

    def _heard_from(self, more_pending: bool) -> list[_Process]:
        """Processes with a message, an end of file or a missed deadline; waits for the first of those."""
        now = time.monotonic()
        until = min(process.deadline for process in self._processes)
        if more_pending:
            until = min(until, now + GROW_AFTER_S)
        ready = wait([process.connection for process in self._processes], max(0.0, min(until - now, 3600.0)))
        now = time.monotonic()
        return [process for process in self._processes if process.connection in ready or process.deadline <= now]

    def _collect(self, process: _Process, pending: deque[Call]) -> list[Reply]:
        """What became of the calls of a process that was heard from."""
        if process.connection.poll():
            try:
                reply = self._receive(process)
            except EOFError:
                return self._lost(process, pending, f"its process ended with {_ending(self._kill(process))}")
            return [] if reply is None else [reply]
        self._kill(process)
        if process.traits is None:
            raise RewardError(_SLOW_START)
        timeouts = {call.timeout_s for call, _ in process.calls.values()}
        return self._lost(process, pending, f"timed out after {min(timeouts):g} s")

    def _lost(self, process: _Process, pending: deque[Call], error: str) -> list[Reply]:
        """The calls of a killed process: the one that was alone in it failed, of several each is tried again alone."""
        calls = [call for call, _ in process.calls.values()]
        if len(calls) > 1:
            self._alone.update(call.call_id for call in calls)
            pending.extend(calls)
            return []
        return [call.failed(error, time.monotonic() - process.sent_at) for call in calls]

    def _receive(self, process: _Process) -> Reply | None:
        """One message. Raises EOFError when a process that was ready has ended, RewardError when one cannot start."""
        try:
            message = process.connection.recv()
        except (EOFError, ConnectionError):
            if process.traits is None:
                code = self._kill(process)
                raise RewardError(f"reward process ended with {_ending(code)} while loading the functions") from None
            raise EOFError from None
        if isinstance(message, Refused):
            raise RewardError(message.message)
        if isinstance(message, Ready):
            process.traits = message.traits
            return None
        process.calls.pop(message.call_id)
        self._last_reply = time.monotonic()
        return message

    def _start(self) -> _Process:
        process = _Process(self._setup)
        self._processes.append(process)
        return process

    def _kill(self, process: _Process) -> int:
        self._processes.remove(process)
        return process.kill()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
