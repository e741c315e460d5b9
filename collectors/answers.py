"""Answers on their way to their readers, in memory until they are taken: how many bytes of them there may be, and how
long a reader may take nothing. Lives in the event loop, so it needs no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from collectors.writer import Overloaded

MAX_LEAVING_BYTES = 1024**3  # twice what one may have
PIECE_BYTES = 256 * 1024  # handed to the server at a time; it takes the next when the connection has taken this one
# For a piece to be taken: a reader that stalls gives its share of the above back. A slow one empties the system's own
# buffers first, which hold some megabytes.
STALL_S = 120.0


class Leaving:
    """The bytes of all answers on their way out."""

    def __init__(self) -> None:
        self.size = 0

    def check_room(self, size: int = 1) -> None:
        """Raises Overloaded when so many bytes more are too many."""
        if self.size + size > MAX_LEAVING_BYTES:
            raise Overloaded(f"{self.size >> 20} MiB of answers wait for their readers")

    def response(self, body: bytes, media_type: str) -> Response:
        """The answer, which counts until it is sent. Raises Overloaded when it does not fit."""
        self.check_room(len(body))
        return _Answer(self, body, media_type)


class _Answer(Response):
    def __init__(self, leaving: Leaving, body: bytes, media_type: str) -> None:
        super().__init__(body, media_type=media_type)
        self._leaving = leaving
        leaving.size += len(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            for message in chain([head], self._pieces()):
                with anyio.move_on_after(STALL_S) as sending:
                    await send(message)
                if sending.cancelled_caught:
                    return  # an answer without its end: the server closes the connection
        finally:
            self._leaving.size -= len(self.body)

    def _pieces(self) -> Iterator[Message]:
        for start in range(0, len(self.body), PIECE_BYTES):
            piece = self.body[start : start + PIECE_BYTES]
            yield {"type": "http.response.body", "body": piece, "more_body": True}
        yield {"type": "http.response.body", "body": b""}
