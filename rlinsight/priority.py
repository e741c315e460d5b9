"""Work that may wait for training to leave a processor free."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

NICENESS = 15  # where there is no idle policy

_log = logging.getLogger(__name__)


def yield_processors(whole_process: bool = False) -> None:
    """Let the calling thread, and threads and processes it starts, run only when a processor has nothing else to do.

    What one thread of a training step loses, all its others wait for. It also drops a real-time policy that a parent
    handed down. ``whole_process`` means the threads that run already, too. Where the system has no such policy for a
    thread, or a sandbox forbids it, everything stays as it is.
    """
    if not hasattr(os, "SCHED_IDLE"):
        if whole_process:  # niceness is of the whole process there: a thread's would slow training
            os.nice(NICENESS)
        return
    try:
        if whole_process:
            _yield_all()
        else:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        _log.debug("the processors are not left to training: %s", error)


def _yield_all() -> None:
    done = set[str]()
    # A thread whose turn is yet to come may start another that was not in the list.
    while new := set(os.listdir("/proc/self/task")) - done:
        for thread in new:
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        done |= new
