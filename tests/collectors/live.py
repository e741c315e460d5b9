"""A real collector process for the length of a block, and OTLP requests to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from rlinsight.store import Endpoint, read_endpoint
from tests.synthetic import Request


class Collector:
    """The process, its endpoint and an HTTP client."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: Endpoint) -> None:
        self.process = process
        self.endpoint = endpoint
        self.http = httpx.Client(base_url=endpoint.http, timeout=30)
        self.auth = {"Authorization": f"Bearer {endpoint.token}"}

    def post(self, request: Request) -> httpx.Response:
        headers = {
            "content-type": "application/x-protobuf",
            "x-rlinsight-producer": request.producer,
            "x-rlinsight-seq": str(request.seq),
        }
        return self.http.post(f"/v1/{request.signal}", content=request.message.SerializeToString(), headers=headers)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(60)


def command(store: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "collectors", "--store", str(store), *arguments]


def start(store: Path, arguments: Sequence[str] = ()) -> Collector:
    process = subprocess.Popen(command(store, *arguments), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        endpoint = read_endpoint(store)
        if endpoint is not None and endpoint.pid == process.pid:
            return Collector(process, endpoint)
        if process.poll() is not None:
            break
        time.sleep(0.02)
    process.kill()
    raise AssertionError((process.communicate()[1] or b"").decode())


@contextmanager
def collector(store: Path, *arguments: str) -> Iterator[Collector]:
    running = start(store, arguments)
    try:
        yield running
    finally:
        running.http.close()
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()
