"""Promise 9. Bearer token wherever it does not bind to loopback; tokens compared in constant time; endpoint file mode
0600.

What needs the token on loopback: tests/collectors/test_process.py. Senders that carry it: tests/test_spool.py.
"""

from __future__ import annotations

import ast
import inspect
import os
import stat
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest

from collectors import otlp_grpc, otlp_http, tokens
from rlinsight.errors import CollectorError
from rlinsight.store import endpoint_path, read_endpoint
from tests.collectors.live import collector, command
from tests.promises.support import log_request

PROTOBUF = {"content-type": "application/x-protobuf"}
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"


@pytest.mark.slow
def test_beyond_loopback_nothing_is_said_without_the_token(tmp_path: Path) -> None:
    """Every endpoint but the two probes asks for it, /healthz tells no more than its state, and gRPC is as strict."""
    file = tmp_path / "token"
    with collector(tmp_path / "s.duckdb", "--listen", "0.0.0.0", "--token-file", str(file)) as running:
        body, wrong = log_request([1]), {"Authorization": f"Bearer {'x' * 43}"}
        for method, path in (
            *(
                ("POST", f"/v1/{name}")
                for name in ("traces", "logs", "metrics", "spool", "sql", "owners", "targets", "prune")
            ),
            *(("DELETE", "/v1/owners"), ("DELETE", "/v1/targets"), ("GET", "/v1/targets"), ("GET", "/metrics")),
        ):
            for headers in ({}, wrong, {"Authorization": f"Basic {running.endpoint.token}"}):
                reply = running.http.request(method, path, content=body, headers={**PROTOBUF, **headers})
                assert reply.status_code == 401, (method, path, headers)
        assert running.http.get("/healthz").json() == {"status": "ok"}
        assert running.http.get("/healthz", headers=running.auth).json()["pid"] == running.process.pid
        assert running.http.get("/readyz").status_code == 200
        assert running.http.post("/v1/logs", content=body, headers={**PROTOBUF, **running.auth}).status_code == 200
        assert "process_cpu" in running.http.get("/metrics", headers=running.auth).text
        with grpc.insecure_channel(running.endpoint.grpc) as channel:
            export = channel.unary_unary(LOGS)
            for metadata in ([], [("authorization", wrong["Authorization"])]):
                with pytest.raises(grpc.RpcError) as caught:
                    export(body, metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
            export(body, metadata=[("authorization", f"Bearer {running.endpoint.token}")])
        assert running.endpoint.token == file.read_text().strip()


@pytest.mark.slow
def test_the_published_address_is_one_that_clients_can_use(tmp_path: Path) -> None:
    """A collector on all addresses publishes none of them as "all", and answers where it says."""
    with collector(tmp_path / "s.duckdb", "--listen", "0.0.0.0") as running:
        for address in (running.endpoint.http.removeprefix("http://"), running.endpoint.grpc):
            assert address.rpartition(":")[0] not in ("", "0.0.0.0")
        assert httpx.get(f"{running.endpoint.http}/readyz").status_code == 200


@pytest.mark.slow
def test_a_token_file_keeps_the_token_across_restarts(tmp_path: Path) -> None:
    """Made for its user alone when it is missing, read ever after; without one each start has a fresh token."""
    file, store = tmp_path / "deep" / "token", tmp_path / "s.duckdb"
    seen = []
    for arguments in (["--token-file", str(file)], ["--token-file", str(file)], []):
        with collector(store, *arguments) as running:
            seen.append(running.endpoint.token)
            assert stat.S_IMODE(endpoint_path(store).stat().st_mode) == 0o600
            assert running.stop() == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert seen[0] == seen[1] == file.read_text().strip()
    assert seen[2] != seen[0]
    assert read_endpoint(store) is None
    file.chmod(0o644)
    done = subprocess.run(command(store, "--token-file", str(file)), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"chmod 600 {file}" in done.stderr
    assert not store.with_name("s.duckdb.wal").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """Any bit of group or others is too much; the message names the file, its mode and the command."""
    file = tmp_path / "token"
    file.write_text("a" * 40)
    file.chmod(mode)
    with pytest.raises(CollectorError, match=f"mode {mode:04o}.*chmod 600"):
        tokens.from_file(file)


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words that are long enough", "quote'quote'quote'quote", "é" * 20]
)
def test_a_file_without_a_usable_token_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    """Empty, too short to be safe, or of characters that a header cannot carry."""
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(CollectorError, match="--token-file"):
        tokens.from_file(file)
    assert file.read_text() == content


def test_a_fresh_token_is_written_whole_and_once(tmp_path: Path) -> None:
    """Of those who ask at once all get the same one; nothing else is left in the folder."""
    file = tmp_path / "token"
    pipes = []
    for _ in range(8):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(write, tokens.from_file(file).encode())
            os._exit(0)
        pipes.append((pid, read, write))
    seen = set()
    for pid, read, write in pipes:
        os.waitpid(pid, 0)
        os.close(write)
        seen.add(os.read(read, 100).decode())
        os.close(read)
    assert seen == {file.read_text().strip()}
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A path below a file is one clear error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectorError, match="--token-file"):
        tokens.from_file(tmp_path / "file" / "token")


@pytest.mark.parametrize("module", [otlp_http, otlp_grpc])
def test_tokens_are_compared_in_constant_time(module) -> None:
    """Wherever a receiver looks at the token it does so through hmac.compare_digest, never by == or in."""
    tree = ast.parse(inspect.getsource(module))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hmac.compare_digest"
    ]
    assert len(calls) == 1
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and not all(isinstance(part, (ast.Is, ast.IsNot)) for part in node.ops):
            assert "token" not in ast.unparse(node), ast.unparse(node)
