"""The collector over HTTP: OTLP in, and whole stretches of our producers' spools; read-only SQL out, owners, health,
metrics. A Starlette app; process.py serves it.

Status codes: 400 malformed, 401 no token, 408 a body that does not arrive, 413 too large, 415 wrong type, 503 with
Retry-After when the queue is full or the store cannot be written; everything else is 200, after the commit.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import anyio
import duckdb
import pyarrow as pa
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from collectors import answers, pruning, scrape_routes
from collectors.intake import Accepted, Intake
from collectors.monitor import CONTENT_TYPE, Monitor
from collectors.owners import Owners
from collectors.payload import JSON, MAX_BODY_BYTES, PROTOBUF, PayloadError, decompress
from collectors.queries import Queries
from collectors.scrape import Scraper
from collectors.writer import BatchRefused, Overloaded, StoreFailed
from rlinsight import store
from rlinsight.errors import StoreError
from rlinsight.wire import (
    PRODUCER_HEADER,
    SEQ_HEADER,
    SIGNALS,
    SPOOL_PATH,
    SPOOL_TYPE,
    Outcome,
    Signal,
    outcomes,
)

Taken = TypeVar("Taken")

ARROW = "application/vnd.apache.arrow.stream"
RETRY_AFTER_S = 1
MAX_SQL_TIMEOUT_S = 600.0
MAX_QUERIES = 4  # at once; the rest wait
GONE_POLL_S = 0.1
MAX_DECODES = 4  # at once; Python decodes one at a time anyway
MAX_ARRIVING_BYTES = 256 * 1024**2  # of bodies on their way in or waiting to be decoded; beyond it senders wait
BODY_TIMEOUT_S = 30.0  # for a body to arrive: a sender that stalls gives its share of the above back


def app(
    intake: Intake,
    owners: Owners,
    monitor: Monitor,
    scraper: Scraper,
    retention: pruning.Retention,
    queries: Queries,
    token: str,
    open_to_loopback: bool,
) -> ASGIApp:
    """The app. ``open_to_loopback`` lets OTLP in without the token."""
    decoding, querying = anyio.CapacityLimiter(MAX_DECODES), anyio.CapacityLimiter(MAX_QUERIES)
    arriving, leaving = _Arriving(), answers.Leaving()

    async def take(request: Request, types: tuple[str, ...], decode: Callable[[bytes, str], Taken]) -> Taken:
        """What ``decode`` makes of the body and its content type, which has to be one of ``types``."""
        if not open_to_loopback:
            _authorize(request, token)
        intake.check_room()
        content_type = _content_type(request)
        if content_type not in types:
            raise PayloadError(415, f"content-type {content_type!r} is not supported; send {' or '.join(types)}")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        with arriving.body() as body:
            raw = await body.read(request)
            return await anyio.to_thread.run_sync(
                lambda: decode(decompress(raw, encoding), content_type), limiter=decoding
            )

    def receive(signal: Signal) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            identity = request.headers.get(PRODUCER_HEADER), request.headers.get(SEQ_HEADER)
            accepted = await take(
                request, (PROTOBUF, JSON), lambda body, content_type: intake.take(signal, body, content_type, *identity)
            )
            await asyncio.wrap_future(accepted.done)
            message = accepted.response()
            if _content_type(request) == JSON:
                return Response(json_format.MessageToJson(message), media_type=JSON)
            return Response(message.SerializeToString(), media_type=PROTOBUF)

        return endpoint

    async def spool(request: Request) -> Response:
        producer = request.headers.get(PRODUCER_HEADER)
        taken = await take(request, (SPOOL_TYPE,), lambda body, _: intake.take_spool(body, producer))
        found = [await outcome(seq, accepted) for seq, accepted in taken]
        busy = any(each.status == 503 for each in found)
        return Response(outcomes(found), media_type=JSON, headers=_RETRY if busy else None)

    async def outcome(seq: int, accepted: Accepted | Exception) -> Outcome:
        try:
            if isinstance(accepted, Exception):
                raise accepted
            await asyncio.wrap_future(accepted.done)
        except (PayloadError, BatchRefused) as error:
            return Outcome(seq, _status(error), 0, str(error))
        except (Overloaded, StoreFailed) as error:
            if isinstance(error, StoreFailed):
                monitor.write_failed()
            return Outcome(seq, 503, 0, str(error))
        except Exception as error:  # a bug, logged where it was met
            return Outcome(seq, 500, 0, f"{type(error).__name__}: {error}")
        return Outcome(seq, 200, accepted.decoded.rejected, accepted.decoded.problem or "")

    async def sql(request: Request) -> Response:
        _authorize(request, token)
        asked = await _json(request)
        text, params, timeout_s = asked.get("sql"), asked.get("params"), asked.get("timeout_s", store.TIMEOUT_S)
        if not isinstance(text, str):
            raise PayloadError(400, f"sql {text!r} is not a statement")
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise PayloadError(400, f"timeout_s {timeout_s!r} is no positive number of seconds")
        if params is not None and not isinstance(params, list | dict):
            raise PayloadError(400, f"params {params!r} are no list or object")
        limit_s = min(timeout_s, MAX_SQL_TIMEOUT_S)
        async with querying:
            leaving.check_room()
            with monitor.querying():
                con = await anyio.to_thread.run_sync(queries.open)
                watch = asyncio.create_task(_interrupt_when_gone(request, con))
                try:
                    answer = await anyio.to_thread.run_sync(lambda: _query(con, text, params, limit_s))
                except StoreError:
                    if queries.closed:  # interrupted; whoever asks again finds the next collector, or the file
                        raise Overloaded("the collector is leaving") from None
                    raise
                finally:
                    watch.cancel()
                    queries.release(con)
        return leaving.response(answer, ARROW)

    async def own(request: Request) -> Response:
        _authorize(request, token)
        pid = (await _json(request)).get("pid")
        if not isinstance(pid, int) or pid <= 0:
            raise PayloadError(400, f"pid {pid!r} is not a process id")
        if request.method == "DELETE":
            owners.release(pid)
        elif not owners.add(pid):
            raise Overloaded("the collector is leaving")
        return JSONResponse({"owners": owners.pids()})

    async def healthz(request: Request) -> Response:
        known = open_to_loopback or _is_authorized(request, token)
        return JSONResponse(monitor.health() if known else {"status": monitor.health()["status"]})

    async def readyz(request: Request) -> Response:
        reason = monitor.unready()
        return JSONResponse({"status": "ready"}) if reason is None else _fail(request, 503, reason, _RETRY)

    async def metrics(request: Request) -> Response:
        if not open_to_loopback:
            _authorize(request, token)
        return Response(monitor.exposition(), media_type=CONTENT_TYPE)

    async def on_unavailable(request: Request, error: Exception) -> Response:
        if isinstance(error, StoreFailed):
            monitor.write_failed()
        return _fail(request, 503, str(error), _RETRY)

    routes = [
        *(Route(f"/v1/{signal}", receive(signal), methods=["POST"]) for signal in SIGNALS),
        Route(SPOOL_PATH, spool, methods=["POST"]),
        Route("/v1/sql", sql, methods=["POST"]),
        Route("/v1/owners", own, methods=["POST", "DELETE"]),
        *scrape_routes.routes(scraper, lambda request: _authorize(request, token), _json),
        pruning.route(retention, lambda request: _authorize(request, token), _json),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {
        PayloadError: _on_payload_error,
        BatchRefused: _on_payload_error,
        StoreError: _on_payload_error,
        Overloaded: on_unavailable,
        StoreFailed: on_unavailable,
        Exception: _on_bug,
    }
    return _Counted(Starlette(routes=routes, exception_handlers=handlers), monitor, {route.path for route in routes})


class _Counted:
    """ASGI middleware: counts every answer."""

    def __init__(self, inner: ASGIApp, monitor: Monitor, paths: set[str]) -> None:
        self._inner, self._monitor, self._paths = inner, monitor, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"]
                endpoint = path.rpartition("/")[2] if path in self._paths else "other"
                self._monitor.answered("http", endpoint, str(message["status"]))
            await send(message)

        await self._inner(scope, receive, counted)


class _Arriving:
    """The bytes of all bodies on their way in. Lives in the event loop, so it needs no lock."""

    def __init__(self) -> None:
        self.size = 0

    @contextmanager
    def body(self) -> Iterator[_Body]:
        """Room for one body until the end of the block."""
        body = _Body(self)
        try:
            yield body
        finally:
            self.size -= body.size


class _Body:
    def __init__(self, arriving: _Arriving) -> None:
        self._arriving = arriving
        self.size = 0

    async def read(self, request: Request) -> bytes:
        """The raw body. Raises PayloadError 408 or 413, and Overloaded when too much is arriving at once."""
        length = request.headers.get("content-length", "0")
        too_large = PayloadError(413, f"body is over {MAX_BODY_BYTES} bytes; send smaller batches")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise too_large
        chunks = []
        with anyio.move_on_after(BODY_TIMEOUT_S) as waiting:
            async for chunk in request.stream():
                self.size += len(chunk)
                self._arriving.size += len(chunk)
                if self.size > MAX_BODY_BYTES:
                    raise too_large
                if self._arriving.size > MAX_ARRIVING_BYTES:
                    raise Overloaded(f"{self._arriving.size >> 20} MiB of other requests are being received")
                chunks.append(chunk)
        if waiting.cancelled_caught:
            raise PayloadError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
        return b"".join(chunks)


async def _interrupt_when_gone(request: Request, con: duckdb.DuckDBPyConnection) -> None:
    """End the statement of a client that hung up. Repeated: an interrupt between two statements has no effect."""
    while True:
        await asyncio.sleep(GONE_POLL_S)
        if await request.is_disconnected():
            with suppress(duckdb.Error):  # it ended by itself
                con.interrupt()


def _query(con: duckdb.DuckDBPyConnection, sql: str, params: Any, timeout_s: float) -> bytes:
    table = store.run(con, sql, params, timeout_s)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_authorized(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "").encode()
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def _authorize(request: Request, token: str) -> None:
    if not _is_authorized(request, token):
        raise PayloadError(401, "send the token of the endpoint file: Authorization: Bearer <token>")


async def _json(request: Request) -> dict[str, Any]:
    """A JSON object. The type is required: a web page of another origin cannot send it without asking first."""
    if _content_type(request) != JSON:
        raise PayloadError(415, f"send {JSON}")
    with _Arriving().body() as body:
        raw = await body.read(request)
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise PayloadError(400, "send a JSON object")
    return tree


def _fail(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as google.rpc.Status in the request's content type, as OTLP asks; in JSON for all but protobuf."""
    if _content_type(request) == PROTOBUF:
        return Response(Status(message=message).SerializeToString(), status, headers, PROTOBUF)
    return JSONResponse({"code": status, "message": message}, status, headers)


async def _on_payload_error(request: Request, error: Exception) -> Response:
    return _fail(request, _status(error), str(error))


async def _on_bug(request: Request, error: Exception) -> Response:
    return _fail(request, 500, f"the collector failed ({type(error).__name__}); its log tells why")


def _status(error: Exception) -> int:
    return error.status if isinstance(error, PayloadError) else 400


_RETRY = {"Retry-After": str(RETRY_AFTER_S)}
