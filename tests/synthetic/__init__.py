"""A believable GRPO run as OTLP requests, for tests that need a filled store without training anything.

``requests(Run(...))`` yields what the processes of a run would send; ``fill(store, Run(...), ...)`` puts them into a
DuckDB file through the collector's own decoder and writer. All values are seeded inventions; nothing is measured.
``Run(faults=...)`` plants what FAULTS describes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from collectors.database import Database
from collectors.decode import Decoder
from collectors.writer import Batch, Writer
from tests.synthetic.run import FAULTS, SECOND, Run
from tests.synthetic.steps import requests
from tests.synthetic.wire import Request

__all__ = ["FAULTS", "SECOND", "Request", "Run", "batch", "deliver", "fill", "requests"]


def fill(store: Path, *runs: Run) -> None:
    """Write runs into a store through the real decoder and writer; the file is closed on return."""
    deliver(store, (request for run in runs for request in requests(run)))


def deliver(store: Path, sent: Iterable[Request]) -> None:
    """Write requests into a store, as ``fill``."""
    database = Database(store)
    try:
        decoder, writer = Decoder(database.columns), Writer(database.con, database.columns)
        writer.start()
        pending = []
        for request in sent:
            while not writer.has_room():
                pending.pop(0).result(60)
            pending.append(writer.submit(batch(decoder, request)))
        writer.close()
        for future in pending:
            assert future.result(60)
    finally:
        database.close()


def batch(decoder: Decoder, request: Request) -> Batch:
    """A request decoded, as the receivers do it."""
    batch_id = f"{request.producer}/{request.signal}/{request.seq}"
    now = time.time_ns()
    decoded = getattr(decoder, request.signal)(request.message, batch_id, now)
    assert not decoded.rejected, decoded.problem
    return Batch(batch_id, request.producer, request.seq, request.signal, request.message.ByteSize(), now, decoded)
