"""What both ends of a delivery agree on beyond OTLP's messages: signals, the number of a batch, partial success, and
the record a batch makes on disk and, with others of its producer, in one request to ``SPOOL_PATH``.

A record is a 25-byte header with the payload's length and checksum, then the payload, an OTLP request. The answer to
``SPOOL_PATH`` says of each record what HTTP's status would say had it come alone.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, BinaryIO, Literal, get_args

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

Signal = Literal["traces", "logs", "metrics"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
PROTOBUF = "application/x-protobuf"
PRODUCER_HEADER = "x-rlinsight-producer"
SEQ_HEADER = "x-rlinsight-seq"
SPOOL_PATH = "/v1/spool"
SPOOL_TYPE = "application/vnd.rlinsight.spool"
SPOOL_RECORDS = 64  # in one request, at most
DELIVER_S = 2.5  # producers deliver at its multiples of the wall clock, so that their batches meet in the collector

# Magic, signal, seq, items, payload bytes, crc32 of payload and the fields before it.
HEADER = struct.Struct("<4sBQIII")
MAGIC = b"rlsp"

_RESPONSES: dict[Signal, tuple[Any, str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """One serialized export request."""

    signal: Signal
    items: int  # spans, log records or metric points inside
    payload: bytes
    seq: int = 0  # 1, 2, ... per producer; 0 until it is in a segment


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one record of a request to ``SPOOL_PATH``."""

    seq: int
    status: int  # HTTP's
    rejected: int = 0  # items, of a stored batch
    detail: str = ""


def record(batch: Batch, seq: int) -> bytes:
    """The batch as it is kept and sent, under that number."""
    fields = (MAGIC, SIGNALS.index(batch.signal), seq, batch.items, len(batch.payload))
    checksum = zlib.crc32(batch.payload, zlib.crc32(repr(fields).encode()))
    return HEADER.pack(*fields, checksum) + batch.payload


def read_record(file: BinaryIO) -> tuple[Batch | None, int, int]:
    """The next record, its length, its items; no batch if it is damaged, length 0 if nothing can follow it."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None, 0, 0
    *fields, checksum = HEADER.unpack(header)
    magic, signal, seq, items, length = fields
    if magic != MAGIC or signal >= len(SIGNALS):
        return None, 0, 0
    payload = file.read(length)
    if len(payload) < length:
        return None, 0, items
    if zlib.crc32(payload, zlib.crc32(repr(tuple(fields)).encode())) != checksum:
        return None, HEADER.size + length, items
    return Batch(SIGNALS[signal], items, payload, seq), HEADER.size + length, items


def unpack(body: bytes) -> list[Batch]:
    """The batches of a request to ``SPOOL_PATH``. Raises ValueError for none, too many, or a damaged one."""
    file, batches, position = io.BytesIO(body), [], 0
    while position < len(body) or not batches:
        batch, length, _ = read_record(file)
        if batch is None:
            raise ValueError(f"the record at byte {position} is damaged")
        if len(batches) == SPOOL_RECORDS:
            raise ValueError(f"more than {SPOOL_RECORDS} records; send them in several requests")
        batches.append(batch)
        position += length
    return batches


def outcomes(found: Sequence[Outcome]) -> bytes:
    """The answer to a request to ``SPOOL_PATH``: one outcome per record, in their order."""
    return json.dumps([astuple(outcome) for outcome in found]).encode()


def read_outcomes(answer: bytes, batches: Sequence[Batch]) -> list[Outcome] | None:
    """What ``outcomes`` said about these batches; None for an answer in another form."""
    try:
        found = [Outcome(*fields) for fields in json.loads(answer)]
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = (int, int, int, str)
    well_formed = all(tuple(map(type, astuple(outcome))) == kinds for outcome in found)
    return found if well_formed and [o.seq for o in found] == [batch.seq for batch in batches] else None


def response(signal: Signal, rejected: int, problem: str | None) -> Message:
    """The answer to a stored request; with partial_success when items of it were rejected."""
    kind, field = _RESPONSES[signal]
    return kind(partial_success={field: rejected, "error_message": problem or ""}) if rejected else kind()


def partial_success(signal: Signal, answer: bytes) -> tuple[int, str]:
    """How many items of a stored request were rejected, and why; 0 for an answer in another form."""
    kind, field = _RESPONSES[signal]
    try:
        partial = kind.FromString(answer).partial_success
    except DecodeError:
        return 0, ""
    return getattr(partial, field), partial.error_message


def failure(status: int, content_type: str | None, answer: bytes) -> str:
    """What a receiver says of a failure: in OTLP a google.rpc.Status in the encoding of the request, else any text."""
    text = answer[:200].decode("utf-8", "replace")
    if content_type == PROTOBUF:
        with suppress(DecodeError):
            text = Status.FromString(answer).message[:200]
    return f"HTTP {status} {text}".strip()
