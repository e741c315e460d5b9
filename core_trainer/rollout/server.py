"""One HTTP server: how it is reached, asked again while it is busy, and what its failures are called.

Knows nothing of what is said to it. Every failure is an EngineError that names the server; a request the server refuses
for what it asks is a RequestRefused.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from rlinsight.errors import EngineError, RequestRefused

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0  # of a control call, unless it says otherwise: none but loading weights takes long
BUSY = (429, 503)
MAX_TRIES = 6  # of a request that finds the server busy
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0
ASKED_TOO_MUCH = (400, 413, 422)  # about the request; other codes are about the server
LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Hints:
    """What may help against a failure: other options, where the server is started in another way."""

    key: str = "set rollout.openai.api_key_env"
    unreachable: str = "is the server running?"
    silent: str = "raise rollout.openai.timeout_s if it is slow"
    model: str = "set rollout.openai.model to one of"
    missing: str = "start vLLM with VLLM_SERVER_DEV_MODE=1, or set rollout.openai.server to what runs there"


OPENAI = Hints()


class Server:
    """Blocking calls for control, asynchronous ones for requests. Not tied to an event loop."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_requests: int | None = None,
        hints: Hints = OPENAI,
    ) -> None:
        """``url`` with or without its ``/v1``. A request has failed when the server is silent for ``timeout_s``, a
        control call after CONTROL_TIMEOUT_S. Requests beyond ``max_requests`` wait until others are answered.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s, self.hints = timeout_s, hints
        options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            "trust_env": False,
            "follow_redirects": False,
        }
        # A connection belongs to its event loop, and each step samples in a loop of its own: none is kept.
        limits = httpx.Limits(max_connections=max_requests, max_keepalive_connections=0)
        self._requests = httpx.AsyncClient(**options, limits=limits)
        self._control = httpx.Client(**options, limits=limits)
        self._random = random.Random()  # of delays alone: rollouts draw theirs elsewhere

    @property
    def name(self) -> str:
        """Host, port and path, its name in telemetry."""
        url = httpx.URL(self.url)
        return f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}{url.path.rstrip('/')}"

    def call(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None, **params: Any
    ) -> dict[str, Any]:
        """A control call's JSON object; an empty one when it answers something else. Raises EngineError, after
        ``timeout_s`` of silence where a call may take longer than others.
        """
        silence = timeout_s or CONTROL_TIMEOUT_S
        timeout = httpx.Timeout(silence, connect=CONNECT_TIMEOUT_S, pool=None)
        for attempt in range(1, MAX_TRIES + 1):
            try:
                response = self._control.request(method, path, json=body, params=params, timeout=timeout)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise EngineError(f"{self.url}{path} was silent for {silence:g} s") from error
            except httpx.HTTPError as error:
                raise self._failure(error) from error
            delay = self._delay(response, attempt)
            if delay is None:
                break
            time.sleep(delay)
        self._check(response)
        try:
            told = response.json()
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    @asynccontextmanager
    async def send(self, path: str, body: Any, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """POST a request; its response, whose body is still to come. Leaving the context closes the connection.

        Raises EngineError, also for what goes wrong while the body is read.
        """
        try:
            for attempt in range(1, MAX_TRIES + 1):
                async with self._requests.stream("POST", path, json=body, headers=headers) as response:
                    delay = self._delay(response, attempt)
                    if delay is None:
                        if not response.is_success:
                            await response.aread()
                        self._check(response)
                        yield response
                        return
                await asyncio.sleep(delay)
        except httpx.HTTPError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close what blocking calls left open; requests leave nothing."""
        self._control.close()

    def _delay(self, response: httpx.Response, attempt: int) -> float | None:
        """Seconds until the request is sent again, or None when this is the answer to live with.

        Doubles, with jitter so that the requests of a batch do not come back all at once, and is no shorter than the
        server asks for in Retry-After.
        """
        if response.status_code not in BUSY or attempt == MAX_TRIES:
            return None
        asked = _retry_after(response.headers.get("retry-after"))
        if asked > LONGEST_DELAY_S:
            raise EngineError(f"{self.url} is busy ({response.status_code}) and asks to wait {asked:g} s; try later")
        backoff = min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S)
        return asked + backoff * self._random.uniform(0.5, 1.0)

    def _check(self, response: httpx.Response) -> None:
        code = response.status_code
        if response.is_success:
            return
        said = message(response.text)
        if code in (401, 403):
            raise EngineError(f"{self.url} refuses the key ({code}): {said}; {self.hints.key}")
        if code in BUSY:
            raise EngineError(f"{self.url} was busy ({code}) {MAX_TRIES} times in a row: {said}")
        path = response.request.url.path.removeprefix(httpx.URL(self.url).path.rstrip("/"))
        hint = f"; {self.hints.missing}" if code == 404 and not path.startswith("/v1/") else ""
        kind = RequestRefused if code in ASKED_TOO_MUCH else EngineError
        raise kind(f"{self.url}{path} answers {code}: {said}{hint}")

    def _failure(self, error: httpx.HTTPError) -> EngineError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EngineError(f"{self.url} cannot be reached ({message(str(error))}); {self.hints.unreachable}")
        if isinstance(error, httpx.TimeoutException):
            return EngineError(f"{self.url} was silent for {self.timeout_s:g} s; {self.hints.silent}")
        return EngineError(f"{self.url} broke the connection ({type(error).__name__}: {message(str(error))})")


async def events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Data of a stream's server-sent events, of one line each.

    httpx ends lines at U+2028 and the like too, which JSON may hold as they are.
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode()


def message(text: str) -> str:
    """What a server's error answer says, on one line."""
    try:
        told = json.loads(text)
        for key in ("error", "message", "detail"):
            told = told.get(key, told) if isinstance(told, dict) else told
        text = told if isinstance(told, str) else json.dumps(told)
    except ValueError:
        pass
    text = re.sub(r"\s+", " ", text).strip() or "no reason given"
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 3] + "..."


def _retry_after(value: str | None) -> float:
    """Seconds a Retry-After header asks for (RFC 9110, 10.2.3): a number, or a date; 0 when it says neither."""
    if value is None:
        return 0.0
    try:
        return (
            max(float(value), 0.0)
            if value.strip().isdigit()
            else max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
        )
    except (ValueError, TypeError):
        return 0.0
