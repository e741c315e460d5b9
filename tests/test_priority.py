"""Who leaves the processors to training: the thread that says so, or all of a process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource

from rlinsight import priority
from rlinsight.exporter import Exporter
from rlinsight.otlp import Encoder
from rlinsight.priority import yield_processors
from rlinsight.segments import Segments

idle = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle policy here")


@idle
def test_one_thread_yields_alone() -> None:
    """What it starts afterwards does too; the thread that started it does not."""
    seen: list[int] = []

    def look() -> None:
        seen.append(os.sched_getscheduler(0))

    def work() -> None:
        yield_processors()
        look()
        inner = threading.Thread(target=look)
        inner.start()
        inner.join()

    thread = threading.Thread(target=work)
    before = os.sched_getscheduler(0)
    thread.start()
    thread.join()
    assert seen == [os.SCHED_IDLE] * 2
    assert os.sched_getscheduler(0) == before


@idle
def test_a_whole_process_yields() -> None:
    """Threads that run already, too."""
    code = (
        "import os, threading\n"
        "from rlinsight.priority import yield_processors\n"
        "go = threading.Event()\n"
        "threads = [threading.Thread(target=go.wait) for _ in range(3)]\n"
        "[thread.start() for thread in threads]\n"
        "yield_processors(whole_process=True)\n"
        "print({os.sched_getscheduler(int(task)) for task in os.listdir('/proc/self/task')}, len(threads))\n"
        "go.set()\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.split() == [f"{{{os.SCHED_IDLE}}}", "3"]


@idle
def test_a_thread_that_is_started_meanwhile_yields_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that had not had its turn: the list is read until it holds none that is new."""
    threads, yielded = ["1", "2"], list[int]()

    def set_scheduler(thread: int, policy: int, parameter: object) -> None:
        if thread == 2 and "3" not in threads:
            threads.append("3")
        if thread == 1:
            raise ProcessLookupError  # it has ended
        yielded.append(thread)

    monkeypatch.setattr(priority.os, "listdir", lambda path: list(threads))
    monkeypatch.setattr(priority.os, "sched_setscheduler", set_scheduler)
    yield_processors(whole_process=True)
    assert yielded == [2, 3]


@idle
@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL])  # of a seccomp filter, of gVisor
def test_a_refusal_ends_nothing(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the policy may not be changed nothing is raised, and events reach the spool as ever."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(priority.os, "sched_setscheduler", refuse)
    yield_processors(whole_process=True)
    encoder = Encoder(Resource({}))
    exporter = Exporter("p", encoder, Segments.create(tmp_path, "p", 2**20, b"{}"), endpoint=None)
    exporter.put("logs", encoder.record("e", 1, {}))
    assert exporter.flush(10)
    assert exporter.counts.written >= 1
    exporter.close(0)


def test_without_an_idle_policy_a_thread_stays_and_a_process_is_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where niceness is of the whole process: a thread of the trainer must not slow the trainer."""
    increments: list[int] = []
    monkeypatch.delattr(priority.os, "SCHED_IDLE", raising=False)
    monkeypatch.setattr(priority.os, "nice", increments.append)
    yield_processors()
    assert increments == []
    yield_processors(whole_process=True)
    assert increments == [priority.NICENESS]
