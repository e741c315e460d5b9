"""The collector process: opens the store, starts every part, waits for its end, stops them in reverse.

Owns the endpoint file, signals, ports and the decision to leave. The parts know nothing of each other.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn

from collectors import otlp_grpc, otlp_http, systemd, tokens
from collectors.checkpoints import Checkpoints
from collectors.database import Database
from collectors.decode import Decoder
from collectors.intake import Intake
from collectors.monitor import Monitor
from collectors.owners import Owners
from collectors.pruning import Retention
from collectors.retention import Keep
from collectors.scrape import Scraper
from collectors.writer import Writer
from rlinsight import schema
from rlinsight.errors import CollectorError, StoreError
from rlinsight.priority import yield_processors
from rlinsight.store import Endpoint, endpoint_path, is_loopback, read_endpoint
from rlinsight.wire import DELIVER_S

logger = logging.getLogger(__name__)

POLL_S = 0.5
GRACE_S = DELIVER_S + 0.5  # quiet time after the last owner: a producer that lives is heard of within
MAX_GRACE_S = 30.0  # a sender that never falls silent does not keep the collector


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a collector listens. Ports of 0 are picked by the system."""

    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    sql_port: int = 0  # always on loopback
    token_file: Path | None = None  # None makes a token that ends with the process


def run(
    store: Path, owner_pids: Sequence[int], listen: Listen, keep: Keep | None = None, background: bool = False
) -> None:
    """Serve a store until signalled, or until the owners given here or later are gone; it keeps what ``keep`` says.

    In the ``background`` it leaves the processors to training once it serves: until then training may wait for it.

    Raises CollectorError or StoreError when it cannot start, and CollectorError when the store failed for good.
    """
    # Millions of short-lived rows keep the cycle collector busy: a quarter of ingest's CPU time at its defaults.
    gc.freeze()
    gc.set_threshold(500_000, 20, 100)
    os.umask(0o077)  # the store holds what the token protects: prompts, responses, configs
    started_ns = time.time_ns()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _refuse_second(store)
    _refuse_unwritable(store)
    loopback = is_loopback(listen.host)
    token = tokens.from_file(listen.token_file) if listen.token_file else tokens.fresh()
    with ExitStack() as stack:
        database = stack.enter_context(Database(store))
        database.memory.narrow()
        writer = Writer(database.con, database.columns, database.memory)
        intake, owners = Intake(Decoder(database.columns), writer), Owners()
        for pid in owner_pids:
            owners.add(pid)
        writer.start()
        stack.callback(writer.close)
        sql = database.serve_sql(listen.sql_port, token)
        monitor = Monitor(store, writer, owners, started_ns)
        server, grpc_port = otlp_grpc.serve(intake, monitor, listen.host, listen.grpc_port, None if loopback else token)
        stack.callback(lambda: server.stop(grace=5).wait())
        scraper = stack.enter_context(closing(Scraper(intake)))
        retention = stack.enter_context(closing(Retention(database, writer, lambda: _is_needed(owners), keep)))
        app = otlp_http.app(
            intake, owners, monitor, scraper, retention, database.queries, token, open_to_loopback=loopback
        )
        http_port = stack.enter_context(_serve_http(app, listen.host, listen.http_port))
        stack.callback(owners.leave)
        stack.callback(database.queries.close)
        host = _reachable(listen.host)
        endpoint = Endpoint(
            pid=os.getpid(),
            http=f"http://{_address(host, http_port)}",
            grpc=_address(host, grpc_port),
            sql=sql,
            token=token,
            store=str(store.absolute()),
            schema_version=schema.VERSION,
            started_ns=started_ns,
        )
        stack.enter_context(_published(store, endpoint))
        logger.info("collecting into %s: OTLP/HTTP %s, OTLP/gRPC %s", store, endpoint.http, endpoint.grpc)
        if background:
            yield_processors(whole_process=True)
        systemd.notify("READY=1", f"STATUS=OTLP/HTTP {endpoint.http}, OTLP/gRPC {endpoint.grpc}")
        _wait(stop, writer, owners, intake, Checkpoints(store, writer))
        systemd.notify("STOPPING=1")
    if writer.failure:
        raise CollectorError(f"{store} cannot be written any more: {writer.failure}")


def _wait(stop: threading.Event, writer: Writer, owners: Owners, intake: Intake, checkpoints: Checkpoints) -> None:
    """Return when there is a reason to leave."""
    while not stop.wait(POLL_S):
        if writer.failure:
            return
        checkpoints.look()
        abandoned_s = owners.abandoned_s()
        if abandoned_s is None:
            continue
        quiet_s = (time.monotonic_ns() - intake.last_ns) / 1e9
        if min(abandoned_s, quiet_s) >= GRACE_S or abandoned_s >= MAX_GRACE_S:
            logger.info("the last owner is gone")
            return


def _is_needed(owners: Owners) -> bool:
    """Whether another process needs the collector. One started by hand owns itself."""
    return any(pid != os.getpid() for pid in owners.pids())


def _refuse_second(store: Path) -> None:
    endpoint = read_endpoint(store)
    if endpoint is not None:
        raise CollectorError(
            f"a collector (process {endpoint.pid}) already serves {store} at {endpoint.http}; use it, or stop it first"
        )


def _refuse_unwritable(store: Path) -> None:
    """Before the store is opened: where its endpoint file could not be written nobody would find the collector."""
    if not store.parent.is_dir():
        return
    draft = store.with_name(f".{store.name}.{os.getpid()}")
    try:
        draft.write_bytes(bytes(4096))
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error)).lower()
        has_no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space there" if has_no_room else "make it writable"
        raise StoreError(f"{store.parent} cannot be written: {reason}; {remedy} or choose another --store") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


@contextmanager
def _published(store: Path, endpoint: Endpoint) -> Iterator[None]:
    """The endpoint file for the length of the block: complete or absent, readable by its user alone."""
    path = endpoint_path(store)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(endpoint.to_json())
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn's looks ten times a second whether to leave, which is half of what an idle collector takes: tell it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """``leave`` works from here on."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """A tick a second sets the Date of the answers."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), 1.0)

    def leave(self) -> None:
        """Answer what is in flight and end; from any thread, once ``started``."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._leaving.set)


@contextmanager
def _serve_http(app: Any, host: str, port: int) -> Iterator[int]:
    """Serve the app in a thread; gives the port. On exit requests in flight are answered."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise CollectorError(
            f"HTTP address {_address(host, port)}: {error}; choose another --http-port or --listen"
        ) from None
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75, timeout_graceful_shutdown=10
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="http", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise CollectorError("the HTTP server did not start")
        time.sleep(0.005)
    try:
        yield sock.getsockname()[1]
    finally:
        server.leave()
        thread.join()


def _reachable(host: str) -> str:
    """What clients connect to. "All addresses" is none: then it is the one this machine's default route leaves from."""
    try:
        everywhere = host == "" or ip_address(host).is_unspecified
    except ValueError:  # a name
        return host
    if not everywhere:
        return host
    version6 = ":" in host
    # Connecting a datagram socket sends nothing; the addresses are set aside for documentation.
    with suppress(OSError), socket.socket(socket.AF_INET6 if version6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("2001:db8::1" if version6 else "192.0.2.1", 9))
        return probe.getsockname()[0]
    return "::1" if version6 else "127.0.0.1"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
