"""What several promise tests need: OTLP requests to the letter, and collectors that end with the block."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from rlinsight.store import Endpoint

ROOT = Path(__file__).parents[2]


def log_request(indices: Iterable[int], resource: Mapping[str, str] | None = None, event: str = "e") -> bytes:
    """A serialized log request with one event per index, which stands in the attribute ``index``."""
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    logs.resource.attributes.extend(
        KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in (resource or {}).items()
    )
    records = logs.scope_logs.add().log_records
    for index in indices:
        value = KeyValue(key="index", value=AnyValue(int_value=index))
        records.add(event_name=event, time_unix_nano=index + 1, attributes=[value])
    return request.SerializeToString()


def wait_for_commits(store: Path, number: int, timeout_s: float = 2) -> None:
    """Return once the store's write-ahead log has changed a number of times, however fast the machine is."""
    log, deadline = store.with_name(f"{store.name}.wal"), time.monotonic() + timeout_s
    known = _size(log)
    while number and time.monotonic() < deadline:
        if (size := _size(log)) != known:
            known, number = size, number - 1
        time.sleep(0.0005)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def stopped(endpoint: Endpoint) -> Iterator[Endpoint]:
    """A collector for the length of the block; stopped in order after it."""
    try:
        yield endpoint
    finally:
        process = psutil.Process(endpoint.pid)
        os.kill(endpoint.pid, signal.SIGTERM)
        with suppress(psutil.NoSuchProcess):
            process.wait(20)
