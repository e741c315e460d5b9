"""How many spans a collector stores a second, durably and acknowledged, on one core.

    python benchmarks/ingest.py [--spans 5_000_000] [--connections 8] [--batch 1000] [--dir DIR]

A real collector process pinned to one core with its memory watched; senders pinned to another core post OTLP/HTTP
protobuf requests of spans with 12 attributes over kept-alive connections, each waiting for its acknowledgement, which
the collector gives after the commit. Requests come from a pool made before the clock starts and are told apart by
producer and number. Prints a line per million spans and the totals as Markdown.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from rlinsight.store import Endpoint, query, read_endpoint

POOL = 64  # different requests
REPORT_SPANS = 1_000_000


def attribute(key: str, value: str | bool | int | float) -> KeyValue:
    """One OTLP attribute."""
    kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    return KeyValue(key=key, value=AnyValue(**{kinds[type(value)]: value}))  # type: ignore[arg-type]


def spans(count: int, seed: int) -> bytes:
    """A request of ``count`` spans of a service that knows nothing of RL: random ids, 12 attributes of four types."""
    draw = random.Random(seed)
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    facts = {"service.name": "checkout", "service.instance.id": f"pod-{seed % 4}", "host.name": "node-7"}
    resource.resource.attributes.extend(attribute(key, value) for key, value in facts.items())
    scope = resource.scope_spans.add()
    scope.scope.name, scope.scope.version = "bench", "1"
    base_ns = time.time_ns()
    for i in range(count):
        start_ns = base_ns + i * 1000
        span = scope.spans.add(
            trace_id=draw.randbytes(16), span_id=draw.randbytes(8), parent_span_id=draw.randbytes(8),
            name=f"operation {i % 20}", kind=2,  # type: ignore[arg-type]
            start_time_unix_nano=start_ns, end_time_unix_nano=start_ns + draw.randrange(10**7),
        )  # fmt: skip
        values = {
            "http.request.method": "POST",
            "http.route": f"/v1/items/{draw.randrange(100)}",
            "http.response.status_code": 200,
            "user.id": f"user-{draw.randrange(10**6)}",
            "retry": False,
            "latency.ms": draw.random() * 100,
            "queue.depth": draw.randrange(50),
            "cache.hit": draw.random() < 0.5,
            "cloud.region": "eu-west-1",
            "gen_ai.request.model": "smollm2",
            "gen_ai.usage.input_tokens": draw.randrange(4000),
            "gen_ai.usage.output_tokens": draw.randrange(1000),
        }
        span.attributes.extend(attribute(key, value) for key, value in values.items())
    return request.SerializeToString()


@contextmanager
def pinned_collector(store: Path, core: int) -> Iterator[tuple[Endpoint, psutil.Process]]:
    """A collector process on one core, for the length of the block."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "collectors", "--store", str(store)]
    process = subprocess.Popen(command)
    try:
        while (endpoint := read_endpoint(store)) is None or endpoint.pid != process.pid:
            if process.poll() is not None:
                raise SystemExit("the collector did not start")
            time.sleep(0.05)
        yield endpoint, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


@dataclass
class Progress:
    """What all connections have had acknowledged, and the collector's largest resident memory, in bytes."""

    spans: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    claimed: int = 0
    acked: int = 0
    rss: int = 0
    lines: list[tuple[int, float, float]] = field(default_factory=list)  # spans, seconds, CPU seconds of the collector

    def claim(self, count: int) -> bool:
        """Take ``count`` spans to send; False when all are taken."""
        with self.lock:
            if self.claimed >= self.spans:
                return False
            self.claimed += count
            return True


def send(endpoint: Endpoint, name: str, pool: list[bytes], batch: int, progress: Progress) -> None:
    """Post requests one after the other until all spans are claimed."""
    address = urlsplit(endpoint.http)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    for seq in range(1, sys.maxsize):
        if not progress.claim(batch):
            return
        headers = {"Content-Type": "application/x-protobuf", "x-rlinsight-producer": name, "x-rlinsight-seq": str(seq)}
        connection.request("POST", "/v1/traces", pool[(seq * 7 + len(name)) % len(pool)], headers)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status == 503:  # its queue is full: what Retry-After is for
            time.sleep(0.05)
            progress.claim(-batch)
            continue
        if answer.status != 200:
            raise SystemExit(f"HTTP {answer.status}: {body!r}")
        with progress.lock:
            progress.acked += batch


def watch(process: psutil.Process, progress: Progress, senders: list[threading.Thread], began: float) -> None:
    """Sample memory; note time and CPU time at every million spans."""
    due = REPORT_SPANS
    while any(sender.is_alive() for sender in senders):
        time.sleep(0.1)
        progress.rss = max(progress.rss, process.memory_info().rss)
        if progress.acked >= due:
            times = process.cpu_times()
            progress.lines.append((progress.acked, time.perf_counter() - began, times.user + times.system))
            print(f"{progress.acked:>12,} spans  {progress.lines[-1][1]:8.1f} s  {progress.rss >> 20} MiB", flush=True)
            due += REPORT_SPANS


def measure(store: Path, total: int, batch: int, connections: int) -> str:
    """The report, as Markdown."""
    pool = [spans(batch, seed) for seed in range(POOL)]
    with pinned_collector(store, core=0) as (endpoint, process):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        progress = Progress(total)
        idle = process.memory_info().rss
        names = [f"bench-{i}-{'x' * i}" for i in range(connections)]
        senders = [
            threading.Thread(target=send, args=(endpoint, name, pool, batch, progress), daemon=True) for name in names
        ]
        began = time.perf_counter()
        for sender in senders:
            sender.start()
        watch(process, progress, senders, began)
        seconds = time.perf_counter() - began
        times = process.cpu_times()
        stored = query("SELECT count(*) AS n FROM otel_spans", store=store)["n"][0].as_py()
    if stored != progress.acked:
        raise SystemExit(f"{progress.acked} spans acknowledged, {stored} stored")
    lines = [
        f"{stored:,} spans of 12 attributes ({len(pool[0]) / batch:.0f} bytes each) in {seconds:.1f} s: "
        f"**{stored / seconds:,.0f} spans/s**, each acknowledged after its commit and counted in the store afterwards.",
        f"{connections} connections, {batch} spans a request; collector on one core, "
        f"{times.user + times.system:.0f} s of CPU time; memory {idle >> 20} MiB at the start, "
        f"at most {progress.rss >> 20} MiB; "
        f"{store.stat().st_size / stored:.0f} bytes a span on disk.",
        "",
        "| spans stored | s for the latest million | CPU us a span |",
        "|---|---|---|",
    ]
    before = (0, 0.0, 0.0)
    for now in progress.lines:
        count, wall, cpu = (b - a for a, b in zip(before, now, strict=True))
        lines.append(f"| {now[0]:,} | {wall * REPORT_SPANS / count:.1f} | {cpu / count * 1e6:.1f} |")
        before = now
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=5_000_000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--dir", type=Path, help="where the store is made; default a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        print(measure(Path(folder) / "s.duckdb", arguments.spans, arguments.batch, arguments.connections))


if __name__ == "__main__":
    main()
