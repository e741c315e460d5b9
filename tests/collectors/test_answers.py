"""Answers that are not read: they are bounded in bytes and in time, and short ones are given meanwhile."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import Message

from collectors import answers, otlp_http
from collectors.answers import Leaving
from collectors.database import Database
from collectors.decode import Decoder
from collectors.intake import Intake
from collectors.monitor import Monitor
from collectors.owners import Owners
from collectors.process import _serve_http
from collectors.writer import Overloaded, Writer

TOKEN = {"Authorization": "Bearer t"}
LARGE = {"sql": "SELECT repeat('x', 1000000) FROM range(8)"}


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A collector's HTTP side, which keeps 20 MB of answers."""
    monkeypatch.setattr(answers, "MAX_LEAVING_BYTES", 20_000_000)
    nothing: Any = None
    with Database(tmp_path / "s.duckdb") as database:
        writer, owners = Writer(database.con, database.columns), Owners()
        monitor = Monitor(tmp_path / "s.duckdb", writer, owners, 0)
        intake = Intake(Decoder(database.columns), writer)
        app = otlp_http.app(intake, owners, monitor, nothing, nothing, database.queries, "t", open_to_loopback=True)
        with _serve_http(app, "127.0.0.1", 0) as port:
            yield port


def _ask_and_not_read(port: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    assert connection.sock is not None
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.request("POST", "/v1/sql", json.dumps(LARGE), {"Content-Type": "application/json", **TOKEN})
    return connection, connection.getresponse()


def _wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_answers_that_nobody_reads_are_bounded(port: int) -> None:
    """What goes beyond is refused with 503 and a time to come back, short answers are given, and one that is read after
    all arrives whole and makes room again."""
    url = f"http://127.0.0.1:{port}/v1/sql"
    unread = [_ask_and_not_read(port) for _ in range(4)]
    assert [response.status for _, response in unread] == [200, 200, 503, 503]
    assert {response.getheader("Retry-After") for _, response in unread[2:]} == {"1"}
    assert httpx.post(url, json={"sql": "SELECT 1"}, headers=TOKEN).status_code == 200
    assert len(unread[0][1].read()) > 8_000_000
    _wait_for(lambda: httpx.post(url, json=LARGE, headers=TOKEN).status_code == 200)
    for connection, _ in unread:
        connection.close()


@pytest.mark.parametrize("ending", ["leaves", "stalls"])
def test_a_reader_that_goes_or_stalls_gives_its_share_back(
    port: int, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hung up, or nothing taken for too long: then the connection ends before the answer does."""
    monkeypatch.setattr(answers, "STALL_S", 1.0 if ending == "stalls" else 600.0)
    unread = [_ask_and_not_read(port) for _ in range(2)]
    if ending == "leaves":
        for connection, response in unread:
            response.close()
            connection.close()
    url = f"http://127.0.0.1:{port}/v1/sql"
    _wait_for(lambda: httpx.post(url, json=LARGE, headers=TOKEN).status_code == 200)
    if ending == "stalls":
        with pytest.raises(http.client.IncompleteRead):
            unread[0][1].read()


def test_the_share_is_that_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment there is an answer until its last piece is taken."""
    monkeypatch.setattr(answers, "MAX_LEAVING_BYTES", 10)
    monkeypatch.setattr(answers, "PIECE_BYTES", 4)
    leaving, sent = Leaving(), list[bytes]()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        assert leaving.size == 10

    answer: Any = leaving.response(b"0123456789", "text/plain")
    with pytest.raises(Overloaded, match="wait for their readers"):
        leaving.check_room()
    anyio.run(answer, {}, None, send)
    assert sent == [b"", b"0123", b"4567", b"89", b""]
    assert leaving.size == 0
