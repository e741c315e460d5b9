from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import pytest

from dashboards import trace_queries
from dashboards.queries import Read
from dashboards.reader import read_now
from dashboards.trace_queries import TraceFilter
from rlinsight import store as stores
from tests.dashboards import foreign
from tests.synthetic import SECOND, Run, deliver, fill, requests

RUN = "run-20251130-120000-aaaa"
PAID, BROKEN, BATCH = (trace.hex() for trace in (foreign.PAID, foreign.BROKEN, foreign.BATCH))


@pytest.fixture(scope="module")
def start() -> int:
    return time.time_ns() - 600 * SECOND


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, start: int) -> Path:
    """A run of two steps, and after it three traces of a shop."""
    path = tmp_path_factory.mktemp("traces") / "store.duckdb"
    run = Run(RUN, "run", steps=2, groups=2, group_size=2, start_ns=start - 300 * SECOND)
    deliver(path, [*requests(run), *foreign.traces(start)])
    return path


@pytest.fixture(scope="module")
def read(shop: Path) -> Read:
    return read_now(shop)


def kept(read: Read, chosen: TraceFilter) -> list[str]:
    """Traces the filter keeps, and that its count is of them."""
    found = list(trace_queries.trace_page(read, chosen, 100, 1)["trace_id"])
    assert trace_queries.trace_count(read, chosen) == len(found)
    return found


def test_foreign_traces_stand_beside_those_of_a_run_newest_first(read: Read) -> None:
    """The three of the shop, then two steps with four rollouts each and the run's own; each with what it is."""
    page = trace_queries.trace_page(read, TraceFilter(), 100, 1)
    assert list(page["trace_id"][:3]) == [BATCH, BROKEN, PAID]
    assert sorted(page["start_ns"], reverse=True) == list(page["start_ns"])
    assert trace_queries.trace_count(read, TraceFilter()) == len(page)
    broken = page.iloc[1]
    assert (broken["name"], broken["service"], broken["has_root"]) == ("POST /pay", "shop", True)
    assert (broken["spans"], broken["errors"], broken["services"]) == (3, 1, 2)
    assert broken["duration_s"] == pytest.approx(0.15)
    assert pd.isna(broken["run_id"])


def test_pages_follow_each_other(read: Read) -> None:
    """Pages of two are the list of all, cut."""
    every = list(trace_queries.trace_page(read, TraceFilter(), 100, 1)["trace_id"])
    pages = [list(trace_queries.trace_page(read, TraceFilter(), 2, page)["trace_id"]) for page in (1, 2, 3)]
    assert [trace for page in pages for trace in page] == every[:6]


def test_a_span_sent_twice_counts_once(read: Read) -> None:
    """The batch's one span came twice."""
    page = trace_queries.trace_page(read, TraceFilter(name="settle"), 10, 1)
    assert list(page["spans"]) == [1]
    assert len(trace_queries.spans(read, BATCH)) == 1
    assert list(trace_queries.linked_from(read, PAID)["name"]) == ["settle"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (TraceFilter(service=("shop",)), [BROKEN, PAID]),
        (TraceFilter(service=("shop", "ledger")), [BATCH, BROKEN, PAID]),
        (TraceFilter(name="select ORD"), [BROKEN]),
        (TraceFilter(name="100%"), []),
        (TraceFilter(text="USER-42"), [BROKEN]),
        (TraceFilter(text="'; DROP"), []),
        (TraceFilter(service=("shop", "ledger"), min_s=0.2), [PAID]),
        (TraceFilter(service=("shop",), min_s=0.4), [PAID]),
        (TraceFilter(errors=True), [BROKEN]),
        (TraceFilter(errors=True, service=("shop",)), []),  # its failed span is of the ledger
        (TraceFilter(service=("nobody",)), []),
    ],
)
def test_filters_keep_traces_with_a_span_that_fits_all(read: Read, chosen: TraceFilter, expected: list[str]) -> None:
    """Each filter alone and together, checked by hand on the shop's three traces."""
    assert kept(read, chosen) == expected


def test_time_and_run_filters(read: Read, start: int) -> None:
    """Bounds of time are of span starts and inclusive; a run's traces are the run's alone."""
    assert kept(read, TraceFilter(since_ns=start + SECOND)) == [BATCH, BROKEN]
    assert kept(read, TraceFilter(since_ns=start, until_ns=start + SECOND)) == [PAID]
    assert not {BATCH, BROKEN, PAID} & set(kept(read, TraceFilter(run_id=RUN)))
    extent = trace_queries.extent(read)
    assert extent is not None
    assert extent[1] == start + 5 * SECOND


def test_services_of_most_spans_come_first(read: Read) -> None:
    """Those of the run and of the shop are offered alike."""
    found = trace_queries.services(read)
    assert set(found) >= {"shop", "ledger", "rlinsight.controller"}
    assert found.index("ledger") < found.index("shop")


def test_failed_and_asked_for_spans_survive_the_limit(read: Read) -> None:
    """With room for two of three spans the failed one and the longest remain; the one asked for goes before both."""
    some = trace_queries.spans(read, BROKEN, limit=2)
    assert list(some["name"]) == ["SELECT orders", "POST /pay"]
    assert set(some["total"]) == {3}
    book = foreign.BROKEN[:7].hex() + "02"
    assert list(trace_queries.spans(read, BROKEN, book, limit=2)["name"]) == ["book", "SELECT orders"]


def test_span_has_all_that_was_sent(read: Read) -> None:
    """Status, message, attributes, events and links of a span."""
    sent = trace_queries.span(read, BROKEN, foreign.BROKEN[:7].hex() + "03").iloc[0]
    assert (sent["status_code"], sent["status_message"]) == (2, f"deadlock {foreign.MARKUP}")
    assert "user-42" in sent["span_attributes"]
    assert "Deadlock" in sent["events"]
    assert trace_queries.span(read, BROKEN, "0" * 16).empty


def test_links_find_the_spans_that_are_stored(read: Read) -> None:
    """Two of the batch's three links lead somewhere."""
    paid, gone = (PAID, foreign.PAID[:7].hex() + "01"), ("ee" * 16, "ee" * 8)
    assert trace_queries.named(read, [paid, gone]) == {paid: "POST /pay"}
    assert trace_queries.named(read, []) == {}


def test_log_records_of_a_trace(read: Read) -> None:
    """The record with the trace's id, and none for another."""
    logs = trace_queries.logs(read, BROKEN)
    assert list(logs["body"]) == ["the database said no"]
    assert trace_queries.logs(read, PAID).empty


def test_the_trace_of_a_step_and_of_its_rollouts(shop: Path, read: Read) -> None:
    """A step's trace is that of its rl.loop; its rollouts' traces link to it."""
    trace = trace_queries.step_trace(read, RUN, 2)
    assert trace is not None
    assert "rl.loop" in set(trace_queries.spans(read, trace)["name"])
    assert trace_queries.step_trace(read, RUN, 99) is None
    of_rollout = stores.query("SELECT trace_id FROM rollouts LIMIT 1", store=shop).to_pylist()[0]["trace_id"]
    assert next(iter(trace_queries.spans(read, of_rollout)["name"])) == "rl.rollout"


def test_open_spans_of_a_running_step_are_in_its_trace(tmp_path: Path) -> None:
    """A step that has begun has a trace; what is open in it has no end and is of a running run."""
    path = tmp_path / "store.duckdb"
    fill(path, Run(RUN, "run", steps=1, status=None))
    read = read_now(path)
    trace = trace_queries.step_trace(read, RUN, 2)
    assert trace is not None
    opened = trace_queries.spans(read, trace)
    opened = opened[opened["end_ns"].isna()]
    assert "rl.loop" in set(opened["name"])
    assert set(opened["open_for"]) == {"running"}


def test_store_without_spans(bare_store: Path) -> None:
    """Nothing to show is None and empty, not an error."""
    read = read_now(bare_store)
    assert trace_queries.extent(read) is None
    assert trace_queries.services(read) == []
    assert trace_queries.trace_page(read, TraceFilter(), 10, 1).empty
    assert trace_queries.version(read) == trace_queries.version(read)
