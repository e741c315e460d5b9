"""What a collector knows about itself: alive, ready, and its numbers for Prometheus. Asks the parts, decides nothing.

Counts the requests of both transports; what became of their batches is the writer's to count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest
from prometheus_client.registry import Collector

from collectors.owners import Owners
from collectors.writer import Stats, Writer
from rlinsight import schema

CONTENT_TYPE = CONTENT_TYPE_PLAIN_1_0_0
PROBLEM_S = 10.0  # a failed write tells nothing about now after this: a sender that waits for readiness must come back
COMMIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # up to a sick disk


class Monitor:
    """One per collector. Every method may be called from any thread."""

    def __init__(self, store: Path, writer: Writer, owners: Owners, started_ns: int) -> None:
        self._store, self._writer, self._owners, self._started_ns = store, writer, owners, started_ns
        self._failed_at = -PROBLEM_S
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Stored(writer.stats))
        writer.stats.on_commit = Histogram(
            "rlinsight_collector_commit_seconds",
            "Time from BEGIN to COMMIT of one transaction.",
            buckets=COMMIT_BUCKETS,
            registry=self._registry,
        ).observe
        self._requests = Counter(
            "rlinsight_collector_requests",
            "Requests answered, by transport, what they asked for, and HTTP status or gRPC code.",
            ("transport", "endpoint", "status"),
            registry=self._registry,
        )
        self._queries = Gauge(
            "rlinsight_collector_active_queries", "SQL queries running through /v1/sql.", registry=self._registry
        )
        self._gauge("queue_batches", "Batches waiting for their commit.", lambda: writer.queued_batches)
        self._gauge("ready", "1 when a batch would be stored now.", lambda: self.unready() is None)
        files = Gauge(
            "rlinsight_collector_store_bytes",
            "Size of the database file and of its write-ahead log.",
            ("file",),
            registry=self._registry,
        )
        files.labels("database").set_function(lambda: _size(store))
        files.labels("wal").set_function(lambda: _size(store.with_name(f"{store.name}.wal")))

    def health(self) -> dict[str, Any]:
        """The state of the parts, for a person. That there is an answer means that the process is up."""
        return {
            "status": "failing" if self._writer.problem else "ok",
            "problem": self._writer.problem,
            "pid": os.getpid(),
            "store": str(self._store),
            "schema_version": schema.VERSION,
            "uptime_s": (time.time_ns() - self._started_ns) / 1e9,
            "queued_batches": self._writer.queued_batches,
            "stored_batches": sum(self._writer.stats.batches.values()),
            "owners": self._owners.pids(),
        }

    def unready(self) -> str | None:
        """Why a batch would not be stored now; None when it would."""
        writer = self._writer
        if writer.failure:
            return f"the store cannot be written any more: {writer.failure}"
        if writer.problem and time.monotonic() - self._failed_at < PROBLEM_S:
            return f"the store cannot be written: {writer.problem}"
        if not writer.has_room():
            return f"{writer.queued_batches} batches are waiting for the store"
        return None

    def write_failed(self) -> None:
        """A sender was just told that the store cannot be written."""
        self._failed_at = time.monotonic()

    def answered(self, transport: str, endpoint: str, status: str) -> None:
        """Count a request."""
        self._requests.labels(transport, endpoint, status).inc()

    @contextmanager
    def querying(self) -> Iterator[None]:
        """Count a query as active for the length of the block."""
        with self._queries.track_inprogress():
            yield

    def exposition(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, help: str, value: Any) -> None:
        Gauge(f"rlinsight_collector_{name}", help, registry=self._registry).set_function(value)


class _Stored(Collector):
    """The writer's totals."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Read them anew: nothing is counted twice."""
        stats = self._stats
        batches = CounterMetricFamily(
            "rlinsight_collector_batches", "Batches by signal: stored, or known already.", labels=("signal", "outcome")
        )
        items = CounterMetricFamily(
            "rlinsight_collector_items", "Items of stored batches: stored, or rejected.", labels=("signal", "outcome")
        )
        for family, outcome, totals in (
            (batches, "stored", stats.batches),
            (batches, "duplicate", stats.duplicates),
            (items, "stored", stats.items),
            (items, "rejected", stats.rejected),
        ):
            for signal, total in list(totals.items()):
                family.add_metric((signal, outcome), total)
        yield from (batches, items)
        yield CounterMetricFamily("rlinsight_collector_bytes", "Payload bytes of stored batches.", stats.bytes)
        yield CounterMetricFamily("rlinsight_collector_failed_commits", "Transactions undone.", stats.failures)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
