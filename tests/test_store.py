from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import duckdb
import httpx
import pytest

from collectors import otlp_http
from collectors.database import Database
from rlinsight import memory, schema
from rlinsight import store as store_module
from rlinsight.errors import StoreError
from rlinsight.store import Endpoint, endpoint_path, is_alive, query, read_endpoint
from tests.collectors.live import collector
from tests.synthetic import Run, fill


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("rest") / "s.duckdb"
    fill(store, Run())
    return store


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("live") / "s.duckdb"
    fill(store, Run())
    with collector(store):
        yield store


@pytest.fixture(params=["at_rest", "live"])
def store(request: pytest.FixtureRequest) -> Path:
    """The same filled store, as a file and behind a collector."""
    return request.getfixturevalue(request.param)


READS = {
    "SELECT 1 AS a": 1,
    "FROM runs": 1,
    "WITH x AS (FROM steps) SELECT step FROM x": 5,
    "DESCRIBE runs": 23,
    "SHOW TABLES": sum(file.kind != "macros" for file in schema.files()),
    "SUMMARIZE steps": 14,
    "EXPLAIN SELECT 1": 1,
    "EXPLAIN ANALYZE FROM runs": 1,
    "EXPLAIN (FORMAT json) SELECT 1": 1,
    "/* é */ EXPLAIN -- (\n (ANALYZE, FORMAT json) (SELECT 1)": 1,
    "EXPLAIN (SELECT 1) UNION SELECT 2": 1,
    "EXPLAIN SHOW TABLES": 1,
    "VALUES (1), (2);": 2,
    "-- a comment; with a semicolon\nSELECT 'INSERT; (checkpoint(' AS \"set threads(\"": 1,
    "PIVOT step_metrics ON name USING avg(value) GROUP BY step": 5,
    "SELECT count(*) FROM intervals_overlap_count('phases')": 1,
    "SELECT unnest(range(3)) AS checkpoint": 3,
    "SELECT\u00a01\u2003AS a": 1,
    "EXPLAIN\u3000ANALYZE\u00a0SELECT 1": 1,
}

WRITES = [
    "INSERT INTO steps (run_id) VALUES ('x')",
    "WITH x AS (SELECT 'x') INSERT INTO steps (run_id) FROM x",
    "UPDATE steps SET step = 0",
    "DELETE FROM steps",
    "MERGE INTO steps USING steps s ON true WHEN MATCHED THEN DELETE",
    "TRUNCATE steps",
    "CREATE TABLE x (a INT)",
    "CREATE TEMP TABLE x AS SELECT 1",
    "CREATE OR REPLACE VIEW runs AS SELECT 1",
    "DROP VIEW runs",
    "ALTER TABLE steps ADD COLUMN x INT",
    "COMMENT ON TABLE steps IS 'x'",
    "ATTACH 'x.duckdb'",
    "DETACH s",
    "USE memory",
    "COPY steps TO 'x.csv'",
    "COPY steps FROM 'x.csv'",
    "EXPORT DATABASE 'x'",
    "IMPORT DATABASE 'x'",
    "SET threads = 1",
    "RESET threads",
    "PRAGMA threads = 1",
    "PRAGMA database_size",
    "INSTALL json",
    "LOAD json",
    "CALL checkpoint()",
    "CHECKPOINT",
    "VACUUM",
    "BEGIN",
    "PREPARE p AS SELECT 1",
    "SELECT 1; SELECT 2",
    "SELECT 1; PIVOT steps ON step USING count(*)",
    "EXPLAIN ANALYZE INSERT INTO steps (run_id) VALUES ('x')",
    "EXPLAIN ANALYZE DELETE FROM steps",
    "EXPLAIN ANALYZE FROM checkpoint()",
    "EXPLAIN (FORMAT json) PRAGMA database_size",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM glob('/etc/*')",
    "FROM '/etc/passwd'",
    "FROM 'https://example.com/x.parquet'",
    "FROM checkpoint()",
    'FROM "force_checkpoint" /* x */ ()',
    "FROM\u00a0force_checkpoint()",
    "SELECT\u2003*\u2003FROM\u2003query('SELECT 1')",
    "FROM query\u200b('SELECT 1')",
    "FROM\ufeffquery\u2060('SELECT 1')",
    "SELECT 1, 'x'\u3000FROM\u3000query('SELECT 1')",
    "EXPLAIN\u00a0ANALYZE\u00a0FROM\u00a0checkpoint()",
    "FROM query('CHECKPOINT')",
    "FROM arrow_scan(1, 2, 3)",
    "FROM enable_logging()",
    "FROM quack_serve('quack:127.0.0.1:1', token = 'abcdef')",
    "SELECT getenv('HOME')",
    "",
    "-- nothing",
    "SELEC 1",
]


HEAVY = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range % 7 = 3"


@pytest.mark.parametrize("sql", READS)
def test_reading_statements_work(store, sql):
    """Every kind of reading statement gives its rows, in both modes."""
    assert query(sql, store=store).num_rows == READS[sql]


@pytest.mark.parametrize("sql", WRITES)
def test_everything_else_is_refused(store, sql):
    """Nothing that writes, reaches a file or the network, or changes the server gets through, in both modes."""
    with pytest.raises(StoreError) as caught:
        query(sql, store=store)
    assert "\n" not in str(caught.value)


def test_refused_statements_changed_nothing(store):
    """After all refusals the tables are as they were."""
    assert query("SELECT count(*), min(step) FROM steps", store=store).to_pylist() == [
        {"count_star()": 5, "min(step)": 1}
    ]


def test_parameters_are_values_never_sql(store):
    """Positional and named parameters of every type arrive as values, quotes and all."""
    odd = "o'clock\"; DROP TABLE steps; -- \x00 é"
    row = query("SELECT ? AS a, ? AS b, ? AS c, ? AS d", store=store, params=[odd, 2**40, None, [1, 2]]).to_pylist()[0]
    assert row == {"a": odd, "b": 2**40, "c": None, "d": [1, 2]}
    row = query("SELECT $x AS x, $y AS y", store=store, params={"x": 1.5, "y": True}).to_pylist()[0]
    assert row == {"x": 1.5, "y": True}
    with pytest.raises(StoreError):
        query("SELECT ?", store=store, params=[])


def test_types_survive_the_way(store):
    """Lists, floats to the bit, timestamps and NULL are the same in both modes; an empty result keeps its columns."""
    table = query(
        "SELECT started, token_ids, rollout_log_probs, NULL AS nothing "
        "FROM runs, token_runs ORDER BY rollout_id LIMIT 3",
        store=store,
    )
    assert str(table.schema.field("started").type) == "timestamp[us]"
    assert str(table.schema.field("rollout_log_probs").type).startswith("list<")
    sums = query("SELECT sum(step) AS small FROM steps", store=store)
    assert str(sums.schema.field("small").type) == "int64"
    assert sums["small"][0].as_py() == 15
    empty = query("SELECT step, name FROM step_metrics WHERE false", store=store)
    assert (empty.num_rows, empty.column_names) == (0, ["step", "name"])


def test_a_long_query_is_cut_off_and_the_next_one_answers(store):
    """The time limit holds on the server's side too: it is free again at once."""
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"over 0\.5 s"):
        query(HEAVY, store=store, timeout_s=0.5)
    assert query("SELECT 1 AS a", store=store).num_rows == 1
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_a_statement_ends_with_its_client(live):
    """Clients that hang up take their statements along, even as many as may run at once: the next one is answered."""
    code = f"import sys, rlinsight; rlinsight.query({HEAVY!r}, store=sys.argv[1], timeout_s=600)"
    clients = [
        subprocess.Popen([sys.executable, "-c", code, str(live)], stderr=subprocess.DEVNULL)
        for _ in range(otlp_http.MAX_QUERIES)
    ]
    endpoint = read_endpoint(live)
    assert endpoint is not None
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    while True:  # until all of them are running
        try:
            httpx.post(f"{endpoint.http}/v1/sql", json={"sql": "SELECT 1"}, headers=headers, timeout=1)
        except httpx.ReadTimeout:
            break
    for client in clients:
        client.kill()  # one that was started in the background of a shell script takes no SIGINT
    assert query("SELECT 1 AS a", store=live).num_rows == 1
    assert [client.wait(10) != 0 for client in clients] == [True] * len(clients)


def test_a_result_too_large_is_refused(store):
    """A result over the limit is an error that says what to do, not an exhausted machine."""
    with pytest.raises(StoreError, match="LIMIT"):
        query("SELECT repeat('x', 1000) AS x, range FROM range(1000000)", store=store)


def test_a_query_at_rest_has_as_much_memory_as_at_a_collector(at_rest, monkeypatch):
    """What takes more is an error that says what to do, where the process would be killed beyond the machine's."""
    monkeypatch.setattr(memory, "QUERY_BYTES", 64 * 1024**2)
    with pytest.raises(StoreError, match=r"more memory than queries get \(64 MiB\).*LIMIT"):
        query("SELECT list(range) FROM range(30000000)", store=at_rest)
    assert query("SELECT 1 AS a", store=at_rest).num_rows == 1


def test_sql_errors_read_well(store):
    """DuckDB's message with its candidates, on one line."""
    with pytest.raises(StoreError) as caught:
        query("SELECT nme FROM runs", store=store)
    assert 'Referenced column "nme" not found' in str(caught.value)
    assert '"name"' in str(caught.value)


def test_a_missing_store_names_the_next_command(tmp_path):
    """No file: the error says how to get one."""
    with pytest.raises(StoreError, match="rlinsight train"):
        query("SELECT 1", store=tmp_path / "none.duckdb")


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"\0" * 4096])
def test_a_damaged_file_is_told_and_kept(tmp_path, content):
    """Garbage and an empty file give a clear error and keep their bytes."""
    path = tmp_path / "s.duckdb"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        query("SELECT 1", store=path)
    assert path.read_bytes() == content


def test_a_damaged_block_is_told(at_rest, tmp_path):
    """A store with overwritten or missing blocks is reported, not misread."""
    whole = at_rest.read_bytes()
    for name, content in (("torn", whole[:9000]), ("overwritten", whole[:8192] + b"\xff" * 8192 + whole[16384:])):
        path = tmp_path / f"{name}.duckdb"
        path.write_bytes(content)
        with pytest.raises(StoreError, match="damaged"):
            query("SELECT * FROM steps", store=path)


def test_newer_and_foreign_files_are_refused(tmp_path):
    """A store of a newer schema version and a database of something else each say so."""
    for name, sql, message in (
        ("newer", "CREATE TABLE schema_meta AS SELECT 99 AS version", "schema version 99"),
        ("foreign", "CREATE TABLE customers (id INT)", "customers"),
        ("empty", "SELECT 1", "is empty"),
    ):
        path = tmp_path / f"{name}.duckdb"
        with duckdb.connect(str(path)) as con:
            con.execute(sql)
        with pytest.raises(StoreError, match=message):
            query("SELECT 1", store=path)


def test_views_of_another_version_in_the_file_are_not_used(at_rest, tmp_path):
    """A file left by a collector with other views answers with today's: asked directly, through another view and a
    macro. The file stays as it is; the next collector brings it up to date."""
    path = tmp_path / "s.duckdb"
    path.write_bytes(at_rest.read_bytes())
    with duckdb.connect(str(path)) as con:
        con.execute("CREATE OR REPLACE VIEW health AS SELECT 'old' AS missing")
        con.execute("CREATE OR REPLACE VIEW v_steps AS SELECT * FROM steps WHERE false")
        con.execute("CREATE OR REPLACE MACRO to_time(ns) AS make_timestamp(0)")
        con.execute("UPDATE schema_meta SET views_hash = 'other'")
    before = path.read_bytes()
    health = query("SELECT missing FROM health ORDER BY ALL", store=path)
    assert health == query("SELECT missing FROM health ORDER BY ALL", store=at_rest)
    assert query("SELECT steps_done, started FROM runs", store=path) == query(
        "SELECT steps_done, started FROM runs", store=at_rest
    )
    assert path.read_bytes() == before
    with Database(path) as database:
        assert database.con.execute("SELECT views_hash FROM schema_meta").fetchall() == [(schema.views_hash(),)]
        assert database.con.execute("SELECT count(*) FROM v_steps").fetchone() == (5,)


def test_a_stale_endpoint_file_counts_as_none(at_rest, tmp_path):
    """Left by a dead process, by one whose pid another process has now, or torn: the file is read directly."""
    store = tmp_path / "s.duckdb"
    store.write_bytes(at_rest.read_bytes())
    dead = subprocess.Popen(["true"])
    dead.wait()
    facts = {
        "http": "http://127.0.0.1:1",
        "grpc": "",
        "sql": "",
        "token": "",
        "store": str(store),
        "schema_version": 1,
    }
    stale = [
        json.dumps({**facts, "pid": dead.pid, "started_ns": time.time_ns()}),
        json.dumps({**facts, "pid": os.getpid(), "started_ns": 1}),
        '{"pid": 12',
        "[]",
    ]
    for content in stale:
        endpoint_path(store).write_text(content)
        assert read_endpoint(store) is None
        assert query("SELECT count(*) AS n FROM steps", store=store)["n"][0].as_py() == 5


def test_alive_knows_zombies_and_reused_pids():
    """This process is alive since now; a child that was killed is not, even before it is reaped."""
    assert is_alive(os.getpid(), time.time_ns())
    assert not is_alive(os.getpid(), 1)
    child = subprocess.Popen(["sleep", "30"])
    child.kill()
    time.sleep(0.1)
    assert not is_alive(child.pid, time.time_ns())
    child.wait()


def test_queries_survive_the_hand_over(tmp_path):
    """While a collector starts, serves and ends, every query answers: none meets a moment with no one to ask."""
    path = tmp_path / "s.duckdb"
    fill(path, Run())
    code = (
        "import sys; from pathlib import Path; from rlinsight.store import query\n"
        "count, path = 'SELECT count(*) AS n FROM steps', Path(sys.argv[1])\n"
        "for line in sys.stdin: print(query(count, store=path)['n'][0], flush=True)"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None

    def ask() -> None:
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "5\n"

    ask()
    with collector(path) as running:
        ask()
        running.process.terminate()
        for _ in range(10):
            ask()
        assert running.process.wait(20) == 0
    ask()
    reader.communicate()


def test_importing_the_reader_is_light():
    """``import rlinsight.store`` loads neither duckdb nor pyarrow nor psutil."""
    code = "import sys, rlinsight.store; assert not {'duckdb', 'pyarrow', 'psutil'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class _Failing(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(500)
        self.send_header("Content-Length", "21")
        self.end_headers()
        self.wfile.write(b"Internal Server Error")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_collector_that_fails_is_told_not_parsed(tmp_path):
    """An answer that is no JSON, as of a crashed handler or a proxy, becomes one clear error."""
    path = tmp_path / "s.duckdb"
    server = http.server.HTTPServer(("127.0.0.1", 0), _Failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = Endpoint(
        os.getpid(), f"http://127.0.0.1:{server.server_port}", "", "", "t", str(path), 1, time.time_ns()
    )
    endpoint_path(path).write_text(endpoint.to_json())
    with pytest.raises(StoreError, match="the collector failed"):
        query("SELECT 1", store=path)
    server.shutdown()


def test_a_failure_of_duckdb_is_met_with_one_thread(at_rest, monkeypatch):
    """A database that DuckDB's own bug has made useless is opened again, with one thread; a second failure is told."""
    threads = []

    def failing(con, sql, params, timeout_s, times):
        threads.append(con.execute("SELECT current_setting('threads')").fetchone()[0])
        if len(threads) <= times:
            raise store_module.DuckDBFailed("INTERNAL Error")
        return run(con, sql, params, timeout_s)

    run = store_module.run
    monkeypatch.setattr(store_module, "run", lambda *call: failing(*call, 1))
    assert query("SELECT count(*) AS n FROM steps", store=at_rest)["n"][0].as_py() == 5
    assert threads[1] == 1
    threads.clear()
    monkeypatch.setattr(store_module, "run", lambda *call: failing(*call, 2))
    with pytest.raises(StoreError, match="INTERNAL Error"):
        query("SELECT 1", store=at_rest)
