from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from collectors.database import Database
from dashboards import examples, queries, rollout_queries
from dashboards.reader import read_now
from dashboards.rollout_queries import RolloutFilter
from rlinsight import store as stores
from tests.dashboards.conftest import BARE, EMPTY, FAILED, MAIN, PPO, PRIVATE, RESUMED
from tests.synthetic import Run, fill


@pytest.fixture(scope="module")
def read(store: Path) -> queries.Read:
    return read_now(store)


def one(store: Path, sql: str) -> Any:
    return stores.query(sql, store=store).to_pylist()[0].popitem()[1]


def all_questions(read: queries.Read, run: str) -> None:
    """Ask everything the pages ask of a run."""
    queries.versions(read, run)
    for ask in (
        queries.run_facts, queries.attempts, queries.linkage, queries.health, queries.open_spans, queries.curves,
        queries.signals, queries.components, queries.validation, queries.drops, rollout_queries.rollout_choices,
    ):  # fmt: skip
        ask(read, run)
    for ask in (queries.phase_seconds, queries.step_walls, queries.spans, queries.span_totals):
        ask(read, run, 1, 3)
    rollout_queries.rollout_page(read, run, RolloutFilter(), "newest", 10, 1)
    rollout_queries.rollout_counts(read, run, RolloutFilter())


@pytest.mark.parametrize("run", [RESUMED, BARE, EMPTY, "no such run"])
def test_every_question_has_an_answer_for_every_kind_of_run(read: queries.Read, run: str) -> None:
    """No run, however incomplete, makes a query fail."""
    all_questions(read, run)


def test_runs_are_newest_first(read: queries.Read) -> None:
    """The selector's order is by start."""
    assert list(queries.runs(read)["run_id"]) == [MAIN, RESUMED, FAILED, PRIVATE, BARE, EMPTY, PPO]


def test_long_runs_are_averaged_into_the_asked_number_of_points(read: queries.Read) -> None:
    """12 steps in 4 points are 4 means of 3 steps each, and the last point stands at the last step."""
    full, short = queries.curves(read, MAIN), queries.curves(read, MAIN, points=4)
    assert list(short["step"]) == [3, 6, 9, 12]
    assert list(short["steps"]) == [3, 3, 3, 3]
    assert short["reward_mean"][1] == pytest.approx(full["reward_mean"][3:6].mean())


@pytest.mark.parametrize("run", [MAIN, RESUMED])
def test_phase_seconds_add_up_to_the_step(read: queries.Read, run: str) -> None:
    """Phases and the unattributed rest together are the step's wall time, also of steps that were redone."""
    phases = queries.phase_seconds(read, run, 1, 12).groupby("step")["seconds"].sum()
    walls = queries.step_walls(read, run, 1, 12).set_index("step")["wall_s"]
    assert phases.to_dict() == pytest.approx(walls.to_dict(), rel=1e-6)


def test_redone_steps_count_once(read: queries.Read) -> None:
    """Steps 5 and 6 were done twice around a resume: curves, phases and rollouts show the later ones only."""
    assert list(queries.curves(read, RESUMED)["step"]) == list(range(1, 11))
    assert len(queries.step_walls(read, RESUMED, 1, 10)) == 10
    assert rollout_queries.rollout_counts(read, RESUMED, RolloutFilter(first=5, last=5))["n"][0] == 16


def test_redone_steps_do_not_colour_reward_components(store: Path, read: queries.Read) -> None:
    """A component's curve averages the rollouts that count, by step; what a resume did again is left out."""
    found = queries.components(read, RESUMED)
    by_hand = stores.query(
        "SELECT component, step, avg(value) AS value FROM rewards JOIN rollouts USING (run_id, attempt, rollout_id) "
        f"WHERE run_id = '{RESUMED}' GROUP BY component, step ORDER BY component, step",
        store=store,
    )
    pd.testing.assert_frame_equal(found[["component", "step", "value"]], by_hand.to_pandas())


def test_an_open_span_is_compared_with_spans_that_count(tmp_path: Path) -> None:
    """Steps 2 and 3 were abandoned by the resume from step 1, so only step 1 says how long a step usually takes."""
    path, now = tmp_path / "store.duckdb", time.time_ns()
    first = Run("r", "r", steps=3, status="interrupted", start_ns=now - 3600 * 10**9)
    fill(path, first, Run("r", "r", attempt=2, first_step=2, resumed_from_step=1, steps=0, status=None))
    opened = queries.open_spans(read_now(path), "r").set_index("name")
    seconds = one(path, "SELECT (end_ns - start_ns) / 1e9 FROM steps WHERE step = 1")
    assert opened["usual_s"]["rl.loop"] == pytest.approx(seconds, abs=1e-9)


def test_an_open_call_is_compared_with_calls_of_its_method(tmp_path: Path) -> None:
    """In the open step both ranks generate and rank 0 updates: each is measured by its own method's calls."""
    path = tmp_path / "store.duckdb"
    faults = {"faults": ("missing_rank",), "replicas": 2, "status": None}
    fill(path, Run("r", "r", steps=3, groups=2, group_size=2, **faults))
    opened = queries.open_spans(read_now(path), "r")
    found = opened[opened["name"] == "rl.worker.call"].drop_duplicates("method").set_index("method")["usual_s"]
    assert set(found.index) == {"generate", "update"}
    for method, usual in found.items():
        sql = f"SELECT median((end_ns - start_ns) / 1e9) FROM worker_calls WHERE method = '{method}'"
        assert usual == pytest.approx(one(path, sql), abs=1e-9)
    assert found["generate"] > 1.5 * found["update"], "8 s and 4 s"


def test_validations_and_dropped_groups(store: Path, read: queries.Read) -> None:
    """Four validations of two metrics with their errors; groups of equal rewards, in the steps that had some."""
    found = queries.validation(read, PPO)
    assert list(found["metric"].unique()) == ["mean@4", "pass@4"]
    assert list(found[found["metric"] == "mean@4"]["step"]) == [2, 4, 6, 8]
    assert (found["std_error"] > 0).all()
    drops = queries.drops(read, PPO)
    same = f"SELECT count(*) FROM groups WHERE run_id = '{PPO}' AND zero_variance"
    assert drops["groups"].sum() == one(store, same) > 0
    assert set(drops["reason"]) == {"zero_variance"}
    assert queries.validation(read, MAIN).empty
    assert queries.drops(read, MAIN).empty


def test_what_is_for_training_leaves_validation_out(tmp_path: Path) -> None:
    """A rollout of a validation with a reward of its own is in no component's mean and no list but its own."""
    path = tmp_path / "store.duckdb"
    fill(path, Run("r", "r", steps=2, groups=2, group_size=2, serving=True))
    read = read_now(path)
    before = queries.components(read, "r")
    with duckdb.connect(str(path)) as con:
        con.execute(
            "INSERT INTO rewards BY NAME SELECT run_id, attempt, rollout_id, 'numeric' AS component, 99.0 AS value "
            "FROM rollout_samples WHERE split = 'eval'"
        )
    pd.testing.assert_frame_equal(queries.components(read, "r"), before)
    counts = {
        split: rollout_queries.rollout_counts(read, "r", RolloutFilter(split=split))["n"][0]
        for split in ("train", "eval", None)
    }
    assert counts == {"train": 8, "eval": 1, None: 9}
    assert sorted(rollout_queries.rollout_choices(read, "r")["splits"][0]) == ["eval", "train"]


def test_spans_are_capped_longest_first_and_the_total_is_told(read: queries.Read) -> None:
    """With room for 5 spans the step itself is among them and ``total`` counts all."""
    some, every = queries.spans(read, MAIN, 3, 3, limit=5), queries.spans(read, MAIN, 3, 3)
    assert len(some) == 5 < len(every) == some["total"][0]
    assert some["name"][0] == "rl.loop"


FILTERS = [
    (RolloutFilter(first=3, last=5), "step BETWEEN 3 AND 5"),
    (RolloutFilter(min_reward=0.5), "reward >= 0.5"),
    (RolloutFilter(max_reward=0.5), "reward <= 0.5"),
    (RolloutFilter(finish=("stop",)), "finish_reason = 'stop'"),
    (RolloutFilter(finish=("stop", "length")), "finish_reason IN ('stop', 'length')"),
    (
        RolloutFilter(signal=("mixed",)),
        "group_id IN (SELECT group_id FROM groups g WHERE g.run_id = r.run_id AND signal = 'mixed')",
    ),
    (RolloutFilter(text="NUMBER"), "lower(prompt_text || response_text) LIKE '%number%'"),
    (RolloutFilter(text="100%'; DROP"), "false"),
]


@pytest.mark.parametrize(("chosen", "same"), FILTERS)
def test_filters_keep_what_their_sql_says(store: Path, read: queries.Read, chosen: RolloutFilter, same: str) -> None:
    """Each filter counts the same rollouts as the condition written by hand; text is matched literally."""
    expected = one(store, f"SELECT count(*) FROM rollouts r WHERE run_id = '{MAIN}' AND {same}")
    assert rollout_queries.rollout_counts(read, MAIN, chosen)["n"][0] == expected


@pytest.mark.parametrize("sort", rollout_queries.SORTS)
def test_pages_partition_the_rollouts(read: queries.Read, sort: str) -> None:
    """Pages of 100 hold every rollout exactly once, whatever the sort, each with its texts."""
    pages = [rollout_queries.rollout_page(read, MAIN, RolloutFilter(), sort, 100, page) for page in (1, 2)]
    ids = [rollout_id for page in pages for rollout_id in page["rollout_id"]]
    assert len(ids) == len(set(ids)) == 192
    assert all(page["response"].notna().all() for page in pages)


def test_tokens_come_in_windows(read: queries.Read) -> None:
    """Windows of 5 tokens join to the whole response, positions in order."""
    rollout = rollout_queries.rollout_page(read, MAIN, RolloutFilter(), "longest", 1, 1)["rollout_id"][0]
    total = int(rollout_queries.tokens(read, MAIN, rollout, 0)["total"][0])
    seen = [pos for at in range(0, total, 5) for pos in rollout_queries.tokens(read, MAIN, rollout, at, limit=5)["pos"]]
    assert seen == list(range(total))


@pytest.mark.parametrize("example", examples.EXAMPLES, ids=lambda example: example.title[:30])
def test_examples_run(store: Path, example: examples.Example) -> None:
    """Every offered question is valid SQL, one statement, and names its columns apart."""
    table = stores.query(example.sql_for(MAIN), store=store)
    assert len(set(table.column_names)) == table.num_columns


def test_the_catalog_lists_each_column_once_also_of_old_views(tmp_path: Path) -> None:
    """With views of another version in the file, the browser shows today's alone, with their descriptions."""
    path = tmp_path / "store.duckdb"
    Database(path).close()
    now = queries.catalog(read_now(path))
    with duckdb.connect(str(path)) as con:
        con.execute("CREATE OR REPLACE VIEW health AS SELECT 1 AS former")
        con.execute("UPDATE schema_meta SET views_hash = 'former'")
    pd.testing.assert_frame_equal(queries.catalog(read_now(path)), now)


def test_a_runs_own_alerts_are_told_once_each(tmp_path: Path) -> None:
    """Two lost replicas are two; what was said again is told once, at its last step; curves tell of a mismatch."""
    path = tmp_path / "store.duckdb"
    with Database(path) as database:
        said = [("mismatch", "apart"), ("lost_replica", "a is lost"), ("lost_replica", "b is lost")]
        said += [("mismatch", "apart again"), ("lost_replica", "a is lost")]
        for step, (rule, message) in enumerate(said):
            row = ["r", 1, step, step, rule, "warning", message, "FROM alerts"]
            database.con.execute("INSERT INTO alerts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    found = queries.raised_alerts(read_now(path), "r")
    assert list(zip(found["step"], found["message"], strict=True)) == [(4, "a is lost"), (2, "b is lost")]


def test_a_rule_that_speaks_often_hides_no_other(tmp_path: Path) -> None:
    """Five are told: the latest of each rule, then the newest."""
    path = tmp_path / "store.duckdb"
    with Database(path) as database:
        for step in range(10):
            rule = "failed_rollouts" if step else "lost_replica"
            row = ["r", 1, step, step, rule, "warning", f"alert {step}", "FROM alerts"]
            database.con.execute("INSERT INTO alerts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    assert list(queries.raised_alerts(read_now(path), "r")["step"]) == [9, 8, 7, 6, 0]


def test_run_ids_are_quoted_in_examples(store: Path) -> None:
    """A run id with a quote in it cannot end the literal."""
    assert stores.query(examples.EXAMPLES[0].sql_for("x' OR '1'='1"), store=store).num_rows == 0


def test_only_queries_and_the_editor_hold_sql() -> None:
    """SQL stands in modules of queries and in examples.py; no page builds its own."""
    folder = Path(queries.__file__).parent
    for path in [*folder.glob("*.py"), *folder.glob("app_pages/*.py")]:
        found = re.findall(r"SELECT\s+[\w*]+[\s\S]{0,200}?\sFROM\s+\w+", path.read_text(encoding="utf-8"))
        assert path.name.endswith(("queries.py", "examples.py")) or not found, (path, found)
