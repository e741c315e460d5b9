"""Scrapes Prometheus and OpenMetrics endpoints, each at its interval, while the process that asked for it lives.

What comes back enters through the intake as an OTLP request, like any sender's. Every scrape stores ``up`` and
``scrape_duration_seconds``, so that a target that is gone is a row and not silence; an event tells when that changes,
and why. Does not own the formats (scrape_parse.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from collectors.intake import Intake
from collectors.payload import PROTOBUF
from collectors.scrape_parse import OPENMETRICS, Answer, Malformed, Resets, attributes, gauge, parse
from collectors.writer import Overloaded
from rlinsight import __version__, names
from rlinsight.config import ScrapeTarget
from rlinsight.store import is_alive
from rlinsight.wire import Signal

TIMEOUT_S = 1.0, 10.0  # of a scrape: its interval, within these
MAX_ANSWER_BYTES = 10 * 1024**2
MAX_TARGETS = 256
SCOPE = "rlinsight.scrape"
HEADERS = {
    # Without that escaping Python's client writes vllm:x as vllm_x, in half of its lines, which no parser accepts.
    "Accept": f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.9,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "identity",  # an answer's size is known before it is inflated
    "User-Agent": f"rlinsight/{__version__}",
}

_log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request, with its query


class Failed(Exception):
    """A scrape that brought nothing, and why."""


class TooMany(ValueError):
    """More targets than one collector scrapes."""


@dataclass
class _Target:
    """One endpoint: whose it is, when it was last well, and its running task."""

    asked: ScrapeTarget
    pid: int
    known_at_ns: int
    resource: dict[str, str | int]
    producer: str
    resets: Resets = field(default_factory=Resets)
    seq: int = 0
    scrapes: int = 0
    failures: int = 0
    up: bool | None = None  # None before the first scrape
    told: bool = True  # whether the store was last told that it is up; nothing is told of one that always was
    error: str | None = None
    task: asyncio.Task[None] | None = None


class Scraper:
    """The targets of all runs, in one thread. Calls may come from any thread."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._lock = threading.Lock()
        self._targets: dict[tuple[int, str], _Target] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scraper", daemon=True)
        self._thread.start()

    def add(self, pid: int, run_id: str | None, attempt: int | None, targets: Iterable[ScrapeTarget]) -> None:
        """Scrape these for as long as the process lives; one of a name it already has replaces that. Raises TooMany."""
        for asked in targets:
            resource: dict[str, str | int] = {
                **asked.labels,
                names.SERVICE_NAME: asked.name,
                names.SERVICE_INSTANCE_ID: urlsplit(asked.url).netloc,
                names.URL: _without_query(asked.url),
            }
            if run_id is not None:
                resource |= {names.RUN_ID: run_id, names.ATTEMPT: attempt or 1}
            producer = f"scrape-{asked.name}-{secrets.token_hex(8)}"
            target = _Target(asked, pid, time.time_ns(), resource, producer)
            with self._lock:
                if len(self._targets) >= MAX_TARGETS and (pid, asked.name) not in self._targets:
                    raise TooMany(f"{MAX_TARGETS} targets are scraped already; remove some first")
                replaced = self._targets.get((pid, asked.name))
                self._targets[pid, asked.name] = target
            self._cancel(replaced)
            self._loop.call_soon_threadsafe(self._begin, target)

    def remove(self, pid: int, name: str | None = None) -> None:
        """Stop scraping a process's targets, or the one of this name."""
        with self._lock:
            keys = [key for key in self._targets if key[0] == pid and name in (None, key[1])]
            removed = [self._targets.pop(key) for key in keys]
        for target in removed:
            self._cancel(target)

    def status(self) -> list[dict[str, Any]]:
        """Every target with how it does."""
        with self._lock:
            targets = list(self._targets.values())
        return [
            {
                "name": target.asked.name, "url": _without_query(target.asked.url), "pid": target.pid,
                "run_id": target.resource.get(names.RUN_ID), "interval_s": target.asked.interval_s, "up": target.up,
                "scrapes": target.scrapes, "failures": target.failures, "error": target.error,
            }
            for target in targets
        ]  # fmt: skip

    def close(self) -> None:
        """Stop all of it."""
        with self._lock:
            targets = list(self._targets.values())
            self._targets.clear()
        asyncio.run_coroutine_threadsafe(_end(targets), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _cancel(self, target: _Target | None) -> None:
        def cancel() -> None:
            if target is not None and target.task is not None:
                target.task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _begin(self, target: _Target) -> None:
        target.task = self._loop.create_task(self._scrape_while_owned(target))

    async def _scrape_while_owned(self, target: _Target) -> None:
        interval_s = target.asked.interval_s
        # No proxies and no redirects: what is asked for is what is fetched.
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, headers=HEADERS, timeout=None) as client:
            while await asyncio.to_thread(is_alive, target.pid, target.known_at_ns):
                with suppress(Exception):  # of the store, and logged there; the next scrape may go well
                    await self._scrape(target, client)
                # At multiples of the interval, so that those of all targets share a transaction, with what producers
                # deliver. Scrapes that were missed are not made up for.
                await asyncio.sleep(interval_s - time.time() % interval_s)
        self.remove(target.pid, target.asked.name)

    async def _scrape(self, target: _Target, client: httpx.AsyncClient) -> None:
        """Fetch, translate and store one answer, or the fact that there is none."""
        time_ns, began = time.time_ns(), time.monotonic()
        answer, error = Answer(), None
        try:
            text, content_type = await _fetch(client, target.asked)
            answer = await asyncio.to_thread(parse, text, content_type, time_ns, target.resets)
        except (Failed, Malformed) as failure:
            error = str(failure)
        except Exception as failure:  # whatever a target provokes is a row
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - began
        target.scrapes, target.failures = target.scrapes + 1, target.failures + (error is not None)
        target.up, target.error = error is None, error
        await self._store(target, "metrics", _metrics_request(target, answer, seconds, time_ns))
        if target.up is not target.told:
            _log.warning("scraping %s: %s", target.asked.name, error or "up again")
            if await self._store(target, "logs", _event_request(target, time_ns)):
                target.told = target.up

    async def _store(self, target: _Target, signal: Signal, body: bytes) -> bool:
        """Whether it is stored; not when the store is behind, or, with its exception, when it fails."""
        target.seq += 1
        try:
            accepted = await asyncio.to_thread(
                self._intake.take, signal, body, PROTOBUF, target.producer, str(target.seq), external=False
            )
            await asyncio.wrap_future(accepted.done)
            return True
        except Overloaded:
            _log.warning("a scrape of %s is dropped: the store is behind", target.asked.name)
            return False
        except Exception as failure:  # of whatever kind, the caller decides
            _log.warning("a scrape of %s is not stored: %s", target.asked.name, failure)
            raise


async def _end(targets: Iterable[_Target]) -> None:
    tasks = [target.task for target in targets if target.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _fetch(client: httpx.AsyncClient, asked: ScrapeTarget) -> tuple[str, str]:
    """Text and content type of an answer. Raises Failed."""
    shortest, longest = TIMEOUT_S
    timeout_s = min(max(asked.interval_s, shortest), longest)
    try:
        async with asyncio.timeout(timeout_s), client.stream("GET", asked.url) as response:
            if response.status_code != 200:
                raise Failed(f"HTTP {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Failed("the answer is compressed, which was not asked for")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise Failed(f"the answer is over {MAX_ANSWER_BYTES} bytes")
            return body.decode("utf-8"), response.headers.get("content-type", "")
    except TimeoutError:
        raise Failed(f"no complete answer within {timeout_s:g} s") from None
    except UnicodeDecodeError:
        raise Failed("the answer is not UTF-8") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Failed(f"{type(error).__name__}: {error}".rstrip(": ")) from None


def _metrics_request(target: _Target, answer: Answer, seconds: float, time_ns: int) -> bytes:
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add(resource=_resource(answer.resource | target.resource))
    scope = resource.scope_metrics.add()
    scope.scope.name, scope.scope.version = SCOPE, __version__
    scope.metrics.extend(answer.metrics)
    scope.metrics.append(gauge(names.UP, names.UP.unit, names.UP.doc, float(bool(target.up)), time_ns))
    for name, value in ((names.SCRAPE_DURATION, seconds), (names.SCRAPE_SAMPLES, float(answer.num_samples))):
        scope.metrics.append(gauge(name, name.unit, name.doc, value, time_ns))
    return request.SerializeToString()


def _event_request(target: _Target, time_ns: int) -> bytes:
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add(resource=_resource(target.resource)).scope_logs.add()
    scope.scope.name, scope.scope.version = SCOPE, __version__
    reason = {names.REASON: target.error} if target.error else {}
    scope.log_records.append(
        LogRecord(
            event_name=names.SCRAPE_FAILED if target.error else names.SCRAPE_RECOVERED,
            time_unix_nano=time_ns,
            observed_time_unix_nano=time_ns,
            severity_number=SeverityNumber.SEVERITY_NUMBER_WARN
            if target.error
            else SeverityNumber.SEVERITY_NUMBER_INFO,
            attributes=attributes({names.URL: _without_query(target.asked.url), **reason}),
        )
    )
    return request.SerializeToString()


def _resource(values: dict[str, Any]) -> Resource:
    return Resource(attributes=attributes(values))


def _without_query(url: str) -> str:
    """The URL as it may be stored: queries can hold tokens."""
    return urlunsplit(urlsplit(url)._replace(query="", fragment=""))
