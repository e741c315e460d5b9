"""How many series of a metric one process may send before further ones are refused.

A label that holds an id makes a new series per request; refusing, with the sender told and the ledger counting, keeps
the store usable. Owns the limits and what was seen; forgets the processes heard of longest ago.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

SERIES_PER_METRIC = 2000  # as the OpenTelemetry specification suggests for an SDK
SERIES_PER_PROCESS = 20_000
PROCESSES = 128  # with the limit above at most 170 MB


@dataclass(slots=True)
class _Seen:
    series: set[int] = field(default_factory=set)  # hashes
    by_metric: Counter[str] = field(default_factory=Counter)


class Cardinality:
    """Counts series by process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: OrderedDict[str, _Seen] = OrderedDict()

    def refusal(self, process: str, metric: str, labels: str) -> str | None:
        """Why a point of this series is one too many; None if it is not. ``process`` is its resource, as text."""
        key = hash((metric, labels))
        with self._lock:
            seen = self._processes.setdefault(process, _Seen())
            self._processes.move_to_end(process)
            if key in seen.series:
                return None
            if seen.by_metric[metric] >= SERIES_PER_METRIC:
                return f"more than {SERIES_PER_METRIC} series from one process; use fewer labels, and no ids"
            if len(seen.series) >= SERIES_PER_PROCESS:
                return f"its process sends more than {SERIES_PER_PROCESS} series; use fewer metrics or labels"
            seen.series.add(key)
            seen.by_metric[metric] += 1
            if len(self._processes) > PROCESSES:
                self._processes.popitem(last=False)
        return None
