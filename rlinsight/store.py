"""Reading a store: ask the collector while one lives, open the file read-only otherwise.

Owns the endpoint file's format and ``query()``, which hides which of the two answers. Which statements pass is in
statements.py. Does not write: the collector alone does. Loads duckdb, pyarrow and psutil on first use only.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlinsight import DEFAULT_STORE, schema
from rlinsight.errors import StoreError
from rlinsight.memory import memory_bytes, query_bytes
from rlinsight.statements import check, sql_error

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

Params = Sequence[Any] | Mapping[str, Any]
T = TypeVar("T")

TIMEOUT_S = 30.0
HANDOVER_S = 15.0  # a collector that starts or leaves holds the file without answering for this long at most
MAX_RESULT_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Endpoint:
    """Where a live collector listens; the content of ``<store>.endpoint``."""

    pid: int
    http: str  # base URL of OTLP/HTTP, owners and SQL
    grpc: str  # host:port of OTLP/gRPC
    sql: str  # quack:host:port, for DuckDB clients
    token: str  # bearer token of SQL and owners, and of everything when not on loopback
    store: str
    schema_version: int
    started_ns: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def endpoint_path(store: Path) -> Path:
    """The file a live collector describes itself in."""
    return store.with_name(store.name + ".endpoint")


def read_endpoint(store: Path) -> Endpoint | None:
    """The live collector of a store, or None; a file left by a dead one counts as none, even with its pid reused."""
    try:
        endpoint = Endpoint(**json.loads(endpoint_path(store).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return endpoint if is_alive(endpoint.pid, endpoint.started_ns) else None


def locate(store: Path) -> tuple[str, str] | None:
    """Base URL and token of the live collector of a store."""
    endpoint = read_endpoint(store)
    return (endpoint.http, endpoint.token) if endpoint else None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_alive(pid: int, known_at_ns: int) -> bool:
    """Whether the process seen as ``pid`` at that time still runs; a later process with the same pid is another one."""
    import psutil

    try:
        process = psutil.Process(pid)
        # Start times come from boot time plus clock ticks, so they are off by the clock's adjustments since boot.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() * 1e9 <= known_at_ns + 2e9
    except psutil.Error:
        return False


def resolve(store: Path | str | None) -> Path:
    """The store that is meant: the one given, else RLINSIGHT_STORE, else runs/rlinsight.duckdb."""
    return Path(store or os.environ.get("RLINSIGHT_STORE") or DEFAULT_STORE)


def query(
    sql: str, *, store: Path | str | None = None, params: Params | None = None, timeout_s: float = TIMEOUT_S
) -> pa.Table:
    """Run one reading statement (SELECT, EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) and return its result as an Arrow table.

    ``query(...).to_pandas()`` and ``polars.from_arrow(query(...))`` make frames of it. ``store`` defaults to
    RLINSIGHT_STORE, then runs/rlinsight.duckdb. ``params`` fill ``?`` (a sequence) or ``$name`` (a mapping). Ctrl-C
    ends the statement, in the collector too. Raises StoreError: no store yet, a damaged or newer file, a statement that
    does not only read, an SQL error, a result over 512 MiB, too much memory, or more than ``timeout_s`` seconds.
    """
    path = resolve(store)

    def attempt() -> pa.Table:
        endpoint = read_endpoint(path)
        if endpoint is not None:
            return _ask_collector(endpoint, sql, params, timeout_s)
        return _ask_file(path, sql, params, timeout_s)

    return until_handed_over(path, attempt)


class HandOver(Exception):
    """The store changes hands right now: ask again in a moment."""


def until_handed_over(store: Path, attempt: Callable[[], T]) -> T:
    """What ``attempt`` gives once it meets no HandOver. Raises StoreError when that takes over HANDOVER_S."""
    deadline = time.monotonic() + HANDOVER_S
    while True:
        try:
            return attempt()
        except HandOver as error:
            if time.monotonic() > deadline:
                raise StoreError(f"{store} cannot be read: {error}; is another program holding it?") from None
            time.sleep(0.05)


def _ask_collector(endpoint: Endpoint, sql: str, params: Params | None, timeout_s: float) -> pa.Table:
    import pyarrow as pa

    try:
        asked = {"sql": sql, "params": params, "timeout_s": timeout_s}
        status, answer = call(endpoint, "POST", "/v1/sql", asked, timeout_s + 10)
    except TypeError as error:
        raise StoreError(f"query parameters must be text, numbers, booleans, None or lists of them: {error}") from None
    except TimeoutError:
        raise StoreError(f"the collector (process {endpoint.pid}) did not answer within {timeout_s + 10:g} s") from None
    except OSError as error:
        raise HandOver(f"collector {endpoint.pid} does not answer ({error})") from None
    if status == 503:
        raise HandOver(refusal(answer) or f"collector {endpoint.pid} is leaving")
    if status != 200:
        raise StoreError(refusal(answer) or f"the collector failed (HTTP {status}); its log tells why")
    return pa.ipc.open_stream(answer).read_all()


def call(endpoint: Endpoint, method: str, path: str, asked: Mapping[str, Any], timeout_s: float) -> tuple[int, bytes]:
    """Send a collector JSON with its token, past any proxy of the environment; status and body of its answer.

    Raises OSError when it does not answer, TypeError for what JSON cannot hold.
    """
    connection = http.client.HTTPConnection(endpoint.http.removeprefix("http://"), timeout=timeout_s)
    headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, json.dumps(asked), headers)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()


def refusal(answer: bytes) -> str | None:
    """The reason in a collector's answer; None when it gave none."""
    try:
        return json.loads(answer)["message"]
    except (ValueError, KeyError, TypeError):
        return None


class DuckDBFailed(StoreError):
    """DuckDB met a bug of its own and refuses everything until it is opened again."""


def _ask_file(store: Path, sql: str, params: Params | None, timeout_s: float) -> pa.Table:
    if not store.is_file():
        raise missing(store)
    try:
        return _read_file(store, sql, params, timeout_s, {})
    except DuckDBFailed:
        # Of 1.5.5's window operator two threads race: count(*) OVER () over a UNION failed in 1 of 200 queries.
        return _read_file(store, sql, params, timeout_s, {"threads": "1"})


def open_at_rest(store: Path, settings: Mapping[str, str] | None = None) -> duckdb.DuckDBPyConnection:
    """The file of a store, to read it. Raises HandOver while another process has it, StoreError when it is none."""
    import duckdb

    config: dict[str, Any] = {
        **(settings or {}),
        "memory_limit": f"{query_bytes(memory_bytes())}B",
        "enable_external_access": "false",
        "autoload_known_extensions": "false",
        "autoinstall_known_extensions": "false",
        "lock_configuration": "true",
    }
    try:
        return duckdb.connect(str(store), read_only=True, config=config)
    except duckdb.Error as error:
        if is_locked(error):
            raise HandOver(str(error).splitlines()[0]) from None
        raise explain(store, error) from None


def _read_file(store: Path, sql: str, params: Params | None, timeout_s: float, settings: Mapping[str, str]) -> pa.Table:
    import duckdb

    con = open_at_rest(store, settings)
    try:
        version = schema.stored_version(con, store)
        if version is None:
            raise StoreError(f"{store} is empty; fill it with 'rlinsight train CONFIG'")
        try:
            schema.shadow_old_views(con)
        except duckdb.Error as error:
            raise StoreError(
                f"{store} is of an earlier state of schema version {version} ({sql_error(error)}); "
                f"'rlinsight collect --store {store}' brings it up to date"
            ) from None
        try:
            return run(con, sql, params, timeout_s)
        except StoreError as error:
            if version == schema.VERSION:
                raise
            hint = f"this store has schema version {version}; 'rlinsight collect --store {store}' brings it to"
            raise StoreError(f"{error} ({hint} {schema.VERSION})") from None
    finally:
        con.close()


def missing(store: Path) -> StoreError:
    """Nothing is there yet."""
    return StoreError(f"no store at {store}; start one with 'rlinsight train CONFIG', or name it with --store")


def require_at_rest(store: Path) -> None:
    """Raises StoreError when there is no store, or a collector serves it."""
    if not store.is_file():
        raise missing(store)
    endpoint = read_endpoint(store)
    if endpoint is not None:
        raise StoreError(f"a collector (process {endpoint.pid}) serves {store}; stop it, or wait until its runs end")


def is_locked(error: Exception) -> bool:
    """Whether DuckDB could not open a file because another process has it."""
    return "Could not set lock" in str(error)


def explain(store: Path, error: duckdb.Error) -> StoreError:
    """Why DuckDB could not open a file, for the user."""
    message = str(error).splitlines()[0]
    if "Permission denied" in message:
        return StoreError(
            f"{store} cannot be opened: permission denied; change its permissions or choose another --store"
        )
    if "No space left" in message:
        return StoreError(f"{store} cannot be written: the disk is full; free some space and start again")
    if "Read-only file system" in message:
        return StoreError(f"{store} is on a read-only file system; choose another --store")
    if re.search("not a valid DuckDB|Corrupt|checksum|not read enough|serializ", message, re.IGNORECASE):
        return StoreError(
            f"{store} is not a DuckDB file, or is damaged; nothing was changed. Move it away or choose another --store"
        )
    if "version number" in message:
        return StoreError(f"{store} was written by a newer DuckDB than this one; upgrade rlinsight ({message})")
    return StoreError(f"{store} cannot be opened: {message}")


def run(con: duckdb.DuckDBPyConnection, sql: str, params: Params | None, timeout_s: float) -> pa.Table:
    """Check a statement and run it in a read-only transaction of ``con``, interrupted after ``timeout_s`` seconds.

    Raises StoreError, also for a result over MAX_RESULT_BYTES.
    """
    import duckdb
    import pyarrow as pa

    check(sql)
    timer = threading.Timer(timeout_s, con.interrupt)
    timer.start()
    try:
        con.execute("BEGIN TRANSACTION READ ONLY")
        try:
            reader = con.execute(sql, params).to_arrow_reader()
            batches, size = [], 0
            for batch in reader:
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_RESULT_BYTES:
                    raise StoreError(f"the result is over {MAX_RESULT_BYTES >> 20} MiB; aggregate it or add LIMIT")
            return _small_integers(pa.Table.from_batches(batches, reader.schema))
        finally:
            con.execute("ROLLBACK")
    except duckdb.InterruptException:
        raise StoreError(
            f"the query took over {timeout_s:g} s and was stopped; narrow it with WHERE or LIMIT"
        ) from None
    except duckdb.OutOfMemoryException:
        raise StoreError(
            f"the query takes more memory than queries get ({query_bytes(memory_bytes()) >> 20} MiB); aggregate, or "
            "narrow it with WHERE or LIMIT"
        ) from None
    except (duckdb.InternalException, duckdb.FatalException) as error:
        raise DuckDBFailed(str(sql_error(error))) from None
    except duckdb.Error as error:
        raise sql_error(error) from None
    finally:
        timer.cancel()


def _small_integers(table: pa.Table) -> pa.Table:
    """sum() of integers is HUGEINT, which Arrow knows as decimal only; as int64 when the values fit."""
    import pyarrow as pa

    for i, field in enumerate(table.schema):
        if field.type == pa.decimal128(38, 0):
            with suppress(pa.ArrowInvalid):
                table = table.set_column(i, field.name, table.column(i).cast(pa.int64()))
    return table
