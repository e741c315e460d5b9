"""Starting a collector process from another process, and its log file. Loads no duckdb: the child does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from rlinsight.errors import CollectorError
from rlinsight.store import Endpoint, read_endpoint

START_TIMEOUT_S = 60.0
IDLE_START_TIMEOUT_S = 300.0  # of one that yields while it starts: training leaves it little
MAX_LOG_BYTES = 1024**2  # a healthy collector writes three lines; a full disk makes it one per batch


def log_path(store: Path) -> Path:
    """Where collectors started by ``start_process`` write their stderr."""
    return store.with_name(f"{store.name}.collector.log")


def start_process(
    store: Path,
    owner_pid: int,
    arguments: Sequence[str] = (),
    meanwhile: Callable[[], object] | None = None,
    at_once: bool = False,
) -> Endpoint:
    """Start a detached collector that leaves when ``owner_pid`` is gone, and wait until it answers.

    ``arguments`` are more of its command line; ``meanwhile`` is done while it starts. ``at_once``: it leaves the
    processors to training while it starts, too, as nobody waits for it.

    Raises CollectorError with the child's last line when it does not come up.
    """
    # -P: a queue.py in the working directory is not the standard library's.
    command = [sys.executable, "-P", "-m", "collectors", "--store", str(store), "--owner-pid", str(owner_pid)]
    command += ["--background", *(["--at-once"] if at_once else []), *arguments]
    timeout_s = IDLE_START_TIMEOUT_S if at_once else START_TIMEOUT_S
    environment = {key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"}  # that is the owner's
    with _open_log(store) as log:
        began = log.tell()
        # Its own session: a Ctrl-C in the owner's terminal must not end it before the last batches are delivered.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
        if meanwhile is not None:
            meanwhile()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            endpoint = read_endpoint(store)
            if endpoint is not None and endpoint.pid == child.pid:
                threading.Thread(target=child.wait, daemon=True).start()  # leaves no zombie behind
                return endpoint
            if child.poll() is not None:
                raise CollectorError(_last_line(log, began) or f"the collector ended with exit code {child.returncode}")
            time.sleep(0.02)
        child.kill()
        child.wait()
        raise CollectorError(
            f"the collector did not start within {timeout_s:g} s: {_last_line(log, began) or 'no output'}"
        )


def cap_log(store: Path) -> None:
    """Keep the newest half when the log is over its size. Never raises."""
    try:
        with log_path(store).open("r+b") as log:
            size = log.seek(0, os.SEEK_END)
            if size <= MAX_LOG_BYTES:
                return
            log.seek(size - MAX_LOG_BYTES // 2)
            log.readline()  # the rest of a line
            kept = log.read()
            # In place: the collector goes on appending to this very file.
            log.truncate(0)
            log.seek(0)
            log.write(kept)
    except OSError:
        return


def _open_log(store: Path) -> IO[bytes]:
    """The log, at its end. A folder that cannot be made or written costs the log only: the child says what is wrong."""
    cap_log(store)
    path = log_path(store)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "r+b")
    except OSError:
        return tempfile.TemporaryFile()
    log.seek(0, os.SEEK_END)
    return log


def _last_line(log: IO[bytes], began: int) -> str:
    log.seek(began)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""
