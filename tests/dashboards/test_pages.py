from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from rlinsight import store as stores
from tests.dashboards.conftest import BARE, EMPTY, FAILED, MAIN, PPO, PRIVATE, RESUMED

PAGES = ["overview", "timeline", "rollouts", "sql"]
Open = Callable[..., AppTest]

pytestmark = pytest.mark.slow  # each test runs the whole app


def html(app: AppTest) -> str:
    """All HTML and captions of the page, as drawn."""
    return "\n".join([element.proto.body for element in app.get("html")] + [caption.value for caption in app.caption])


def rollout_id(store: Path, run: str) -> str:
    sql = f"SELECT rollout_id FROM rollouts WHERE run_id = '{run}' ORDER BY step, group_id, sample_index LIMIT 1"
    return stores.query(sql, store=store).to_pylist()[0]["rollout_id"]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("run", [RESUMED, EMPTY])
def test_every_page_draws_every_kind_of_run(open_page: Open, store: Path, page: str, run: str) -> None:
    """No page raises, whatever is missing from the run, and the completeness line is always there."""
    app = open_page(store, page, run=run)
    assert "linked" in html(app)
    assert app.query_params["run"] in (run, [run])


@pytest.mark.parametrize("page", PAGES)
def test_missing_store(open_page: Open, tmp_path: Path, page: str) -> None:
    """Without a store the page says which file it looked for and what creates it."""
    shown = html(open_page(tmp_path / "none.duckdb", page))
    assert "none.duckdb" in shown
    assert "rlinsight train" in shown


@pytest.mark.parametrize("page", PAGES)
def test_store_without_runs(open_page: Open, bare_store: Path, page: str) -> None:
    """An empty store names the command that fills it."""
    assert "The store has no runs" in html(open_page(bare_store, page))


def test_damaged_store(open_page: Open, tmp_path: Path) -> None:
    """A file that is no database is reported in one sentence, no traceback."""
    broken = tmp_path / "broken.duckdb"
    broken.write_bytes(b"not a database" * 1000)
    shown = html(open_page(broken))
    assert "cannot be read" in shown
    assert "Traceback" not in shown


def test_no_run_selected(open_page: Open, store: Path) -> None:
    """With the selector cleared the page asks for a run and does not pick one again."""
    app = open_page(store)
    app.selectbox(key="run_choice").set_value(None).run()
    assert "Pick a run" in html(app)
    assert "run" not in app.query_params


def test_link_to_a_run_of_another_store(open_page: Open, store: Path) -> None:
    """A run the store lacks is said to be unknown; the id is escaped."""
    shown = html(open_page(store, run="<b>gone</b>"))
    assert "does not hold that run" in shown
    assert "<b>gone" not in shown


def test_newest_run_is_chosen_and_linked(open_page: Open, store: Path) -> None:
    """Without a run in the link the newest is shown, and the link then names it."""
    app = open_page(store)
    assert app.query_params["run"] in (MAIN, [MAIN])
    assert app.metric[0].value == "12 / 12"


def test_choosing_a_run_forgets_step_and_rollout(open_page: Open, store: Path) -> None:
    """Step and rollout of one run do not leak into the next."""
    app = open_page(store, run=MAIN, step=3, rollout="x")
    app.selectbox(key="run_choice").set_value(FAILED).run()
    assert "step" not in app.query_params
    assert "rollout" not in app.query_params
    assert app.metric[0].value == "2 / 2"


def test_failed_run_says_why(open_page: Open, store: Path) -> None:
    """The reason stands on the overview."""
    assert "KeyError" in html(open_page(store, run=FAILED))


def test_run_without_a_step(open_page: Open, store: Path) -> None:
    """A run that ended in its setup has no empty charts but a sentence."""
    app = open_page(store, run=EMPTY)
    assert "No step was finished" in html(app)
    assert not app.get("plotly_chart")


def test_dropped_telemetry_is_an_alert(open_page: Open, store: Path) -> None:
    """Forty lost items are on the overview and in the header of every page."""
    assert "telemetry items were dropped" in html(open_page(store, run=BARE))
    assert "dropped <b>40</b>" in html(open_page(store, "sql", run=BARE))


def test_selected_step_leads_onward(open_page: Open, store: Path) -> None:
    """A step in the link is summed up, with ways to its timeline and rollouts."""
    app = open_page(store, run=MAIN, step=7)
    assert any("Step 7" in element.value for element in app.markdown)
    assert {link.label for link in app.get("page_link")} >= {"Timeline", "Rollouts"}


@pytest.mark.parametrize("step", ["abc", "0", "999999"])
@pytest.mark.parametrize("page", ["overview", "timeline"])
def test_nonsense_step_in_the_link(open_page: Open, store: Path, page: str, step: str) -> None:
    """A step that cannot be is ignored or clamped, never an error."""
    open_page(store, page, run=MAIN, step=step)


def test_timeline_follows_the_newest_step_until_one_is_chosen(open_page: Open, store: Path) -> None:
    """Without a step the last one is drawn; choosing one puts it in the link."""
    app = open_page(store, "timeline", run=MAIN)
    assert app.number_input(key="step_input").value == 12
    app.number_input(key="step_input").set_value(4).run()
    assert app.query_params["step"] in ("4", ["4"])
    assert any("step 4" in element.value for element in app.markdown)


def test_durations_table_ends_with_the_whole_step(open_page: Open, store: Path) -> None:
    """Unattributed time has its row, and the last row is the sum, 100%."""
    table = open_page(store, "timeline", run=MAIN, step=2).dataframe[0].value
    assert "unattributed" in set(table["phase"])
    assert list(table.iloc[-1][["phase", "share"]]) == ["step", "100%"]
    assert "kl_coef is 0" in table.set_index("phase")["note"]["ref_log_probs"]


def test_rollouts_of_validation_are_apart(open_page: Open, store: Path) -> None:
    """Where a run validated, training is shown until validation is chosen; where not, there is no choice."""
    app = open_page(store, "rollouts", run=PPO)
    assert "**128** rollouts" in html(app)
    app.selectbox(key="for").set_value("eval").run()
    assert "**4** rollouts" in html(app)
    assert not [box for box in open_page(store, "rollouts", run=MAIN).selectbox if box.key == "for"]


def test_rollout_filters_from_the_link(open_page: Open, store: Path) -> None:
    """Filters in a shared link apply: one step is 16 rollouts."""
    app = open_page(store, "rollouts", run=MAIN, **{"from": 3, "to": 3})
    assert "**16** rollouts" in html(app)
    assert set(app.dataframe[0].value["step"]) == {3}


def test_rollout_filters_narrow_and_say_when_nothing_matches(open_page: Open, store: Path) -> None:
    """A filter typed in applies at once; one that keeps nothing says so."""
    app = open_page(store, "rollouts", run=MAIN)
    assert "**192** rollouts" in html(app)
    app.number_input(key="low").set_value(0.5).run()
    assert (app.dataframe[0].value["reward"] >= 0.5).all()
    app.text_input(key="q").set_value("no response says this").run()
    assert "No rollout matches" in html(app)


def test_open_rollout_shows_texts_rewards_tokens_and_siblings(open_page: Open, store: Path) -> None:
    """One rollout: prompt and response escaped, its reward parts, a coloured strip, three siblings to open."""
    app = open_page(store, "rollouts", run=MAIN, rollout=rollout_id(store, MAIN))
    shown = html(app)
    assert shown.count('class="rl-text"') == 2
    assert 'class="rl-tokens"' in shown
    assert "numeric" in set(app.dataframe[1].value["component"])
    assert len([button for button in app.button if button.label == "Open"]) == 3


def test_sibling_opens(open_page: Open, store: Path) -> None:
    """Open on a sibling's card moves the page and its link to that rollout."""
    first = rollout_id(store, MAIN)
    app = open_page(store, "rollouts", run=MAIN, rollout=first)
    next(button for button in app.button if button.label == "Open").click().run()
    assert app.query_params["rollout"] not in (first, [first])
    assert not app.exception


def test_rollout_without_texts(open_page: Open, store: Path) -> None:
    """Not captured is said; token ids and numbers are still there."""
    shown = html(open_page(store, "rollouts", run=PRIVATE, rollout=rollout_id(store, PRIVATE)))
    assert shown.count("Text was not captured") == 2
    assert "⟨" in shown


def test_rollout_without_token_arrays(open_page: Open, store: Path) -> None:
    """A run that records no arrays has a sentence in place of the strip."""
    shown = html(open_page(store, "rollouts", run=BARE, rollout=rollout_id(store, BARE)))
    assert 'class="rl-tokens"' not in shown
    assert "No token arrays" in shown or "log-probs are not" in shown


def test_link_to_a_rollout_that_is_gone(open_page: Open, store: Path) -> None:
    """An unknown rollout is a sentence under the table."""
    assert "holds no rollout nowhere" in html(open_page(store, "rollouts", run=MAIN, rollout="nowhere"))


def ask(app: AppTest, sql: str) -> AppTest:
    app.text_area(key="sql").set_value(sql)
    next(button for button in app.button if button.label == "Run").click().run()
    assert not app.exception
    return app


def test_sql_answers(open_page: Open, store: Path) -> None:
    """The result is shown with its row count; a trailing comment and semicolon do not matter."""
    app = ask(open_page(store, "sql"), "SELECT step, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1; -- by step")
    assert list(app.dataframe[0].value.columns) == ["step", "n"]
    assert "rows · 2 columns" in html(app)


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("SELECT nope FROM rollouts", "nope"),
        ("SELEC 1", "syntax error"),
        ("DROP TABLE steps", "read-only"),
        ("SELECT * FROM read_csv('/etc/passwd')", ""),
        ("SELECT 1; SELECT 2", "one statement"),
    ],
)
def test_sql_errors_are_plain(open_page: Open, store: Path, sql: str, word: str) -> None:
    """A wrong or refused statement is answered with DuckDB's sentence, nothing is changed, and the page lives on."""
    app = ask(open_page(store, "sql"), sql)
    assert "refused or failed" in html(app)
    assert word in app.code[0].value
    assert "LIMIT" not in app.code[0].value
    ask(app, "SELECT 1 AS one")
    assert list(app.dataframe[0].value["one"]) == [1]


@pytest.mark.parametrize(
    "sql", ["DESCRIBE rollouts", "SHOW TABLES", "EXPLAIN SELECT 1", "SUMMARIZE steps", "FROM runs"]
)
def test_sql_other_reading_statements(open_page: Open, store: Path, sql: str) -> None:
    """Statements a LIMIT cannot be put around work too."""
    assert len(ask(open_page(store, "sql"), sql).dataframe[0].value) > 0


def test_schema_browser_lists_views_with_what_they_answer(open_page: Open, store: Path) -> None:
    """Relations stand with their description; searching a column keeps the relations that have it."""
    app = open_page(store, "sql")
    assert "One row per rollout" in html(app)
    app.text_input(key="needle").set_value("clip_fraction").run()
    assert "<b>clip_fraction</b>" in html(app)
    assert "weight_syncs" not in html(app)
