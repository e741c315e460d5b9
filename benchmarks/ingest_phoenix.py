"""From first post to last row stored: the same OTLP/HTTP stream into rlinsight and into Arize Phoenix, in alternation.

    python -m venv /tmp/phoenix && /tmp/phoenix/bin/pip install arize-phoenix
    python benchmarks/ingest_phoenix.py --phoenix /tmp/phoenix/bin/python [--spans 10_000] [--rounds 2]

Both servers run as they come (Phoenix with its default SQLite store), each alone, on a new store every round; one
connection, 500 spans of 12 attributes a request. The clock stops when a second connection to the store counts all
spans. Phoenix acknowledges when it has queued a request, rlinsight when it has committed it.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ingest import spans

from rlinsight.store import query, read_endpoint

BATCH = 500
POLL_S = 0.05
PATIENCE_S = 900


@dataclass(frozen=True)
class Server:
    """Where to post, and how to count what is stored."""

    port: int
    stored: Callable[[], int]


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process for the length of the block."""
    with log.open("wb") as file:
        running = subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield running
        finally:
            running.terminate()
            running.wait()


@contextmanager
def rlinsight(folder: Path) -> Iterator[Server]:
    """A collector with an empty store."""
    store = folder / "s.duckdb"
    with process([sys.executable, "-m", "collectors", "--store", str(store)], {}, folder / "log") as running:
        while (endpoint := read_endpoint(store)) is None:
            if running.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.05)
        port = int(endpoint.http.rpartition(":")[2])
        yield Server(port, lambda: query("SELECT count(*) AS n FROM otel_spans", store=store)["n"][0].as_py())


@contextmanager
def phoenix(folder: Path, python: Path) -> Iterator[Server]:
    """A Phoenix server with an empty store in its working directory."""
    port, grpc = _free_port(), _free_port()
    environment = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with process([str(python), "-m", "phoenix.server.main", "serve"], environment, folder / "log") as running:
        deadline = time.monotonic() + 180
        while not _answers(port):
            if running.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.2)
        yield Server(port, lambda: _count(folder / "phoenix.db"))


def _count(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30) as con:
        return con.execute("SELECT count(*) FROM spans").fetchone()[0]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def _answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False


def measure(server: Server, bodies: list[bytes]) -> tuple[float, float]:
    """Seconds from the first post to the last acknowledgement, and to the last row."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/x-protobuf"}
    began = time.perf_counter()
    for body in bodies:
        for _ in range(1000):
            connection.request("POST", "/v1/traces", body, headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                break
            if answer.status not in (429, 503):
                raise SystemExit(f"HTTP {answer.status}")
            time.sleep(0.1)
    acked = time.perf_counter() - began
    while server.stored() < len(bodies) * BATCH:
        if time.perf_counter() - began > PATIENCE_S:
            raise SystemExit(f"only {server.stored()} spans after {PATIENCE_S} s")
        time.sleep(POLL_S)
    return acked, time.perf_counter() - began


def main() -> None:
    """Run and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phoenix", type=Path, required=True, help="python of an environment with arize-phoenix")
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    version = subprocess.run(
        [arguments.phoenix, "-c", "import importlib.metadata as m; print(m.version('arize-phoenix'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    print(f"{arguments.spans:,} spans; Arize Phoenix {version}\n")
    print(
        "| round | rlinsight acked, s | stored, s | Phoenix acked, s | stored, s | ratio |\n|---|---|---|---|---|---|"
    )
    ratios = []
    for round_ in range(1, arguments.rounds + 1):
        bodies = [spans(BATCH, round_ * 1_000_000 + i) for i in range(arguments.spans // BATCH)]
        times = []
        for server in (rlinsight, lambda folder: phoenix(folder, arguments.phoenix)):
            with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as running:
                times.append(measure(running, bodies))
        (our_ack, ours), (their_ack, theirs) = times
        ratios.append(theirs / ours)
        print(
            f"| {round_} | {our_ack:.2f} | {ours:.2f} | {their_ack:.2f} | {theirs:.1f} | {ratios[-1]:.0f} |", flush=True
        )
    print(f"\nMedian ratio **{statistics.median(ratios):.0f}**.")


if __name__ == "__main__":
    main()
