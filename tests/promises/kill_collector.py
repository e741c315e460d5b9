"""Runs collectors of one store and kills each at a random moment: STORE POINTS SEED. Prints a line per kill.

The collectors are forks of this process, so that each starts with everything imported; they are whole ones, with
receivers and live SQL. Most die within milliseconds of a commit and its acknowledgement, some while they start and read
the write-ahead log of the one before.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pyarrow.dataset  # noqa: F401  duckdb imports it at its first Arrow insert

from collectors import process
from rlinsight.store import endpoint_path, read_endpoint
from tests.promises.support import wait_for_commits

WINDOW_S = 0.01  # a commit or two
START_S = 0.2  # about what a start takes
STARTING = 0.1  # share of kills that do not wait for the collector to answer


def main() -> None:
    store, points, random_ = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for point in range(points):
        pid = os.fork()
        if pid == 0:
            process.run(store, [os.getppid()], process.Listen())
            os._exit(0)
        starting = random_.random() < STARTING
        while not starting and not _answers(store, pid):
            ended, status = os.waitpid(pid, os.WNOHANG)
            assert not ended, f"collector {point} could not start: status {status}"
            time.sleep(0.01)  # each look takes a tenth of it from the start it waits for
        if not starting:
            wait_for_commits(store, random_.randint(0, 4))
        time.sleep(random_.uniform(0, START_S if starting else WINDOW_S))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(point, flush=True)


def _answers(store: Path, pid: int) -> bool:
    endpoint = read_endpoint(store) if endpoint_path(store).exists() else None
    return endpoint is not None and endpoint.pid == pid


if __name__ == "__main__":
    main()
