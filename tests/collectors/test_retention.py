"""Old runs go, whole; what may be alive stays; what went does not come back."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from collectors import retention
from collectors.database import Database
from collectors.decode import Decoder
from collectors.pruning import Retention, prune
from collectors.rebuild import rebuild
from collectors.retention import Keep, Pruned, plan
from collectors.writer import Overloaded, Writer
from rlinsight import launch, names, query, schema
from rlinsight.config import TelemetrySection
from rlinsight.errors import StoreError
from tests.collectors.live import Collector, collector
from tests.synthetic import Request, Run, batch, deliver, fill, requests

DAY = 86_400 * 10**9
SMALL: dict[str, Any] = {"steps": 1, "groups": 1, "group_size": 2}


def _run(run_id: str, days: float, **changes: Any) -> Run:
    """A run that ended so many days ago."""
    return Run(run_id, start_ns=time.time_ns() - int(days * DAY) - 60 * 10**9, **SMALL | changes)


def _fill(store: Path, **days: float) -> None:
    """Runs that were recorded, and came in, so many days ago."""
    fill(store, *(_run(run, ago, status=None if run.startswith("lost") else "finished") for run, ago in days.items()))
    for run_id, ago in days.items():
        _came_in(store, ago, f"run_id = '{run_id}'")


def _came_in(store: Path, days: float, where: str) -> None:
    with duckdb.connect(str(store)) as con:
        for table in retention.RAW:
            con.execute(f"UPDATE {table} SET ingest_ns = ? WHERE {where}", [time.time_ns() - int(days * DAY)])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "s.duckdb"
    _fill(path, old=40, lost=35, middle=20, recent=2)
    return path


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(filled, tmp_path / "s.duckdb"))


def _plan(store: Path, keep: Keep, owned: bool = False) -> dict[str | None, str]:
    with duckdb.connect(str(store), read_only=True) as con:
        return {run.run_id: run.reason for run in plan(con, keep, owned)}


def _rows(store: Path) -> dict[str, set[str | None]]:
    """Which runs each table has rows of."""
    with duckdb.connect(str(store), read_only=True) as con:
        tables = [table for table, columns in schema.columns(con).items() if "run_id" in columns]
        return {t: {row[0] for row in con.execute(f"SELECT DISTINCT run_id FROM {t}").fetchall()} for t in tables}


def test_runs_not_heard_of_go_from_every_table(store):
    """Older than 30 days: gone everywhere, noted with their rows and producers; the others are untouched."""
    before = _rows(store)
    with duckdb.connect(str(store), read_only=True) as con:
        counts = dict(con.execute("SELECT run_id, count(*) FROM otel_spans GROUP BY 1").fetchall())
        others = con.execute("FROM otel_logs WHERE run_id IN ('middle', 'recent') ORDER BY ALL").fetchall()
        ledger = con.execute("FROM ingest_batches ORDER BY ALL").fetchall()
    removed = prune(store, Keep(days=30), dry_run=False)
    assert [(run.run_id, run.reason) for run in removed] == [("old", "age"), ("lost", "age")]
    after = _rows(store)
    assert after.pop("retention_log") == {"old", "lost"}
    before.pop("retention_log")
    assert after == {table: runs - {"old", "lost"} for table, runs in before.items()}
    assert {"old", "lost", "middle", "recent"} <= before["otel_spans"] & before["token_runs"] & before["steps"]
    with duckdb.connect(str(store), read_only=True) as con:
        assert con.execute("FROM otel_logs WHERE run_id IN ('middle', 'recent') ORDER BY ALL").fetchall() == others
        assert con.execute("FROM ingest_batches ORDER BY ALL").fetchall() == ledger
        rows, producers = con.execute("SELECT rows, producers FROM retention_log WHERE run_id = 'old'").fetchone()
        assert rows > counts["old"]
        assert sorted(producers) == ["controller-0-old-1", "policy-0-old-1"]
        assert con.execute("SELECT count(*) FROM health WHERE producer LIKE '%-old-1'").fetchone() == (0,)
        assert con.execute("SELECT count(*) FROM health WHERE producer LIKE '%-recent-1'").fetchone() == (2,)


def test_a_dry_run_changes_nothing(store):
    """It names what would go, oldest first, with an estimate of the bytes when they are asked for."""
    before = store.read_bytes()
    assert [run.run_id for run in prune(store, Keep(days=30), dry_run=True)] == ["old", "lost"]
    runs = prune(store, Keep(bytes=1), dry_run=True)
    assert [run.run_id for run in runs] == ["old", "lost", "middle", "recent"]
    assert all(run.bytes and run.rows is None for run in runs)
    assert _rows(store)["retention_log"] == set()
    assert len(before) == store.stat().st_size


def test_the_oldest_go_until_the_rest_fits(store):
    """By bytes: no more than needed, and the file's blocks in use really shrink."""
    with duckdb.connect(str(store)) as con:
        sizes = retention._sizes(con)
        used = con.execute(retention.USED).fetchone()[0]
    assert sum(sizes.values()) == pytest.approx(used, rel=0.01)
    limit = used - sizes["old"] - sizes["lost"] // 2
    assert _plan(store, Keep(bytes=limit)) == {"old": "bytes", "lost": "bytes"}
    assert _plan(store, Keep(bytes=used)) == {}
    assert _plan(store, Keep(days=38, bytes=limit)) == {"old": "age", "lost": "bytes"}


def test_what_may_be_alive_stays(tmp_path):
    """Heard of within the hour, running, or unfinished while some process needs the collector: never removed."""
    store = tmp_path / "s.duckdb"
    _fill(store, lost_hung=2, done=2, just_ended=0.02, came_in_late=90)
    fill(store, Run("running", status=None, **SMALL))
    _came_in(store, 0.01, "run_id = 'came_in_late'")
    everything = Keep(days=1e-6, bytes=1)
    assert set(_plan(store, everything, owned=True)) == {"done"}
    assert set(_plan(store, everything, owned=False)) == {"done", "lost_hung"}


def test_a_run_that_came_back_is_left_alone(store):
    """Something of it arrived after it was chosen: nothing is removed, nothing noted."""
    with Database(store) as database:
        chosen = [run for run in plan(database.con, Keep(days=30), owned=False) if run.run_id == "old"]
        database.con.execute("UPDATE otel_spans SET ingest_ns = ? WHERE run_id = 'old'", [time.time_ns()])
        assert retention._remove_run(database.con, chosen[0]) is None
    assert "old" in _rows(store)["steps"]
    assert _rows(store)["retention_log"] == set()


def test_a_removal_that_fails_is_undone(store, monkeypatch):
    """An error at its last statement: every row of the run is still there."""
    before = _rows(store)

    def fail(*_: object) -> Pruned:
        raise RuntimeError("disk")

    monkeypatch.setattr(retention, "_log", fail)
    with pytest.raises(RuntimeError):
        prune(store, Keep(days=30), dry_run=False)
    assert _rows(store) == before


def test_late_duplicates_bring_nothing_back(store):
    """A batch of a removed run that is sent again is recognised by the ledger."""
    run = _run("again", 50)
    sent = list(requests(run))
    for attempt in range(2):
        with Database(store) as database:
            writer = Writer(database.con, database.columns)
            writer.start()
            done = [writer.submit(batch(Decoder(database.columns), request)) for request in sent]
            writer.close()
            assert {future.result(10) for future in done} == {attempt == 0}
        _came_in(store, 50, "run_id = 'again'")
        prune(store, Keep(days=30), dry_run=False)
        assert "again" not in _rows(store)["otel_spans"] | _rows(store)["steps"]


def test_rows_of_no_run_go_by_age(store):
    """Foreign spans of no run: the old ones go, those that came in lately stay."""
    with duckdb.connect(str(store)) as con:
        for days in (40, 1):
            con.execute(
                "INSERT INTO otel_spans (trace_id, span_id, name, start_ns, end_ns, batch_id, ingest_ns) "
                "VALUES ('t', 's', 'x', 1, 2, 'b', ?)",
                [time.time_ns() - days * DAY],
            )
    removed = prune(store, Keep(days=30), dry_run=False)
    assert [(run.run_id, run.rows) for run in removed if run.run_id is None] == [(None, 1)]
    with duckdb.connect(str(store), read_only=True) as con:
        ((left,),) = con.execute("SELECT ingest_ns FROM otel_spans WHERE run_id IS NULL").fetchall()
    assert left > time.time_ns() - 2 * DAY


def test_rows_of_no_run_go_in_pieces(store, monkeypatch):
    """Two rows a transaction, over all tables, each with its line in the log; what is young stays."""
    monkeypatch.setattr(retention, "PIECE_ROWS", 2)
    old, now = time.time_ns() - 40 * DAY, time.time_ns()
    with duckdb.connect(str(store)) as con:
        for ns in (old, old, old, now):
            values = ["t", "s", "x", 1, 2, "b", ns]
            con.execute(
                "INSERT INTO otel_spans (trace_id, span_id, name, start_ns, end_ns, batch_id, ingest_ns) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)", values,
            )  # fmt: skip
            con.execute("INSERT INTO otel_logs (item, batch_id, ingest_ns) VALUES (0, 'b', ?)", [ns])
    removed = prune(store, Keep(days=30), dry_run=False)
    assert [run.rows for run in removed if run.run_id is None] == [2, 2, 2]
    with duckdb.connect(str(store), read_only=True) as con:
        left = "SELECT ingest_ns FROM otel_spans WHERE run_id IS NULL UNION ALL SELECT ingest_ns FROM otel_logs "
        assert con.execute(left + "WHERE run_id IS NULL").fetchall() == [(now,), (now,)]
        assert con.execute("SELECT rows FROM retention_log WHERE run_id IS NULL").fetchall() == [(2,), (2,), (2,)]


def test_checks_of_models_survive_a_prune_and_a_rebuild(store):
    """They are of no run and older than what is kept: their raw rows stay, so that a rebuild makes them again."""
    sent = ExportLogsServiceRequest()
    records = sent.resource_logs.add().scope_logs.add().log_records
    for name in (names.MODEL_CHECK, names.MODEL_CHECK_LATENCY, "foreign"):
        record = records.add(event_name=name, time_unix_nano=1)
        record.attributes.add(key=names.CHECK_ID).value.string_value = "c"
    deliver(store, [Request("logs", sent, "check", 1)])
    _came_in(store, 40, "run_id IS NULL")
    removed = prune(store, Keep(days=30), dry_run=False)
    assert [run.rows for run in removed if run.run_id is None] == [1]
    rebuild(store)
    with duckdb.connect(str(store), read_only=True) as con:
        for table in ("model_checks", "model_check_latency"):
            assert con.execute(f"SELECT check_id FROM {table}").fetchall() == [("c",)]


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    """Pruning nothing is an error that names the file."""
    with pytest.raises(StoreError, match="no store"):
        prune(tmp_path / "none.duckdb", Keep(days=1), dry_run=False)
    assert not (tmp_path / "none.duckdb").exists()


def test_a_runs_config_reaches_the_collector_it_starts():
    """Sizes may have units; what is not set is not passed."""
    section = TelemetrySection.model_validate({"keep_days": 30, "keep_bytes": "200GB"})
    assert launch._keep(section) == ["--keep-days", "30.0", "--keep-bytes", "200000000000"]
    assert launch._keep(TelemetrySection()) == []


def test_a_collector_that_leaves_waits_for_one_run_at_most(store):
    """Told to stop while it removes the first of two runs: that one is gone, whole, and the other is there."""
    with Database(store) as database:
        writer = Writer(database.con, database.columns)
        writer.start()
        sweeping = Retention(database, writer, lambda: False, None)
        remove = retention._delete_run

        def stopping(*call: Any) -> Pruned | None:
            sweeping.close()
            return remove(*call)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retention, "_delete_run", stopping)
            with pytest.raises(Overloaded):
                sweeping.prune(Keep(days=30), dry_run=False)
        writer.close()
    assert _rows(store)["steps"] == {"lost", "middle", "recent"}


# Beside a collector --------------------------------------------------------------------------------------------------


def _known_runs(store: Path) -> list[str]:
    return query("SELECT run_id FROM runs ORDER BY 1", store=store)["run_id"].to_pylist()


def test_a_collector_prunes_when_asked_and_takes_batches_meanwhile(store):
    """The same command through the collector; what is sent while it sweeps is stored."""
    with collector(store) as running:
        assert [run.run_id for run in prune(store, Keep(days=30), dry_run=True)] == ["old", "lost"]
        assert [run.run_id for run in prune(store, Keep(days=30), dry_run=False)] == ["old", "lost"]
        assert all(running.post(request).is_success for request in requests(_run("new", 0)))
        assert _known_runs(store) == ["middle", "new", "recent"]
        _refuses(running, {"keep_days": -1}, {"keep_bytes": "many"}, {"keep_days": True})
        assert running.http.post("/v1/prune", json={"keep_days": 1}).status_code == 401


def _refuses(running: Collector, *bodies: dict[str, Any]) -> None:
    for body in bodies:
        assert running.http.post("/v1/prune", json=body, headers=running.auth).status_code == 400


@pytest.mark.slow
def test_a_collector_told_what_to_keep_does_so_by_itself(store):
    """--keep-days at its start; a lost run stays while a training process owns it, and goes with nobody there."""
    with collector(store, "--keep-days", "30", "--owner-pid", str(os.getpid())):
        _wait_for(store, ["lost", "middle", "recent"])
    with collector(store, "--keep-days", "30"):
        _wait_for(store, ["middle", "recent"])


def _wait_for(store: Path, runs: list[str]) -> None:
    deadline = time.monotonic() + 30
    while _known_runs(store) != runs:
        assert time.monotonic() < deadline, _known_runs(store)
        time.sleep(0.1)
