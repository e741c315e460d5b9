"""From a request's bytes to a stored batch: identity, parsing, decoding, queueing. Shared by HTTP and gRPC.

Owns who a batch is from and what the sender is told. Does not know either transport.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass

from google.protobuf.message import Message

from collectors.decode import Decoded, Decoder
from collectors.limits import check_request, check_rows
from collectors.payload import PROTOBUF, PayloadError, parse
from collectors.writer import Batch, Overloaded, Writer
from rlinsight.wire import DELIVER_S, PRODUCER_HEADER, SEQ_HEADER, Signal, response, unpack

TOGETHER_S = 0.5  # after each of the moments at which producers deliver: what comes then has company

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A decoded batch in the queue. Answer the sender once ``done`` has resolved: only then is it stored."""

    signal: Signal
    decoded: Decoded
    done: Future[bool]

    def response(self) -> Message:
        """The OTLP response, with partial_success when items were rejected."""
        return response(self.signal, self.decoded.rejected, self.decoded.problem)


class Intake:
    """Takes request bodies from any thread. ``last_ns`` is when the latest came in (time.monotonic_ns), 0 before."""

    def __init__(self, decoder: Decoder, writer: Writer) -> None:
        self._decoder = decoder
        self._writer = writer
        self.last_ns = 0

    def check_room(self) -> None:
        """Raises Overloaded when a batch would not be accepted, before its body is read and decoded."""
        if not self._writer.has_room():
            raise Overloaded(f"{self._writer.queued_batches} batches are waiting for the store")

    def take(
        self,
        signal: Signal,
        body: bytes,
        content_type: str,
        producer: str | None,
        seq: str | None,
        *,
        external: bool = True,
    ) -> Accepted:
        """Decode a body and queue it. Raises PayloadError, Overloaded.

        One of our own is no sign of a living sender, and may wait a moment for others.
        """
        if external:
            self.last_ns = time.monotonic_ns()
        batch = self._batch(signal, body, content_type, producer, seq)
        batch.patient = not external
        return self._submit(batch)

    def take_spool(self, body: bytes, producer: str | None) -> list[tuple[int, Accepted | Exception]]:
        """Decode the records of a spool and queue them, each as if it had come alone: its number, and what it met.

        They wait for each other and, when all producers deliver, a moment for those of others; never when a producer
        delivers out of turn, since then somebody waits for the answer. Raises PayloadError for a body that is none.
        """
        self.last_ns = time.monotonic_ns()
        in_turn = time.time() % DELIVER_S < TOGETHER_S
        try:
            sent = unpack(body)
        except ValueError as error:
            raise PayloadError(400, f"body is no part of a spool: {error}") from None
        if not producer:
            raise PayloadError(400, f"{PRODUCER_HEADER} must name the producer of a spool")
        decoded: list[tuple[int, Batch | Exception]] = []
        for record in sent:
            try:
                batch = self._batch(record.signal, record.payload, PROTOBUF, producer, str(record.seq))
                decoded.append((record.seq, batch))
            except PayloadError as error:
                decoded.append((record.seq, error))
            except Exception as error:  # a bug, which shall cost this record alone
                logger.exception("record %d of %s cannot be decoded", record.seq, producer)
                decoded.append((record.seq, error))
        batches = [batch for _, batch in decoded if isinstance(batch, Batch)]
        for batch in batches:
            batch.patient = in_turn or batch is not batches[-1]
        return [(seq, self._queued(batch)) for seq, batch in decoded]

    def _queued(self, batch: Batch | Exception) -> Accepted | Exception:
        try:
            return batch if isinstance(batch, Exception) else self._submit(batch)
        except Overloaded as error:
            return error

    def _submit(self, batch: Batch) -> Accepted:
        return Accepted(batch.signal, batch.decoded, self._writer.submit(batch))

    def _batch(self, signal: Signal, body: bytes, content_type: str, producer: str | None, seq: str | None) -> Batch:
        received_ns = time.time_ns()
        number = _number(producer, seq)
        request = parse(signal, body, content_type)
        shared = check_request(signal, request)
        if producer is not None and number is not None:
            batch_id = f"{producer}/{signal}/{number}"
        else:
            producer = None
            batch_id = f"{signal}/sha256:{hashlib.sha256(body).hexdigest()}"
        decode = {"traces": self._decoder.traces, "logs": self._decoder.logs, "metrics": self._decoder.metrics}[signal]
        decoded = decode(request, batch_id, received_ns)
        check_rows(decoded.rows, len(body))
        return Batch(batch_id, producer, number, signal, len(body), received_ns, decoded, shared)


def _number(producer: str | None, seq: str | None) -> int | None:
    """The sequence number of an identified sender. Half an identity is refused: it would be stored twice on a retry."""
    if producer is None and seq is None:
        return None
    if not producer or not re.fullmatch(r"[0-9]{1,19}", seq or "") or int(seq or "") >= 2**63:
        raise PayloadError(400, f"{PRODUCER_HEADER}={producer!r} and {SEQ_HEADER}={seq!r} must be a name and a number")
    return int(seq or "")
