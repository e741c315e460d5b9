"""The collector's HTTP side: OTLP in, read-only SQL out, owners and health. A Starlette app; process.py serves it.

Status codes: 400 malformed, 401 no token, 413 too large, 415 wrong type, 503 with Retry-After when the queue is full or
the store cannot be written; everything else is 200, after the commit.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import duckdb
import pyarrow as pa
from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from collectors.intake import PRODUCER_HEADER, SEQ_HEADER, Intake
from collectors.owners import Owners
from collectors.payload import JSON, MAX_BODY_BYTES, PROTOBUF, SIGNALS, PayloadError, Signal, decompress
from collectors.writer import BatchRefused, Overloaded, StoreFailed
from rlinsight import store
from rlinsight.errors import StoreError

ARROW = "application/vnd.apache.arrow.stream"
RETRY_AFTER_S = 1
MAX_SQL_TIMEOUT_S = 600.0
MAX_QUERIES = 4  # at once; the rest wait
MAX_DECODES = 4  # at once; Python decodes one at a time anyway


def app(
    intake: Intake,
    owners: Owners,
    health: Callable[[], dict[str, Any]],
    cursor: Callable[[], duckdb.DuckDBPyConnection],
    token: str,
    open_to_loopback: bool,
) -> Starlette:
    """The app. ``cursor`` opens a connection for one query; ``open_to_loopback`` lets OTLP in without the token."""
    decoding, querying = anyio.CapacityLimiter(MAX_DECODES), anyio.CapacityLimiter(MAX_QUERIES)

    def receive(signal: Signal) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not open_to_loopback:
                _authorize(request, token)
            intake.check_room()
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type not in (PROTOBUF, JSON):
                raise PayloadError(415, f"content-type {content_type!r} is not supported; send {PROTOBUF} or {JSON}")
            raw, encoding = await _body(request), request.headers.get("content-encoding", "").strip().lower()
            identity = request.headers.get(PRODUCER_HEADER), request.headers.get(SEQ_HEADER)
            accepted = await anyio.to_thread.run_sync(
                lambda: intake.take(signal, decompress(raw, encoding), content_type, *identity), limiter=decoding
            )
            await asyncio.wrap_future(accepted.done)
            message = accepted.response()
            if content_type == JSON:
                return Response(json_format.MessageToJson(message), media_type=JSON)
            return Response(message.SerializeToString(), media_type=PROTOBUF)

        return endpoint

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
        answer = await anyio.to_thread.run_sync(lambda: _query(cursor, text, params, limit_s), limiter=querying)
        return Response(answer, media_type=ARROW)

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
        return JSONResponse(health())

    routes = [
        *(Route(f"/v1/{signal}", receive(signal), methods=["POST"]) for signal in SIGNALS),
        Route("/v1/sql", sql, methods=["POST"]),
        Route("/v1/owners", own, methods=["POST", "DELETE"]),
        Route("/healthz", healthz, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=_HANDLERS)


def _query(cursor: Callable[[], duckdb.DuckDBPyConnection], sql: str, params: Any, timeout_s: float) -> bytes:
    con = cursor()
    try:
        table = store.run(con, sql, params, timeout_s)
    finally:
        con.close()
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _authorize(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise PayloadError(401, "send the token of the endpoint file: Authorization: Bearer <token>")


async def _body(request: Request) -> bytes:
    """The raw body, never more than the limit in memory."""
    length = request.headers.get("content-length", "0")
    too_large = PayloadError(413, f"body is over {MAX_BODY_BYTES} bytes; send smaller batches")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def _json(request: Request) -> dict[str, Any]:
    """A JSON object. The type is required: a web page of another origin cannot send it without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise PayloadError(415, f"send {JSON}")
    try:
        tree = json.loads(await _body(request))
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise PayloadError(400, "send a JSON object")
    return tree


# Errors as google.rpc.Status in its JSON form, as OTLP asks.
def _fail(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"code": status, "message": message}, status, headers)


async def _on_payload_error(request: Request, error: Exception) -> Response:
    return _fail(error.status if isinstance(error, PayloadError) else 400, str(error))


async def _on_unavailable(request: Request, error: Exception) -> Response:
    return _fail(503, str(error), {"Retry-After": str(RETRY_AFTER_S)})


_HANDLERS: dict[Any, Any] = {
    PayloadError: _on_payload_error,
    BatchRefused: _on_payload_error,
    StoreError: _on_payload_error,
    Overloaded: _on_unavailable,
    StoreFailed: _on_unavailable,
}
