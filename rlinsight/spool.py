"""Delivers spooled batches to a collector, in order, each until it is acknowledged or refused.

What waits goes in one request where the receiver takes that (``wire.SPOOL_PATH``), as ours does, so that it is stored
in one transaction; to any other OTLP receiver each batch is a request of its signal. Owns the HTTP requests, retries,
and the leftovers of dead producers. Does not own the files (segments.py), nor what fills them (exporter.py).
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource

from rlinsight import names
from rlinsight.counts import Counts, correct, of_killed, remove
from rlinsight.errors import CollectorError, SpoolError
from rlinsight.otlp import Encoder
from rlinsight.segments import LOCK, Segments
from rlinsight.wire import (
    PRODUCER_HEADER,
    PROTOBUF,
    SEQ_HEADER,
    SPOOL_PATH,
    SPOOL_RECORDS,
    SPOOL_TYPE,
    Batch,
    failure,
    partial_success,
    read_outcomes,
    record,
)

POST_TIMEOUT_S = 10.0
POLL_S = 0.5
BACKOFF_S = (0.1, 5.0)  # first and longest wait between attempts; each is jittered by half
REQUEST_BYTES = 4 * 1024**2  # of several batches in one request
UNKNOWN = frozenset({404, 405, 415, 501})  # a receiver's word about a path or a type it does not know
REFUSED = frozenset({400, 413, 415, 422})  # the batch itself is at fault: trying again cannot help
MAX_RETRY_AFTER_S = 60.0  # of what a server asks for: by then another may serve the store
MAX_SERVER_ERRORS = 10  # answers 500 to one batch before it counts as poison, so that it does not block the rest
DEATH_SEQ = 2**62  # of the report about a killed producer: one per producer, above any it reached itself

# Where the collector is now, base URL and token; None when that is unknown. Asked only after an attempt has failed.
Locate = Callable[[], tuple[str, str | None] | None]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Delivered:
    """What ``deliver_leftovers`` did."""

    batches: int = 0  # requests the collector stored or refused
    sent: int = 0  # items it stored, now or, unknown to the dead producer, before
    rejected: int = 0  # items it refused, with their batch or out of it
    torn_batches: int = 0  # requests cut off when their producer was killed
    lost: int = 0  # items not yet on disk when their producer was killed
    in_use: int = 0  # folders left alone: their producer lives, or another process delivers them
    remaining: int = 0  # folders with undelivered batches


@dataclass(frozen=True, slots=True)
class _Reply:
    verdict: Literal["stored", "refused", "failed", "unavailable", "denied"]
    detail: str
    rejected: int = 0
    retry_after_s: float = 0.0
    late: bool = False  # nothing was heard in time


class Sender:
    """Posts the batches of one folder over one kept-alive connection, to wherever the collector is."""

    def __init__(
        self, segments: Segments, endpoint: str, token: str | None, counts: Counts, locate: Locate | None = None
    ) -> None:
        self.batches = 0  # settled: stored or refused
        self._segments = segments
        self._counts = counts
        self._locate = locate
        self._address = endpoint, token
        self._alone = 0  # batches to send one by one: a request of all of them was too much, or one of them no good
        self._aim(endpoint, token)
        self._random = random.Random()  # its own: training seeds and reads the global generator
        self._unreachable = False

    def run(
        self,
        stop: threading.Event,
        *,
        until_empty: bool = False,
        deadline: float = math.inf,
        due: threading.Event | None = None,
    ) -> None:
        """Deliver until ``stop``, until the folder is empty if asked, or until ``deadline`` (time.monotonic).

        With ``due``, all that is there each time that is set, and ``stop`` is seen then; else whatever comes, at once.
        Raises CollectorError when it should come to an end and the collector wants another token.
        """
        attempts = server_errors = 0
        empty = True
        while not stop.is_set() and time.monotonic() < deadline:
            if due is not None and empty:
                due.wait()
                due.clear()  # before looking: what is written from here on sets it again
                if stop.is_set():
                    return
            records = SPOOL_RECORDS if self._bulk and not self._alone else 1
            batches = self._segments.peek_many(0 if until_empty or due else POLL_S, records, REQUEST_BYTES)
            empty = not batches
            if empty:
                if until_empty:
                    return
                continue
            replies = self._send(batches, min(POST_TIMEOUT_S, max(deadline - time.monotonic(), 0.1)))
            if stop.is_set():
                return  # the folder may be another's by now; if it was stored, the collector knows it again
            for batch, reply in zip(batches, replies, strict=False):
                if reply.verdict in ("unavailable", "denied") and self._has_moved():
                    break
                if reply.verdict == "denied" and until_empty:
                    raise CollectorError(
                        f"the collector at {self._address[0]} wants its token ({reply.detail}); it is in the .endpoint "
                        "file beside the store, readable by who started it"
                    )
                server_errors += reply.verdict == "failed"
                self._note_reachability(reply)
                if reply.verdict not in ("stored", "refused") and server_errors < MAX_SERVER_ERRORS:
                    attempts += 1
                    self._counts.retried += attempts == 1
                    stop.wait(max(min(self._pause(attempts, reply), deadline - time.monotonic()), 0))
                    break
                self._settle(batch, reply)
                attempts = server_errors = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _aim(self, endpoint: str, token: str | None) -> None:
        self._connection = _connect(endpoint)
        self._base = urlsplit(endpoint).path.rstrip("/")
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self._bulk = True  # until the receiver says that it does not know that path

    def _has_moved(self) -> bool:
        """Whether the collector is another one now, with a port and token of its own; from here on it is that one."""
        found = self._locate() if self._locate else None
        if found is None or found == self._address:
            return False
        self._connection.close()
        self._address = found
        self._aim(*found)
        return True

    def _settle(self, batch: Batch, reply: _Reply) -> None:
        """The batch is done with."""
        self.batches += 1
        self._alone = max(self._alone - 1, 0)
        if reply.verdict == "stored":
            self._counts.sent += batch.items - reply.rejected
            self._counts.rejected += reply.rejected
            self._segments.ack(batch)
            if reply.rejected:
                _log.warning(
                    "the collector refused %d of %d telemetry items: %s", reply.rejected, batch.items, reply.detail
                )
            return
        self._counts.rejected += batch.items
        self._segments.bury(batch)
        _log.warning(
            "the collector refused telemetry batch %d (%d items, %d bytes): %s; it is kept in %s",
            batch.seq, batch.items, len(batch.payload), reply.detail, self._segments.path,
        )  # fmt: skip

    def _note_reachability(self, reply: _Reply) -> None:
        unreachable = reply.verdict in ("unavailable", "denied")
        if unreachable and not self._unreachable:
            _log.warning("collector unavailable (%s); telemetry waits in %s", reply.detail, self._segments.path)
        self._unreachable = unreachable

    def _pause(self, attempts: int, reply: _Reply) -> float:
        first, longest = BACKOFF_S
        backoff = min(first * 2 ** min(attempts - 1, 16), longest) * self._random.uniform(0.5, 1.5)
        return max(backoff, min(reply.retry_after_s, MAX_RETRY_AFTER_S))

    def _send(self, batches: list[Batch], timeout_s: float) -> list[_Reply]:
        """One attempt to deliver batches: what became of the first of them, of several in a request of several."""
        if not self._bulk or self._alone:
            return [self.post(batches[0], timeout_s)]
        headers = {"Content-Type": SPOOL_TYPE, PRODUCER_HEADER: self._segments.producer}
        answer = self._request(SPOOL_PATH, b"".join(record(batch, batch.seq) for batch in batches), headers, timeout_s)
        if isinstance(answer, _Reply):
            self._alone = len(batches) if answer.late else 0  # a thin line may bear them in pieces
            return [answer]
        head, body = answer
        found = read_outcomes(body, batches) if head.status == 200 else None
        if found is not None:
            after = head.getheader("Retry-After")
            return [_reply(each.status, each.detail, after, each.rejected) for each in found]
        if head.status in UNKNOWN or head.status < 300:  # some say yes to everything
            self._bulk = False
            return self._send(batches, timeout_s)
        reply = _failed(head, body)
        if reply.verdict == "unavailable":
            return [reply]
        self._alone = len(batches)  # some deny what they do not know
        return self._send(batches, timeout_s)

    def post(self, batch: Batch, timeout_s: float = POST_TIMEOUT_S) -> _Reply:
        """One attempt to deliver a batch, in a request of its signal."""
        headers = {
            "Content-Type": PROTOBUF,
            PRODUCER_HEADER: self._segments.producer,
            SEQ_HEADER: str(batch.seq),
        }
        answer = self._request(f"/v1/{batch.signal}", batch.payload, headers, timeout_s)
        if isinstance(answer, _Reply):
            return answer
        head, body = answer
        if 200 <= head.status < 300:
            rejected, detail = partial_success(batch.signal, body)
            return _Reply("stored", detail, rejected=rejected)
        return _failed(head, body)

    def _request(
        self, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[http.client.HTTPResponse, bytes] | _Reply:
        """The answer to a POST, or what to think of there being none."""
        reused = self._connection.sock is not None
        try:
            self._connection.timeout = timeout_s
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout_s)
            self._connection.request("POST", f"{self._base}{path}", body, headers | self._authorization)
            answer = self._connection.getresponse()
            return answer, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request reconnects
            if reused and isinstance(error, ConnectionError):  # the server closed an idle connection
                return self._request(path, body, headers, timeout_s)
            return _Reply("unavailable", f"{type(error).__name__}: {error}", late=isinstance(error, TimeoutError))


def deliver_leftovers(spool_dir: Path, endpoint: str, token: str | None = None, timeout_s: float = 30.0) -> Delivered:
    """Deliver what dead producers left in ``spool_dir``, within ``timeout_s`` seconds.

    Folders of living producers, and those another process is delivering, are left alone. Batches keep their producer
    and number, so what the collector has already stored is not stored twice. Raises SpoolError, and
    CollectorError when the collector wants another token.
    """
    total = Delivered()
    deadline = time.monotonic() + timeout_s
    for path in producers(spool_dir):
        try:
            segments = Segments.adopt(path)
            if segments is not None:
                _deliver_folder(segments, endpoint, token, deadline, total)
            elif path.exists():  # else another process just delivered and removed it
                total.in_use += 1
        except OSError as error:
            raise SpoolError(f"spool {path} cannot be delivered ({error}); copy it to a writable directory") from None
    return total


def producers(spool_dir: Path) -> list[Path]:
    """Folders of producers, by name; empty when there is no such directory. Raises SpoolError."""
    try:
        # A hidden one is still being made.
        entries = sorted(entry.path for entry in os.scandir(spool_dir) if entry.is_dir() and entry.name[0] != ".")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SpoolError(f"spool {spool_dir} cannot be read ({error}); copy it to a readable directory") from None
    return [Path(entry) for entry in entries if _may_hold_lock(entry)]


def _may_hold_lock(folder: str) -> bool:
    try:
        os.stat(os.path.join(folder, LOCK))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # another user's: who opens it learns why it cannot be had
        return True
    return True


def _deliver_folder(segments: Segments, endpoint: str, token: str | None, deadline: float, total: Delivered) -> None:
    counts = Counts()
    sender = Sender(segments, endpoint, token, counts)
    try:
        killed = _of_killed(segments)
        sender.run(threading.Event(), until_empty=True, deadline=deadline)
        if segments.peek(0) is not None or (killed and not _report_death(sender, segments, killed, counts)):
            total.remaining += 1
        else:
            remove(segments.producer)
        # Without the counters only a cut-off record tells of a loss.
        total.lost += _unsynced(killed) if killed else segments.torn_items
    finally:
        sender.close()
        segments.close()
    total.batches += sender.batches
    total.torn_batches += segments.torn_batches
    total.sent += counts.sent
    total.rejected += counts.rejected


def _of_killed(segments: Segments) -> Counts | None:
    """The counters of a killed producer, with what had reached its disk when it was killed before it could count it."""
    killed = of_killed(segments.producer)
    if killed is not None:
        items, seq = segments.beyond(killed.written_seq)
        if items:
            killed.written, killed.written_seq = killed.written + items, seq
            correct(segments.producer, killed)
    return killed


def _unsynced(killed: Counts) -> int:
    return killed.emitted - killed.dropped - killed.written


def _report_death(sender: Sender, segments: Segments, killed: Counts, delivered: Counts) -> bool:
    """Send a killed producer's last health report, with what it lost; whether the collector took it."""
    lost = _unsynced(killed)
    if lost:
        _log.warning("%d telemetry items were not on disk yet when %s was killed", lost, segments.producer)
    killed.rejected = max(killed.rejected, delivered.rejected)
    killed.sent = killed.written - killed.rejected  # what was on disk is delivered by now
    attributes = {
        names.PRODUCER: segments.producer,
        **killed.report(),
        names.DROPPED_CRASH: lost,
        names.QUEUE_LENGTH: 0,
    }
    owner = json.loads(segments.owner)
    encoder = Encoder(Resource(owner["attributes"], owner["schema_url"]))
    payload = encoder.encode([encoder.record(names.PRODUCER_HEALTH, time.time_ns(), attributes)])
    return sender.post(Batch("logs", 1, payload, DEATH_SEQ)).verdict in ("stored", "refused")


def _connect(endpoint: str) -> http.client.HTTPConnection:
    url = urlsplit(endpoint)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "127.0.0.1", url.port, timeout=POST_TIMEOUT_S)


def _failed(head: http.client.HTTPResponse, body: bytes) -> _Reply:
    detail = failure(head.status, head.getheader("Content-Type"), body)
    return _reply(head.status, detail, head.getheader("Retry-After"))


def _reply(status: int, detail: str, retry_after: str | None, rejected: int = 0) -> _Reply:
    """What HTTP's status says about a batch."""
    if 200 <= status < 300:
        return _Reply("stored", detail, rejected=rejected)
    if status in REFUSED:
        return _Reply("refused", detail)
    if status in (401, 403):
        return _Reply("denied", detail)
    return _Reply("failed" if status == 500 else "unavailable", detail, retry_after_s=_retry_after(retry_after))


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
