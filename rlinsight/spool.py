"""Delivers spooled batches to a collector, in order, each until it is acknowledged or refused.

Owns the HTTP request, retries, and the leftovers of dead producers. Does not own the files (segments.py), nor what
fills them (exporter.py).
"""

from __future__ import annotations

import http.client
import logging
import math
import random
import threading
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from rlinsight.segments import Batch, Segments

POST_TIMEOUT_S = 10.0
POLL_S = 0.5
BACKOFF_S = (0.1, 5.0)  # first and longest wait between attempts; each is jittered by half
REFUSED = frozenset({400, 413, 415, 422})  # the batch itself is at fault: trying again cannot help
MAX_SERVER_ERRORS = 10  # answers 500 to one batch before it counts as poison, so that it does not block the rest

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Delivered:
    """What was delivered, cumulative."""

    batches: int = 0
    sent: int = 0  # items the collector stored
    rejected: int = 0  # items it refused, with their batch or out of it
    retried: int = 0  # attempts after the first
    torn_batches: int = 0  # cut off when their producer was killed
    torn_items: int = 0
    remaining: int = 0  # folders with undelivered batches


@dataclass(frozen=True, slots=True)
class _Reply:
    verdict: Literal["stored", "refused", "failed", "unavailable"]
    detail: str
    rejected: int = 0
    retry_after_s: float = 0.0


class Sender:
    """Posts the batches of one folder over one kept-alive connection."""

    def __init__(self, segments: Segments, endpoint: str) -> None:
        self.delivered = Delivered()
        self._segments = segments
        self._connection = _connect(endpoint)
        self._base = urlsplit(endpoint).path.rstrip("/")
        self._random = random.Random()  # its own: training seeds and reads the global generator
        self._unreachable = False

    def run(self, stop: threading.Event, *, until_empty: bool = False, deadline: float = math.inf) -> None:
        """Deliver until ``stop``, until the folder is empty if asked, or until ``deadline`` (time.monotonic)."""
        attempts = server_errors = 0
        while not stop.is_set() and time.monotonic() < deadline:
            batch = self._segments.peek(0 if until_empty else POLL_S)
            if batch is None:
                if until_empty:
                    return
                continue
            reply = self._post(batch, min(POST_TIMEOUT_S, max(deadline - time.monotonic(), 0.1)))
            if stop.is_set():
                return  # the folder may be another's by now; if it was stored, the collector knows it again
            server_errors += reply.verdict == "failed"
            self._note_reachability(reply)
            if reply.verdict == "stored" or reply.verdict == "refused" or server_errors >= MAX_SERVER_ERRORS:
                self._settle(batch, reply)
                attempts = server_errors = 0
            else:
                attempts += 1
                self.delivered.retried += 1
                stop.wait(max(min(self._pause(attempts, reply), deadline - time.monotonic()), 0))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _settle(self, batch: Batch, reply: _Reply) -> None:
        """The batch is done with."""
        self.delivered.batches += 1
        if reply.verdict == "stored":
            self.delivered.sent += batch.items - reply.rejected
            self.delivered.rejected += reply.rejected
            self._segments.ack(batch)
            if reply.rejected:
                _log.warning(
                    "the collector refused %d of %d telemetry items: %s", reply.rejected, batch.items, reply.detail
                )
            return
        self.delivered.rejected += batch.items
        self._segments.bury(batch)
        _log.warning(
            "the collector refused telemetry batch %d (%d items, %d bytes): %s; it is kept in %s",
            batch.seq, batch.items, len(batch.payload), reply.detail, self._segments.path,
        )  # fmt: skip

    def _note_reachability(self, reply: _Reply) -> None:
        unreachable = reply.verdict == "unavailable"
        if unreachable and not self._unreachable:
            _log.warning("collector unavailable (%s); telemetry waits in %s", reply.detail, self._segments.path)
        self._unreachable = unreachable

    def _pause(self, attempts: int, reply: _Reply) -> float:
        first, longest = BACKOFF_S
        backoff = min(first * 2 ** min(attempts - 1, 16), longest) * self._random.uniform(0.5, 1.5)
        return max(backoff, reply.retry_after_s)

    def _post(self, batch: Batch, timeout_s: float) -> _Reply:
        headers = {
            "Content-Type": "application/x-protobuf",
            "x-rlinsight-producer": self._segments.producer,
            "x-rlinsight-seq": str(batch.seq),
        }
        try:
            self._connection.timeout = timeout_s
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout_s)
            self._connection.request("POST", f"{self._base}/v1/{batch.signal}", batch.payload, headers)
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request reconnects
            return _Reply("unavailable", f"{type(error).__name__}: {error}")
        if 200 <= answer.status < 300:
            rejected, detail = _partial_success(batch, body)
            return _Reply("stored", detail, rejected=rejected)
        detail = f"HTTP {answer.status} {body[:200].decode('utf-8', 'replace')}".strip()
        if answer.status in REFUSED:
            return _Reply("refused", detail)
        verdict = "failed" if answer.status == 500 else "unavailable"
        return _Reply(verdict, detail, retry_after_s=_retry_after(answer.getheader("Retry-After")))


def deliver_leftovers(spool_dir: Path, endpoint: str, timeout_s: float = 30.0) -> Delivered:
    """Deliver what dead producers left in ``spool_dir``, within ``timeout_s`` seconds.

    Folders of living producers, and those another process is delivering, are left alone. Batches keep their producer
    and number, so what the collector has already stored is not stored twice. A record cut off by a kill is counted.
    """
    total = Delivered()
    deadline = time.monotonic() + timeout_s
    for path in sorted(path for path in Path(spool_dir).glob("[!.]*") if path.is_dir()):
        segments = Segments.adopt(path)
        if segments is None:
            continue
        sender = Sender(segments, endpoint)
        try:
            sender.run(threading.Event(), until_empty=True, deadline=deadline)
            total.remaining += segments.peek(0) is not None
        finally:
            sender.close()
            segments.close()
        for name in ("batches", "sent", "rejected", "retried"):
            setattr(total, name, getattr(total, name) + getattr(sender.delivered, name))
        total.torn_batches += segments.torn_batches
        total.torn_items += segments.torn_items
    if total.torn_batches:
        _log.warning("%d telemetry batches (at least %d items) were cut off when their producer was killed",
                     total.torn_batches, total.torn_items)  # fmt: skip
    return total


def _connect(endpoint: str) -> http.client.HTTPConnection:
    url = urlsplit(endpoint)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "127.0.0.1", url.port, timeout=POST_TIMEOUT_S)


def _partial_success(batch: Batch, body: bytes) -> tuple[int, str]:
    """Items of a stored batch the collector left out, and why."""
    try:
        if batch.signal == "traces":
            partial = ExportTraceServiceResponse.FromString(body).partial_success
            return partial.rejected_spans, partial.error_message
        if batch.signal == "logs":
            partial = ExportLogsServiceResponse.FromString(body).partial_success
            return partial.rejected_log_records, partial.error_message
        partial = ExportMetricsServiceResponse.FromString(body).partial_success
        return partial.rejected_data_points, partial.error_message
    except DecodeError:
        return 0, ""


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header, which is a number or an HTTP date."""
    if not value:
        return 0.0
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return 0.0
