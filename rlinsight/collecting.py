"""The collector of a store, found or started, and replaced when it dies, for as long as a command needs it.

Owns who starts it when several look at once, and this process's share in it. Does not own the process
(collectors.server) nor the endpoint file (store).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from collectors.server import cap_log, log_path, start_process
from rlinsight import store
from rlinsight.errors import CollectorError, StoreError

# The collector drains within its grace of two seconds; waiting for it means no process outlives the command.
EXIT_TIMEOUT_S = 10.0
OWN_TIMEOUT_S = 5.0
WATCH_S = (1.0, 30.0)  # between looks at the collector; doubles with each start of another one, to the second

_log = logging.getLogger(__name__)


@contextmanager
def collector(
    path: Path, arguments: Sequence[str] = (), meanwhile: Callable[[], object] | None = None
) -> Iterator[store.Endpoint]:
    """The collector of a store, kept alive for the length of the block: the one that runs, or a new one.

    ``arguments`` are for those started here; ``meanwhile`` is done while the first of them starts. When one dies
    another takes over, at an address of its own: senders find it by ``store.locate``. Raises CollectorError when none
    can be started at first.
    """
    endpoint = found_or_started(path, arguments, meanwhile)
    ended = threading.Event()
    watched = path, arguments, endpoint.pid, ended
    watch = threading.Thread(target=_watch, args=watched, name="collector-watch", daemon=True)
    watch.start()
    try:
        yield endpoint
    finally:
        ended.set()
        watch.join()
        current = store.read_endpoint(path)  # not the first one when that died under way
        if current is not None and _own(current, "DELETE") == []:
            _wait_for_exit(current.pid)


def _watch(path: Path, arguments: Sequence[str], pid: int, ended: threading.Event) -> None:
    """Replace the collector whenever it is gone. One that dies again and again is started ever less often."""
    pause, longest = WATCH_S
    while not ended.wait(pause):
        cap_log(path)
        endpoint = store.read_endpoint(path)
        if endpoint is not None and endpoint.pid == pid:
            pause = max(pause / 2, WATCH_S[0])
            continue
        pause = min(pause * 2, longest)
        try:
            endpoint = found_or_started(path, arguments, at_once=True)
        except (CollectorError, StoreError, OSError) as error:  # OSError: no process can be made now
            _log.warning("collector %d is gone and no other can start (%s); telemetry waits on disk", pid, error)
        else:
            _log.warning("collector %d is gone, %d took over; its log: %s", pid, endpoint.pid, log_path(path))
            pid = endpoint.pid


def found_or_started(
    path: Path,
    arguments: Sequence[str] = (),
    meanwhile: Callable[[], object] | None = None,
    at_once: bool = False,
) -> store.Endpoint:
    """The collector of a store, owned by this process too. ``at_once`` as in ``start_process``."""
    with _one_at_a_time(path.parent):
        endpoint = _joined(path)
        if endpoint is not None:
            return endpoint
        try:
            return start_process(path, os.getpid(), arguments, meanwhile, at_once)
        except CollectorError:
            endpoint = _joined(path)  # one was started by hand in between
            if endpoint is None:
                raise
            return endpoint


def _joined(path: Path) -> store.Endpoint | None:
    """The collector that serves a store and now counts this process as an owner."""
    endpoint = store.read_endpoint(path)
    return endpoint if endpoint is not None and _own(endpoint, "POST") is not None else None


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Of the processes that look for a collector one may start it, and the others then find it.

    A lock on the folder itself leaves no file behind. Where it cannot be had the collector's own lock on the store
    decides, and the reason is told by the collector.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # some network file systems
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _own(endpoint: store.Endpoint, method: Literal["POST", "DELETE"]) -> list[int] | None:
    """Take or give up a share in a collector, which leaves with its last owner.

    Returns the owners it has now; None when it does not answer or is leaving.
    """
    try:
        status, answer = store.call(endpoint, method, "/v1/owners", {"pid": os.getpid()}, OWN_TIMEOUT_S)
    except OSError:
        return None
    return json.loads(answer)["owners"] if status == 200 else None


def _wait_for_exit(pid: int) -> None:
    import psutil

    with suppress(psutil.Error):
        psutil.Process(pid).wait(timeout=EXIT_TIMEOUT_S)
