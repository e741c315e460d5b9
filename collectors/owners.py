"""Who needs the collector: processes registered as owners. With the last one gone, dead or released, it may leave."""

from __future__ import annotations

import threading
import time

from rlinsight.store import is_alive


class Owners:
    """Registered processes. A collector that never had one serves until it is stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known_at_ns: dict[int, int] = {}
        self._abandoned_since: float | None = None
        self._leaving = False

    def add(self, pid: int) -> bool:
        """Register a process. False when the collector is leaving already; a dead process owns nothing."""
        with self._lock:
            if not self._leaving:
                self._known_at_ns[pid] = time.time_ns()
                self._abandoned_since = None
            return not self._leaving

    def release(self, pid: int) -> None:
        """Take a process off; one that is not registered is fine."""
        with self._lock:
            if self._known_at_ns.pop(pid, None) is not None and not self._known_at_ns:
                self._abandoned_since = time.monotonic()

    def pids(self) -> list[int]:
        with self._lock:
            return sorted(self._known_at_ns)

    def abandoned_s(self) -> float | None:
        """Seconds since the last owner was gone; None while there is one, or when there never was."""
        with self._lock:
            for pid in [pid for pid, known_at in self._known_at_ns.items() if not is_alive(pid, known_at)]:
                del self._known_at_ns[pid]
                if not self._known_at_ns:
                    self._abandoned_since = time.monotonic()
            return None if self._abandoned_since is None else time.monotonic() - self._abandoned_since

    def leave(self) -> None:
        """From here on nobody can become an owner; whoever asks starts a collector of their own."""
        with self._lock:
            self._leaving = True
