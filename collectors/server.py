"""Starting a collector process from another process. Loads no duckdb: the child does."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from rlinsight.errors import CollectorError
from rlinsight.store import Endpoint, read_endpoint

START_TIMEOUT_S = 30.0


def start_process(store: Path, owner_pid: int) -> Endpoint:
    """Start a detached collector that leaves when ``owner_pid`` is gone, and wait until it answers.

    Raises CollectorError with the child's last line when it does not come up.
    """
    # -P: a queue.py in the working directory is not the standard library's.
    command = [sys.executable, "-P", "-m", "collectors", "--store", str(store), "--owner-pid", str(owner_pid)]
    with tempfile.TemporaryFile() as log:
        # Its own session: a Ctrl-C in the owner's terminal must not end it before the last batches are delivered.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            endpoint = read_endpoint(store)
            if endpoint is not None and endpoint.pid == child.pid:
                threading.Thread(target=child.wait, daemon=True).start()  # leaves no zombie behind
                return endpoint
            if child.poll() is not None:
                raise CollectorError(_last_line(log) or f"the collector ended with exit code {child.returncode}")
            time.sleep(0.02)
        child.kill()
        child.wait()
        raise CollectorError(
            f"the collector did not start within {START_TIMEOUT_S:g} s: {_last_line(log) or 'no output'}"
        )


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""
