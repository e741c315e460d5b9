"""Writes numbered batches into a store and is killed at random moments: STORE ACKS POINTS SEED.

Each life resumes at the first batch without acknowledgement, as a spool does. A batch id is appended to ACKS only
after its future resolved. Lives are forks of this process, so that each starts with everything imported.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import cycle
from pathlib import Path

import duckdb
import pyarrow.dataset  # noqa: F401  duckdb imports it at its first Arrow insert

from collectors.decode import Decoder
from collectors.writer import Batch, Writer
from rlinsight import schema
from tests.promises.support import wait_for_commits
from tests.synthetic import Request, Run, batch, requests

IN_FLIGHT = 4
WINDOW_S = 0.01  # a commit or two


def live(store: Path, acks: Path, content: list[Request], ready: int) -> None:
    """Submit batches forever, a few in flight so that groups form."""
    acknowledged = len(acks.read_text().split()) if acks.exists() else 0
    log = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    new = not store.exists()
    con = duckdb.connect(str(store))
    if new:
        schema.apply(con, store)
    columns = schema.columns(con)
    decoder, writer = Decoder(columns), Writer(con, columns)
    writer.start()
    os.write(ready, b".")
    flying: list[Batch] = []
    for seq, request in enumerate(cycle(content)):
        if seq < acknowledged:
            continue
        flying.append(batch(decoder, Request(request.signal, request.message, "p", seq)))
        writer.submit(flying[-1])
        if len(flying) == IN_FLIGHT:
            oldest = flying.pop(0)
            oldest.done.result()
            os.write(log, f"{oldest.batch_id}\n".encode())


def main() -> None:
    store, acks, points, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    random_ = random.Random(seed)
    content = list(requests(Run(steps=1, groups=1, group_size=2)))
    for point in range(points):
        listen, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            live(store, acks, content, ready)
        os.read(listen, 1)
        wait_for_commits(store, random_.randint(0, 4))
        time.sleep(random_.uniform(0, WINDOW_S))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(listen)
        os.close(ready)
        print(point, flush=True)


if __name__ == "__main__":
    main()
