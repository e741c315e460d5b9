"""A real collector scrapes real endpoints: good ones, ones that restart or die, and ones that misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from collectors.scrape import Scraper
from collectors.writer import Overloaded
from rlinsight import store
from rlinsight.config import ScrapeTarget
from tests.collectors import live

pytestmark = pytest.mark.slow

Respond = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scrape") / "store.duckdb"


@pytest.fixture(scope="module")
def collector(path: Path) -> Iterator[live.Collector]:
    with live.collector(path) as collector:
        yield collector


@pytest.fixture(autouse=True)
def clean(collector: live.Collector) -> Iterator[None]:
    yield
    targets(collector, "DELETE", pid=os.getpid())


def targets(collector: live.Collector, method: str = "GET", **body: Any) -> Any:
    return collector.http.request(method, "/v1/targets", json=body if method != "GET" else None, headers=collector.auth)


def register(collector: live.Collector, url: str, name: str, pid: int | None = None, **more: Any) -> None:
    target = {"url": url, "name": name, "interval_s": 0.2, **more}
    response = targets(collector, "POST", pid=pid or os.getpid(), run_id=f"run-{name}", attempt=2, targets=[target])
    assert response.status_code == 200, response.text


def rows(path: Path, sql: str, **params: Any) -> list[dict[str, Any]]:
    return store.query(sql, store=path, params=params or None).to_pylist()


def eventually(path: Path, sql: str, **params: Any) -> list[dict[str, Any]]:
    """Rows of the statement once there are any."""
    deadline = time.monotonic() + 30
    while not (found := rows(path, sql, **params)):
        assert time.monotonic() < deadline, sql
        time.sleep(0.1)
    return found


@contextmanager
def serving(respond: Respond, port: int = 0) -> Iterator[str]:
    """The URL of a server that answers as told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def saying(text: str, status: int = 200, **headers: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for key, value in headers.items():
            handler.send_header(key.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(text.encode("latin-1"))

    return respond


@contextmanager
def engine(requests: int, port: int = 0) -> Iterator[int]:
    """A rollout engine's endpoint, freshly started, as its client library serves it; gives the port."""
    registry = CollectorRegistry()
    counter = Counter("vllm:requests", "served", registry=registry)
    latency = Histogram("vllm:latency_seconds", "how long", buckets=[1, 10], registry=registry)
    Gauge("vllm:num_requests_running", "running", registry=registry).set(3)
    for _ in range(requests):
        counter.inc()
        latency.observe(4, exemplar={"trace_id": "ab" * 16, "span_id": "cd" * 8})
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_engine_that_restarts_is_followed(collector: live.Collector, path: Path) -> None:
    """Metrics carry the run; while the engine is away up is 0, told once; its counters go on from zero, none lost."""
    with engine(5) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        register(collector, f"{url}?token=secret", "engine", labels={"rlinsight.replica": "policy/0"})
        (first,) = eventually(path, "SELECT * FROM otel_metrics WHERE name = 'vllm:requests_total' LIMIT 1")
    eventually(path, "SELECT 1 FROM otel_logs WHERE event_name = 'rlinsight.scrape.failed' AND run_id = 'run-engine'")
    with engine(3, port):
        grown = eventually(
            path, "SELECT sum(increase) AS n FROM counter_increase('vllm:requests_total') HAVING bool_or(is_reset)"
        )
        latencies = rows(path, "SELECT sum(increase) AS n FROM counter_increase('vllm:latency_seconds')")
        eventually(path, "SELECT 1 FROM otel_logs WHERE event_name = 'rlinsight.scrape.recovered'")
    assert (first["run_id"], first["attempt"], first["service_name"]) == ("run-engine", 2, "engine")
    assert (first["kind"], first["value"], first["service_instance_id"]) == ("sum", 5, f"127.0.0.1:{port}")
    assert '"policy/0"' in first["resource_attributes"]
    assert "secret" not in first["resource_attributes"]
    assert grown == latencies == [{"n": 8}]
    (bucket,) = rows(path, "SELECT * FROM otel_metrics WHERE name = 'vllm:latency_seconds' LIMIT 1")
    assert (bucket["bounds"], bucket["bucket_counts"], "abab" in bucket["exemplars"]) == ([1, 10], [0, 5, 0], True)
    events = "SELECT event_name, count(*) AS n FROM otel_logs WHERE run_id = 'run-engine' GROUP BY 1 ORDER BY 1"
    assert rows(path, events) == [
        {"event_name": "rlinsight.scrape.failed", "n": 1}, {"event_name": "rlinsight.scrape.recovered", "n": 1}
    ]  # fmt: skip
    (target,) = rows(path, "SELECT * FROM scrape_targets WHERE target = 'engine'")
    assert target["url"] == url
    assert 0 < target["failures"] < target["scrapes"]
    assert "Error" in target["last_error"]  # refused, or cut off in the middle
    assert target["last_success"] is not None


def drip(handler: BaseHTTPRequestHandler) -> None:
    """One byte at a time: no read of it takes long."""
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b"#")
            handler.wfile.flush()
            time.sleep(0.05)


def flood(handler: BaseHTTPRequestHandler) -> None:
    """More than any scrape may bring."""
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        for _ in range(20):
            handler.wfile.write(b"# " + b"x" * 1024**2)


MISBEHAVIOUR: dict[str, tuple[Respond, str]] = {
    "hanging": (lambda handler: time.sleep(10), "no complete answer within"),
    "dripping": (drip, "no complete answer within"),
    "huge": (flood, "is over 10485760 bytes"),
    "malformed": (saying("<html>no metrics here</html>"), "not in the format"),
    "missing": (saying("gone", 404), "HTTP 404"),
    "redirecting": (saying("", 302, Location="http://127.0.0.1:1/"), "HTTP 302"),
    "compressed": (saying("a 1\n", Content_Encoding="gzip"), "compressed"),
    "binary": (saying("\xff\xfe"), "not UTF-8"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_target_that_misbehaves_is_a_row_with_its_reason(name: str, collector: live.Collector, path: Path) -> None:
    """Whatever a target does, each scrape of it is stored as up = 0, and why is told once."""
    respond, reason = MISBEHAVIOUR[name]
    interval_s, scrapes = (10.0, 1) if name == "huge" else (0.2, 2)  # ten megabytes take their time on a busy machine
    with serving(respond) as url:
        register(collector, url, name, interval_s=interval_s)
        target, *_ = eventually(
            path,
            "SELECT * FROM scrape_targets WHERE target = $name AND failures >= $scrapes AND last_error <> ''",
            name=name,
            scrapes=scrapes,
        )
    assert reason in target["last_error"]
    assert (target["up"], target["last_success"]) == (False, None)
    told = rows(path, "SELECT count(*) AS n FROM otel_logs WHERE service_name = $name", name=name)
    assert told == [{"n": 1}]


def test_targets_go_with_the_process_that_asked(collector: live.Collector, path: Path) -> None:
    """A target of a process that ends is scraped no more and no longer listed."""
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with serving(saying("a 1\n")) as url:
        register(collector, url, "short-lived", pid=owner.pid)
        eventually(path, "SELECT 1 FROM scrape_targets WHERE target = 'short-lived' AND up")
        (listed,) = targets(collector).json()["targets"]
        owner.communicate(b"\n")
        deadline = time.monotonic() + 30
        while targets(collector).json()["targets"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert (listed["name"], listed["up"], listed["pid"]) == ("short-lived", True, owner.pid)


def test_a_request_for_targets_is_checked(collector: live.Collector) -> None:
    """Without the token nothing is scraped; a bad request is a 400 that says what is wrong, and starts nothing."""
    good = {"url": "http://127.0.0.1:1/metrics", "name": "a"}
    assert collector.http.post("/v1/targets", json={"pid": 1, "targets": [good]}).status_code == 401
    for change, word in [
        ({"url": "file:///etc/passwd"}, "http"),
        ({"url": "http://user:pass@host/metrics"}, "credentials"),
        ({"interval_s": 0}, "interval_s"),
        ({"name": "a b"}, "name"),
        ({"colour": "red"}, "colour"),
    ]:
        response = targets(collector, "POST", pid=os.getpid(), targets=[good | change])
        assert (response.status_code, word in response.text) == (400, True), response.text
    assert targets(collector, "POST", pid=0, targets=[good]).status_code == 400
    assert targets(collector).json() == {"targets": []}


def test_scraping_keeps_no_collector_alive(tmp_path: Path) -> None:
    """With its last owner gone a collector leaves after the usual grace, though scrapes go on coming in."""
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with (
        serving(saying("a 1\n")) as url,
        live.collector(tmp_path / "store.duckdb", "--owner-pid", str(owner.pid)) as collector,
    ):
        register(collector, url, "busy", interval_s=0.1)
        owner.communicate(b"\n")
        assert collector.process.wait(20) == 0


def test_what_the_store_had_no_room_for_is_told_with_the_next_scrape() -> None:
    """An event refused while the queue is full is not lost: that a target is down is told once there is room."""
    told, full = [], threading.Event()
    full.set()

    class Intake:
        def take(self, signal: str, *_: Any, **__: Any) -> Any:
            if full.is_set():
                raise Overloaded("full")
            told.append(signal)
            done: Future[bool] = Future()
            done.set_result(True)
            return SimpleNamespace(done=done)

    scraper = Scraper(Intake())  # type: ignore[arg-type]
    try:
        scraper.add(os.getpid(), None, None, [ScrapeTarget(name="a", url="http://127.0.0.1:1/metrics", interval_s=0.1)])
        deadline = time.monotonic() + 20
        while scraper.status()[0]["failures"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        full.clear()
        while told.count("metrics") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        scraper.close()
    assert told.count("logs") == 1
