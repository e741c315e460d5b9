"""Work that may wait for training to leave a processor free."""

from __future__ import annotations

import os

NICENESS = 15  # where there is no idle policy


def yield_processors() -> None:
    """Let the calling thread, and threads and processes it starts, run only when a processor has nothing else to do.

    What one thread of a training step loses, all its others wait for. It also drops a real-time policy that a parent
    handed down.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(NICENESS)
