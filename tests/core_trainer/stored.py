"""What this process records in a block, as rows of a store: sent over HTTP, decoded and written as a collector does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rlinsight import telemetry
from tests.scripted_collector import Collector, running
from tests.synthetic import Request, deliver

KINDS = {"traces": ExportTraceServiceRequest, "logs": ExportLogsServiceRequest, "metrics": ExportMetricsServiceRequest}


class Store:
    """Empty until the block has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.path), read_only=True) as con:
            return con.execute(sql).fetchall()


@contextmanager
def recording(folder: Path, run_id: str = "r") -> Iterator[Store]:
    """Everything recorded inside is in the store afterwards, as of attempt 1 of the run."""
    store = Store(folder / "s.duckdb")
    with running(Collector()) as collector:
        telemetry.setup("policy", spool_dir=folder / "spool", run_id=run_id, attempt=1, endpoint=collector.url)
        try:
            yield store
        finally:
            assert telemetry.shutdown(30)
    sent = [
        Request(signal, KINDS[signal].FromString(request.body), request.producer, request.seq)
        for request in collector.stored.values()
        if (signal := request.path.rpartition("/")[2]) in KINDS
    ]
    deliver(store.path, sent)
