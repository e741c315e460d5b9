"""The process of a run's vLLM server: vLLM's own API server, with our telemetry, and its key asked for on every path.

    python -m core_trainer.rollout.vllm.serve <options of vllm serve>

Its stat logger is ours too (vLLM finds it by the entry point vllm.stat_logger_plugins). It records where this process
has set telemetry up; in anybody else's vLLM it does nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# pyright: reportMissingImports=false
from vllm.entrypoints.launchers.api_server.entry import main as serve
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from core_trainer.rollout.vllm.options import (
    API_KEY,
    IDENTITY_HEADER,
    OWNER,
    REPLICA,
    STOP_TIMEOUT_S,
    TELEMETRY,
)
from core_trainer.rollout.vllm.stats import Iterations
from rlinsight import names, store, telemetry

ENGINE = "vllm_server"
OPEN_PATHS = frozenset({"/metrics"})  # a scraper has no key
TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
MAX_ORIGINS = 65_536
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from."""

    carrier: dict[str, str]  # W3C trace context of the turn
    identity: dict[str, Any]  # attributes of its rollout


_origins: dict[str, Origin] = {}  # by request id, oldest first: of those that did not finish yet, or never will


class RequireKey:
    """ASGI middleware: 401 without the key. vLLM asks for it under /v1 alone, and weights are changed elsewhere.

    It also keeps where requests come from, which vLLM's statistics do not tell.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[API_KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on what may pass."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", [])}
        known = secrets.compare_digest(headers.get("authorization", "").encode("latin-1"), self.expected)
        if scope["type"] == "lifespan" or known or scope.get("path") in OPEN_PATHS:
            if "x-request-id" in headers and known and telemetry.is_enabled():
                _remember(headers)
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            told = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": told})
            await send({"type": "http.response.body", "body": b"this server answers its own run only"})
        else:
            await send({"type": "websocket.close"})


def _remember(headers: dict[str, str]) -> None:
    carrier = {name: value for name, value in headers.items() if name in TRACE_HEADERS}
    _origins[headers["x-request-id"]] = Origin(carrier, json.loads(headers.get(IDENTITY_HEADER, "{}")))
    if len(_origins) > MAX_ORIGINS:
        del _origins[next(iter(_origins))]


class StatLogger(AggregateStatLoggerBase):
    """vLLM's statistics as our engine samples and requests."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        ours = telemetry.is_enabled() and REPLICA in os.environ
        self._iterations = Iterations(ENGINE, os.environ[REPLICA]) if ours else None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM calls it after each iteration."""
        if self._iterations is None:
            return
        self._iterations.record(scheduler_stats, iteration_stats)
        if iteration_stats is not None:
            for finished in iteration_stats.finished_requests:
                _record_request(finished, int(iteration_stats.iteration_timestamp * 1e9), self._iterations.replica)

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """vLLM calls it with 1 when the engine went to sleep and 0 when it woke, whatever it calls the argument."""
        if self._iterations is not None:
            self._iterations.record_sleep_state(is_awake, level)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _record_request(finished: Any, end_ns: int, replica: str) -> None:
    """The span of vLLM's FinishedRequestStats, a child of the turn's. A request whose client went away has none: that
    one tells.
    """
    request_id = finished.request_id.removeprefix("cmpl-").removesuffix("-0")  # what vLLM puts around the client's
    origin = _origins.pop(request_id, Origin({}, {}))
    attributes = {
        **origin.identity,
        names.REQUEST_ID: request_id,
        names.ENGINE: ENGINE,
        names.REPLICA: replica,
        names.INPUT_TOKENS: finished.num_prompt_tokens,
        names.OUTPUT_TOKENS: finished.num_generation_tokens,
        names.CACHED_TOKENS: finished.num_cached_tokens,
        names.MAX_TOKENS: finished.max_tokens_param,
        names.FINISH_REASONS: [str(finished.finish_reason)],
        names.ABORTED: str(finished.finish_reason) == "abort",
        names.QUEUE_S: finished.queued_time,
        names.PREFILL_S: finished.prefill_time,
        names.DECODE_S: finished.decode_time,
        names.TTFT_S: finished.queued_time + finished.prefill_time,
        names.E2E_S: finished.e2e_latency,
        names.PREEMPTIONS: finished.num_preemptions,
    }
    start_ns = end_ns - int(finished.e2e_latency * 1e9)
    telemetry.record_span(names.ENGINE_REQUEST, start_ns, end_ns, attributes, carrier=origin.carrier)


def _end_with(owner: int) -> None:
    """End this process and its children once the owner is gone, killed ones included. vLLM may be starting, and miss
    the first signal.
    """
    while os.getppid() == owner:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until a signal. Telemetry comes first: vLLM's own spans then go where ours do, with the run's identity."""
    if OWNER in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[OWNER]),), name="owner", daemon=True).start()
    settings = json.loads(os.environ.pop(TELEMETRY, "null"))  # vLLM's own children have no use for it
    if settings is not None:
        path = settings.pop("store")
        settings["spool_dir"] = Path(settings["spool_dir"])
        telemetry.setup("vllm", **settings, locate=partial(store.locate, Path(path)) if path else None)
    serve()


if __name__ == "__main__":
    main()
