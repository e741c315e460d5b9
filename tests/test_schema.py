from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from collectors.database import Database
from rlinsight import names, schema
from rlinsight.errors import StoreError
from tests.synthetic import Run, fill

SECOND = 10**9


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    schema.apply(connection, Path(":memory:"))
    return connection


def _rows(con: duckdb.DuckDBPyConnection, table: str, *rows: dict) -> None:
    for row in rows:
        marks = ", ".join("?" * len(row))
        con.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))


def _list(con: duckdb.DuckDBPyConnection, sql: str) -> list:
    return con.execute(sql).fetchall()


def test_manifest_and_folder_must_agree(tmp_path):
    """A file that is not listed, and a listed one that is missing, are refused by name; the shipped ones agree."""
    assert schema.files()
    for change in ("unlisted", "missing"):
        root = tmp_path / change
        shutil.copytree(schema.ROOT, root)
        if change == "unlisted":
            (root / "views" / "extra.sql").write_text("SELECT 1")
        else:
            (root / "views" / "runs.sql").unlink()
        with pytest.raises(StoreError, match=r"views/(extra|runs)\.sql"):
            schema.files(root)


def test_every_file_makes_the_object_it_is_named_after(con):
    """One object a file, each table and view with its leading comment as its description in the database."""
    relations = dict(
        con.execute(
            "SELECT table_name, comment FROM duckdb_tables() UNION ALL "
            "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal"
        ).fetchall()
    )
    macros = {
        row[0] for row in con.execute("SELECT function_name FROM duckdb_functions() WHERE NOT internal").fetchall()
    }
    files = schema.files()
    assert {file.name for file in files if file.kind == "macros"} == macros
    assert {file.name: file.comment for file in files if file.kind != "macros"} == relations
    assert all(file.comment for file in files)


def test_a_store_remembers_its_version_and_applying_twice_changes_nothing(tmp_path):
    """schema_meta has one row; a second start keeps the data."""
    for _ in range(2):
        with Database(tmp_path / "s.duckdb") as database:
            versions = database.con.execute("SELECT version FROM schema_meta").fetchall()
            assert versions == [(schema.VERSION,)]


class Watched:
    """A connection that remembers its statements."""

    def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
        self.con, self.statements = con, []

    def execute(self, sql: str, *parameters: object) -> duckdb.DuckDBPyConnection:
        self.statements.append(sql)
        return self.con.execute(sql, *parameters)


def test_a_start_leaves_a_whole_store_alone_and_mends_another(con):
    """Nothing but queries for one that this version made; a missing view, macro or table is made, others' replaced."""

    def started() -> list[str]:
        watched = Watched(con)
        schema.apply(watched, Path(":memory:"))
        return [sql for sql in watched.statements if not sql.startswith("SELECT")]

    assert started() == []
    for harm in (
        "DROP VIEW runs",
        "DROP MACRO to_time",
        "DROP TABLE alerts",
        "UPDATE schema_meta SET views_hash = 'x'",
    ):
        con.execute(harm)
        assert started(), harm
        assert started() == [], harm


@pytest.mark.parametrize("stops_at", ["COMMENT ON VIEW", "UPDATE schema_meta", "COMMIT"])
def test_a_start_that_fails_is_made_up_for_by_the_next(con, stops_at):
    """The hash of the former objects stays with them: with the new one they would never be replaced."""
    con.execute("CREATE OR REPLACE VIEW runs AS SELECT 1 AS former")
    con.execute("UPDATE schema_meta SET views_hash = 'former'")

    class Stops(Watched):
        def execute(self, sql, *parameters):
            if sql.startswith(stops_at):
                raise duckdb.IOException("the disk is full")
            return super().execute(sql, *parameters)

    with pytest.raises(duckdb.IOException, match="the disk is full"):
        schema.apply(Stops(con), Path(":memory:"))
    assert _list(con, "SELECT views_hash FROM schema_meta") == [("former",)]
    assert [row[0] for row in _list(con, "DESCRIBE runs")] == ["former"]
    schema.apply(con, Path(":memory:"))
    assert _list(con, "SELECT views_hash FROM schema_meta") == [(schema.views_hash(),)]
    assert "run_id" in [row[0] for row in _list(con, "DESCRIBE runs")]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (f"CREATE TABLE schema_meta AS SELECT {schema.VERSION + 1} AS version", "upgrade rlinsight"),
        ("CREATE TABLE customers (id INT)", "something else"),
    ],
)
def test_newer_and_foreign_databases_are_refused_untouched(tmp_path, sql, message):
    """Refused before any DDL: not a byte of the file changes."""
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(sql)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=message):
        Database(path)
    assert path.read_bytes() == before


def test_train_metrics_has_a_column_for_every_step_metric(con):
    """The names of names.METRICS, by the rule in the view's comment."""

    def column(metric: str) -> str:
        head, _, tail = metric.partition("/")
        return tail.replace("/", "_") if head in ("policy", "optim", "perf") else metric.replace("/", "_")

    for i, metric in enumerate(names.METRICS):
        _rows(con, "step_metrics", {"run_id": "r", "attempt": 1, "step": 1, "time_ns": 1, "name": metric, "value": i})
    cursor = con.execute("SELECT * FROM train_metrics")
    row = dict(zip([item[0] for item in cursor.description], cursor.fetchone(), strict=True))
    assert {column(metric): row[column(metric)] for metric in names.METRICS} == {
        column(metric): i for i, metric in enumerate(names.METRICS)
    }


def test_a_resume_replaces_the_steps_after_its_checkpoint(con):
    """Attempt 1 did steps 1 to 4, attempt 2 went on from step 2 and did 3: every view has 1 and 2 of the first and
    3 of the second; the abandoned 4 is gone."""
    for attempt, steps, resumed in ((1, (1, 2, 3, 4), None), (2, (3,), 2)):
        _rows(
            con,
            "run_starts",
            {"run_id": "r", "attempt": attempt, "time_ns": attempt, "resumed_from_step": resumed},
        )
        for step in steps:
            key = {"run_id": "r", "attempt": attempt, "step": step}
            _rows(con, "steps", {**key, "start_ns": 0, "end_ns": SECOND})
            _rows(con, "step_metrics", {**key, "time_ns": 1, "name": "reward/mean", "value": attempt})
            _rows(con, "rollout_samples", {**key, "rollout_id": f"{step}", "group_id": f"{step}", "end_ns": 1})
            _rows(con, "token_runs", {**key, "rollout_id": f"{step}", "turn_index": 0, "token_ids": [1]})
            _rows(con, "group_prompts", {**key, "group_id": f"{step}"})
    expected = [(1, 1), (2, 1), (3, 2)]
    for view in ("v_steps", "train_metrics", "rollouts", "groups", "tokens", "v_phase_coverage"):
        assert _list(con, f"SELECT step, attempt FROM {view} ORDER BY step") == expected, view
    assert _list(con, "SELECT reward_mean FROM train_metrics ORDER BY step") == [(1,), (1,), (2,)]
    assert _list(con, "SELECT attempts, steps_done, last_step, last_reward FROM runs") == [(2, 3, 3, 2.0)]


def test_a_run_is_running_ended_or_lost(con):
    """A reported end wins; else it runs while heard of in the last minute, then is lost; only the last attempt runs."""
    now = time.time_ns()
    for run, heard in (("done", now), ("alive", now), ("silent", now - 3600 * SECOND)):
        _rows(con, "run_starts", {"run_id": run, "attempt": 1, "time_ns": now - 7200 * SECOND})
        _rows(con, "producer_health", {"run_id": run, "attempt": 1, "producer": run, "time_ns": heard})
    _rows(con, "run_ends", {"run_id": "done", "attempt": 1, "time_ns": now, "status": "failed", "exit_code": 3})
    _rows(con, "run_starts", {"run_id": "alive", "attempt": 2, "time_ns": now, "resumed_from_step": 0})
    assert _list(con, "SELECT run_id, status, exit_code FROM runs ORDER BY 1") == [
        ("alive", "running", None),
        ("done", "failed", 3),
        ("silent", "lost", None),
    ]
    assert _list(con, "SELECT attempt, status FROM attempts WHERE run_id = 'alive' ORDER BY 1") == [
        (1, "lost"),
        (2, "running"),
    ]


def test_a_run_without_a_start_event_is_still_listed(con):
    """Steps of a sender that announces no runs make a run, with what is unknown NULL."""
    _rows(con, "steps", {"run_id": "r", "attempt": 1, "step": 1, "start_ns": SECOND, "end_ns": 2 * SECOND})
    assert _list(con, "SELECT run_id, name, steps_done, total_steps FROM runs") == [("r", None, 1, None)]


def test_open_spans_are_those_that_began_and_did_not_end(con):
    """A started span without an end shows with its age while the attempt goes on; after the run's end nothing does."""
    now = time.time_ns()
    _rows(con, "run_starts", {"run_id": "r", "attempt": 1, "time_ns": now})
    for span, start in (("ended", 30), ("open", 20)):
        _rows(
            con,
            "span_starts",
            {
                "run_id": "r",
                "attempt": 1,
                "trace_id": "t",
                "span_id": span,
                "start_ns": now - start * SECOND,
                "name": span,
            },
        )
    raw = {"trace_id": "t", "name": "x", "start_ns": 1, "end_ns": 2, "batch_id": "b", "ingest_ns": 1}
    _rows(con, "otel_spans", {**raw, "span_id": "ended", "run_id": "r", "attempt": 1})
    ((span, status, age),) = _list(con, "SELECT span_id, status, age_s FROM open_spans")
    assert (span, status) == ("open", "running")
    assert 20 <= age < 25
    _rows(con, "run_ends", {"run_id": "r", "attempt": 1, "time_ns": now})
    assert _list(con, "FROM open_spans") == []


def test_phase_coverage_counts_overlaps_once(con):
    """Step 0-100 s; phases 0-40, 30-50 and 45-48 (inside), 60-120 (past its end): covered 50 + 40, unattributed 10."""
    key = {"run_id": "r", "attempt": 1, "step": 1}
    _rows(con, "steps", {**key, "start_ns": 0, "end_ns": 100 * SECOND})
    for start, end in ((0, 40), (30, 50), (45, 48), (60, 120)):
        _rows(con, "phases", {**key, "start_ns": start * SECOND, "end_ns": end * SECOND, "phase": "p"})
    assert _list(con, "SELECT covered_s, unattributed_s, fraction FROM v_phase_coverage") == [(90.0, 10.0, 0.9)]


def test_groups_say_whether_they_teach_anything(con):
    """Equal rewards are all_pass above zero and all_fail otherwise; different ones are mixed; unscored is NULL."""
    rewards = {"pass": [1, 1], "fail": [0, 0], "mixed": [1, 0], "unscored": [None, None]}
    for group, values in rewards.items():
        _rows(con, "group_prompts", {"run_id": "r", "attempt": 1, "step": 1, "group_id": group})
        for i, value in enumerate(values):
            key = {"run_id": "r", "attempt": 1, "rollout_id": f"{group}{i}"}
            _rows(con, "rollout_samples", {**key, "step": 1, "group_id": group, "end_ns": 1})
            if value is not None:
                _rows(con, "rollout_scores", {**key, "reward": value, "time_ns": 1})
    found = _list(
        con, "SELECT group_id, signal, zero_variance, reward_mean, reward_std, num_scored FROM groups ORDER BY 1"
    )
    assert found == [
        ("fail", "all_fail", True, 0.0, 0.0, 2),
        ("mixed", "mixed", False, 0.5, 0.5, 2),
        ("pass", "all_pass", True, 1.0, 0.0, 2),
        ("unscored", None, None, None, None, 0),
    ]


def test_tokens_align_with_what_the_update_saw(con):
    """Position by position: sampled token, both log-probs and flags; NULL where no update consumed the turn."""
    key = {"run_id": "r", "attempt": 1, "step": 1, "turn_index": 0}
    for rollout in ("seen", "unseen"):
        content = {"token_ids": [7, 8], "token_pieces": ["a", "b"], "rollout_log_probs": [-1.0, -2.0]}
        _rows(con, "token_runs", {**key, "rollout_id": rollout, **content})
    arrays = {"old_log_probs": [-1.5, -2.5], "loss_mask": [True, False], "clipped": [False, True]}
    _rows(con, "rollout_training", {**key, "rollout_id": "seen", **arrays})
    found = _list(
        con,
        "SELECT rollout_id, pos, token_id, piece, rollout_log_prob, old_log_prob, in_loss, clipped, ref_log_prob "
        "FROM tokens ORDER BY 1, 2",
    )
    assert found == [
        ("seen", 0, 7, "a", -1.0, -1.5, True, False, None),
        ("seen", 1, 8, "b", -2.0, -2.5, False, True, None),
        ("unseen", 0, 7, "a", -1.0, None, None, None, None),
        ("unseen", 1, 8, "b", -2.0, None, None, None, None),
    ]


def test_rollouts_are_one_row_each_whatever_was_sent_twice(con):
    """A foreign sender's repeated sample, score or turn rows do not multiply rollouts; the turns' texts are joined."""
    key = {"run_id": "r", "attempt": 1, "rollout_id": "x"}
    for _ in range(2):
        sample = {"step": 3, "group_id": "g", "policy_version_min": 1, "policy_version_max": 2, "end_ns": 1}
        _rows(con, "rollout_samples", {**key, **sample})
        _rows(con, "rollout_scores", {**key, "reward": 0.5, "time_ns": 1})
    _rows(con, "token_runs", {**key, "step": 3, "turn_index": 1, "prompt_text": "again", "response_text": " world"})
    _rows(con, "token_runs", {**key, "step": 3, "turn_index": 0, "prompt_text": "say", "response_text": "hello"})
    for turn in (0, 1):
        facts = {"step": 4, "policy_version": 3, "advantage": -1.0, "loss_mask": [True, False]}
        _rows(con, "rollout_training", {**key, "turn_index": turn, **facts})
    found = _list(
        con,
        "SELECT prompt_text, response_text, num_turns, reward, staleness, step_trained, loss_tokens FROM rollouts",
    )
    assert found == [("say", "hello world", 2, 0.5, 2, 4, 2)]


def test_linkage_is_whole_for_a_run_and_shows_what_is_torn_out(tmp_path):
    """A complete run links 100% on every edge; without its group events exactly that edge is at 0."""
    path = tmp_path / "s.duckdb"
    fill(path, Run())
    with duckdb.connect(str(path)) as con:
        edges = dict(con.execute("SELECT edge, fraction FROM v_linkage").fetchall())
        assert len(edges) == 14
        assert set(edges.values()) == {1.0}
    path = tmp_path / "serving.duckdb"
    fill(path, Run(serving=True, replicas=2))
    with duckdb.connect(str(path)) as con:
        edges = dict(con.execute("SELECT edge, fraction FROM v_linkage").fetchall())
        assert len(edges) == 16
        assert set(edges.values()) == {1.0}
        con.execute("DELETE FROM group_prompts")
        torn = dict(con.execute("SELECT edge, fraction FROM v_linkage").fetchall())
        assert {edge for edge in torn if torn[edge] != 1.0} == {"rollout->group"}
        assert torn["rollout->group"] == 0.0


def test_linkage_misses_rollouts_of_a_finished_step_that_no_update_took(con):
    """Of two rollouts of a finished step one was trained on: half. A failed step owes none and is not counted."""
    for step, status in ((1, 0), (2, 2)):
        key = {"run_id": "r", "attempt": 1, "step": step}
        _rows(con, "steps", {**key, "status_code": status})
        _rows(con, "rollout_samples", {**key, "rollout_id": f"{step}a"}, {**key, "rollout_id": f"{step}b"})
    _rows(con, "rollout_training", {"run_id": "r", "attempt": 1, "step": 1, "rollout_id": "1a"})
    assert _list(con, "SELECT n, linked FROM v_linkage WHERE edge = 'rollout->training'") == [(2, 1)]


def test_health_adds_up(tmp_path):
    """Everything emitted is stored or counted as dropped, nothing is missing; unknown senders have their own row."""
    path = tmp_path / "s.duckdb"
    fill(path, Run(dropped=7))
    with duckdb.connect(str(path)) as con:
        rows = con.execute("SELECT service_name, emitted - stored - dropped, dropped, missing FROM health").fetchall()
        controller, policy = sorted(rows)
        assert controller == ("rlinsight.controller", 0, 7, 0)
        # The policy process sends one metric after its last report.
        assert policy == ("rlinsight.policy", -1, 0, 0)
        con.execute("INSERT INTO ingest_batches (batch_id, signal, rows, rejected) VALUES ('x', 'traces', 4, 1)")
        unknown = con.execute("SELECT stored, refused, emitted FROM health WHERE producer IS NULL").fetchall()
        assert unknown == [(4, 1, None)]


def test_health_does_not_call_refused_items_missing(con):
    """100 emitted, a batch of 20 refused whole, 80 stored, 3 of them without domain row: 23 refused, 0 missing."""
    _rows(con, "ingest_batches", {"batch_id": "p/1", "producer": "p", "rows": 80, "rejected": 3})
    dropped = dict.fromkeys(("dropped_queue", "dropped_limit", "dropped_disk", "dropped_crash", "dropped_fault"), 0)
    _rows(con, "producer_health", {"producer": "p", "time_ns": 1, "emitted": 100, "rejected": 23, **dropped})
    assert _list(con, "SELECT stored, refused, missing FROM health") == [(80, 23, 0)]
    con.execute("UPDATE producer_health SET run_id = 'r'")
    assert _list(con, "SELECT n, linked, fraction FROM completeness") == [(100, 77, 0.77)]
    _rows(con, "producer_health", {"producer": "p", "time_ns": 2, "emitted": 105, "rejected": 23, **dropped})
    assert _list(con, "SELECT missing FROM health") == [(5,)]


def test_timeline_shows_spans_by_lane_and_what_is_open(tmp_path):
    """Every span with a lane is there once; an open run's started phases follow without an end."""
    path = tmp_path / "s.duckdb"
    fill(path, replace(Run(), status=None))
    with duckdb.connect(str(path)) as con:
        lanes = con.execute("SELECT DISTINCT lane FROM timeline WHERE step = 1 ORDER BY 1").fetchall()
        assert lanes == [("controller",), ("policy/0",)]
        n, ended = con.execute("SELECT count(*), count(end_ns) FROM timeline").fetchone()
        assert n == ended + 2
        assert con.execute("SELECT count(*) FROM otel_spans WHERE lane IS NOT NULL").fetchone() == (ended,)
        methods = con.execute("SELECT DISTINCT method FROM timeline WHERE name = 'rl.worker.call'").fetchall()
        assert {row[0] for row in methods} == {"generate", "log_probs", "ref_log_probs", "update"}


def test_views_give_numbers_every_client_knows(con):
    """No column of a view is HUGEINT or DECIMAL, which Arrow and pandas only know as decimal objects."""
    odd = con.execute(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal "
        "AND (data_type = 'HUGEINT' OR data_type LIKE 'DECIMAL%')"
    ).fetchall()
    assert odd == []


def test_interval_macros(con):
    """Overlap counts and intersections of three small intervals, by hand."""
    con.execute("CREATE TABLE i AS FROM (VALUES (1, 0, 10), (2, 5, 15), (3, 20, 30)) t(id, start_ns, end_ns)")
    counted = con.execute("SELECT ts, n, dur FROM intervals_overlap_count('i') ORDER BY ts").fetchall()
    assert counted == [(0, 1, 5), (5, 2, 5), (10, 1, 5), (15, 0, 5), (20, 1, 10), (30, 0, None)]
    pairs = con.execute("SELECT a_id, b_id, start_ns, end_ns FROM intervals_intersect('i', 'i') WHERE a_id < b_id")
    assert pairs.fetchall() == [(1, 2, 5, 10)]
