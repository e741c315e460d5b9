"""Who leaves the processors to training: the thread that says so, or all of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from rlinsight import priority
from rlinsight.priority import yield_processors

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle policy here")


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
