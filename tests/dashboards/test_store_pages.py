"""Traces and Metrics as pages: they are about whole stores, with or without a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import empty
from rlinsight import names
from rlinsight.store import Endpoint
from tests.dashboards import foreign
from tests.dashboards.test_pages import html, rollout_id
from tests.synthetic import SECOND, Run, deliver, requests

Open = Callable[..., AppTest]
RUN = "run-20251130-120000-aaaa"
PAID, BROKEN, BATCH = (trace.hex() for trace in (foreign.PAID, foreign.BROKEN, foreign.BATCH))
QUERY = foreign.BROKEN[:7].hex() + "03"

pytestmark = pytest.mark.slow  # each test runs the whole app


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without any run: traces and metrics of a shop."""
    path = tmp_path_factory.mktemp("pages") / "shop.duckdb"
    start = time.time_ns() - 600 * SECOND
    deliver(path, [*foreign.traces(start), *foreign.metrics(start)])
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reports its machine, beside the shop's traces and an engine."""
    path = tmp_path_factory.mktemp("pages") / "mixed.duckdb"
    start = time.time_ns() - 600 * SECOND
    run = Run(RUN, "run", steps=4, groups=2, group_size=2, start_ns=start)
    deliver(path, [*requests(run), *foreign.traces(start), *foreign.metrics(start, 1, {names.RUN_ID: RUN})])
    return path


@pytest.mark.parametrize("page", ["traces", "metrics"])
def test_missing_store(open_page: Open, tmp_path: Path, page: str) -> None:
    """Without a store the page says which file it looked for and what creates it."""
    assert "none.duckdb" in html(open_page(tmp_path / "none.duckdb", page))


@pytest.mark.parametrize("page", ["traces", "metrics"])
def test_damaged_store(open_page: Open, tmp_path: Path, page: str) -> None:
    """A file that is no database is reported in one sentence."""
    broken = tmp_path / "broken.duckdb"
    broken.write_bytes(b"not a database" * 1000)
    assert "cannot be read" in html(open_page(broken, page))


def test_empty_stores_say_how_to_fill_them(open_page: Open, bare_store: Path) -> None:
    """Both pages name the command that receives OTLP; Metrics the settings that bring points."""
    assert "rlinsight collect --store" in html(open_page(bare_store, "traces"))
    shown = html(open_page(bare_store, "metrics"))
    assert "telemetry.system_metrics" in shown
    assert "telemetry.scrape" in shown


def test_a_live_collector_is_named_where_exporters_can_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's address is given; the token is asked for beyond loopback and never shown."""
    said: list[str] = []
    monkeypatch.setattr(empty.st, "html", said.append)
    for host in ("127.0.0.1", "10.0.0.5"):
        address = Endpoint(1, f"http://{host}:4318", f"{host}:4317", "quack:x", "secret-token", "s", 2, 0)
        empty.no_spans(Path("s.duckdb"), address)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318" in said[0]
    assert ["authorization" in text for text in said] == [False, True]
    assert "secret-token" not in "".join(said)


def test_traces_of_a_store_without_runs(open_page: Open, shop: Path) -> None:
    """Three traces, newest first, without columns that no trace fills."""
    app = open_page(shop, "traces")
    assert "**3** traces" in html(app)
    listed = app.dataframe[0].value
    assert list(listed["name"]) == ["settle", "POST /pay", "POST /pay"]
    assert "run_id" not in listed


def test_trace_filters(open_page: Open, shop: Path) -> None:
    """Filters in a link apply, one typed in narrows at once, and one that keeps nothing says so."""
    app = open_page(shop, "traces", errors="true")
    assert "**1** trace," in html(app)
    app.text_input(key="attributes").set_value("user-42").run()
    assert "**1** trace," in html(app)
    app.text_input(key="name").set_value("nothing is called this").run()
    assert "No trace matches" in html(app)


def test_trace_time_range(open_page: Open, shop: Path) -> None:
    """The window between two times begins with everything and keeps what started in it."""
    app = open_page(shop, "traces")
    app.selectbox(key="within").set_value("between").run()
    assert "**3** traces" in html(app)
    until = app.datetime_input(key="until")
    until.set_value(until.value - timedelta(hours=1)).run()
    assert "No trace matches" in html(app)


def test_open_trace_has_everything(open_page: Open, shop: Path) -> None:
    """Waterfall, the chosen span's attributes, event, resource, status, and the log record; markup stays text."""
    app = open_page(shop, "traces", trace=BROKEN, trace_span=QUERY)
    shown = html(app)
    assert app.selectbox(key="span_choice").value == QUERY
    assert app.get("plotly_chart")
    assert "error" in shown
    assert "deadlock &lt;img" in shown
    assert "<img" not in shown
    texts = "\n".join(table.value.to_string() for table in app.dataframe)
    for fact in ("user-42", "exception", "web-1", "the database said no"):
        assert fact in texts
    app.selectbox(key="span_choice").set_value(foreign.BROKEN[:7].hex() + "01").run()
    assert app.query_params["trace_span"] in (QUERY[:14] + "01", [QUERY[:14] + "01"])
    assert not app.exception


def test_links_lead_to_the_linked_trace(open_page: Open, shop: Path) -> None:
    """The batch links to two traces and to one that is not stored; a click opens the first, which knows the batch."""
    app = open_page(shop, "traces", trace=BATCH)
    assert "not stored" in html(app)
    links = [button for button in app.button if "POST /pay" in button.label]
    assert len(links) == 2
    links[0].click().run()
    assert app.query_params["trace"] in (PAID, [PAID])
    assert [button.label for button in app.button if "settle" in button.label] == ["settle in trace c3c3c3c3"]


def test_link_to_a_trace_that_is_gone(open_page: Open, shop: Path) -> None:
    """An unknown trace is a sentence under the list, which can be closed; an unknown span is its first one."""
    app = open_page(shop, "traces", trace="nowhere")
    assert "holds no span of trace nowhere" in html(app)
    next(button for button in app.button if button.label == "Close").click().run()
    assert "trace" not in app.query_params
    open_page(shop, "traces", trace=BROKEN, trace_span="nothing")


def test_steps_and_rollouts_lead_to_their_traces(open_page: Open, mixed: Path) -> None:
    """Timeline and an open rollout have the way to the trace."""
    timeline = open_page(mixed, "timeline", run=RUN, step=2)
    assert "Trace of this step" in {link.label for link in timeline.get("page_link")}
    rollout = open_page(mixed, "rollouts", run=RUN, rollout=rollout_id(mixed, RUN))
    assert any(link.label.startswith("Trace ") for link in rollout.get("page_link"))


def test_metrics_of_a_store_without_runs(open_page: Open, shop: Path) -> None:
    """Groups of what there is, a chart, and the dead target as a red note with its reason escaped."""
    app = open_page(shop, "metrics")
    shown = html(app)
    assert app.get("plotly_chart")
    assert "gone does not answer" in shown
    assert "<img" not in shown
    assert list(app.dataframe[-1].value["state"]) == ["no answer", "up"]


def test_metrics_of_a_run_stand_beside_its_phases(open_page: Open, mixed: Path) -> None:
    """The newest run is chosen, its phases are named, and the window can be one of its steps."""
    app = open_page(mixed, "metrics", of="Machines")
    assert app.query_params["run"] in (RUN, [RUN])
    assert "sample" in html(app)
    app = open_page(mixed, "metrics", run=RUN, step=2, window="step 2")
    assert app.selectbox(key="window").value == "step 2"
    assert app.get("plotly_chart")


def test_chosen_metrics_alone_are_drawn(open_page: Open, mixed: Path) -> None:
    """Picking a name leaves its panel alone."""
    app = open_page(mixed, "metrics", of="Scraped")
    assert set(app.multiselect(key="metrics").options) >= {"up", "vllm:generation_tokens_total"}
    app.multiselect(key="metrics").set_value(["up"]).run()
    assert list(app.dataframe[0].value["name"]) == ["up"]
    app.segmented_control(key="of").set_value("Machines").run()
    assert "system.cpu.utilization" in set(app.dataframe[0].value["name"])


def test_metrics_of_another_store_s_run(open_page: Open, mixed: Path) -> None:
    """A run the store lacks is said to be unknown."""
    assert "does not hold that run" in html(open_page(mixed, "metrics", run="gone"))


def test_a_run_without_metrics_says_what_brings_them(open_page: Open, tmp_path: Path) -> None:
    """A run that reports no machine and scrapes nothing: the page tells both settings."""
    sent = [request for request in requests(Run(RUN, "run", steps=1)) if request.signal != "metrics"]
    deliver(tmp_path / "quiet.duckdb", sent)
    assert "telemetry.system_metrics" in html(open_page(tmp_path / "quiet.duckdb", "metrics", run=RUN))
