from __future__ import annotations

import time
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from dashboards import metric_queries
from dashboards.metric_queries import MAX_POINTS, MAX_SERIES, Window
from dashboards.queries import Frame, Read
from dashboards.reader import read_now
from rlinsight import names
from tests.dashboards import foreign
from tests.synthetic import SECOND, Request, Run, deliver, fill, requests

RUN = "run-20251130-120000-aaaa"
TOKENS, LATENCY = "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds"


@pytest.fixture(scope="module")
def start() -> int:
    return time.time_ns() // SECOND * SECOND - 1200 * SECOND


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory, start: int) -> Read:
    """A run of 12 steps that reports its machine, beside an engine and a dead target of no run, for five minutes."""
    path = tmp_path_factory.mktemp("metrics") / "store.duckdb"
    run = Run(RUN, "run", steps=12, groups=2, group_size=2, start_ns=start)
    deliver(path, [*requests(run), *foreign.metrics(start, 5, {names.RUN_ID: RUN})])
    return read_now(path)


@pytest.fixture
def window(start: int) -> Window:
    return Window(start, start + 300 * SECOND, RUN)


def points(sent: list[tuple[int, ExportMetricsServiceRequest]]) -> list[Request]:
    return [Request("metrics", message, "test", seq) for seq, message in sent]


def series(read: Read, name: str, kind: str, window: Window, monotonic: bool = False) -> Frame:
    return metric_queries.series(read, name, kind, monotonic, window)


def test_catalog_says_what_there_is(read: Read, window: Window) -> None:
    """Metrics of the run and those of no run in its time, with kind, unit, and whether a scrape brought them."""
    found = metric_queries.catalog(read, window).set_index("name")
    assert found.loc["system.cpu.utilization", "description"] == "share of CPU time"
    assert dict(found["scraped"])[TOKENS]
    assert not dict(found["scraped"])["system.cpu.utilization"]
    assert (found.loc[TOKENS, "kind"], bool(found.loc[TOKENS, "is_monotonic"])) == ("sum", True)
    assert found.loc[LATENCY, "unit"] == "s"


def test_another_run_sees_only_what_belongs_to_none(read: Read, start: int) -> None:
    """A run's own points are not shown under another."""
    found = metric_queries.catalog(read, Window(start, start + 300 * SECOND, "other"))
    assert set(found["name"]) >= {TOKENS, "up"}
    assert "system.cpu.utilization" not in set(found["name"])


def test_gauges_are_averaged_into_buckets(read: Read, start: int) -> None:
    """User CPU climbs from 0.5 to 0.683 in 12 points; one bucket of them has their mean and their highest."""
    window = Window(start, start + 55 * SECOND + 1, RUN)
    found = series(read, "system.cpu.utilization", "gauge", window)
    assert found["series"].nunique() == 2
    assert len(found) == 24
    coarse = Coarse(window.since_ns, window.until_ns, RUN)
    found = series(read, "system.cpu.utilization", "gauge", coarse)
    user = found[found["attributes"].str.contains("user")]
    expected = [0.5 + 0.2 * i / 12 for i in range(12)]
    assert list(user["value"]) == pytest.approx([sum(expected) / 12])
    assert list(user["high"]) == pytest.approx([max(expected)])


class Coarse(Window):
    """A window of one bucket."""

    @property
    def params(self) -> dict:
        return {**super().params, "width": self.until_ns - self.since_ns + 1}


def test_counters_are_rates_across_a_restart(read: Read, window: Window) -> None:
    """The engine makes 200 tokens a second before and after its counter begins anew: every bucket says 200."""
    found = series(read, TOKENS, "sum", window, monotonic=True)
    assert len(found) > 50
    assert set(found["value"].round(6)) == {200.0}
    coarse = Coarse(window.since_ns, window.until_ns, RUN)
    assert list(series(read, TOKENS, "sum", coarse, monotonic=True)["value"].round(6)) == [200.0]


def test_growth_from_before_the_window_is_left_out(read: Read, start: int) -> None:
    """A window that opens between two points begins with the first whole interval, not with all there was before."""
    found = series(read, TOKENS, "sum", Window(start + 42 * SECOND, start + 60 * SECOND, RUN), monotonic=True)
    assert set(found["value"].round(6)) == {200.0}
    assert found["time_ns"].min() >= start + 49 * SECOND


def test_quantiles_are_of_what_came_since_the_bucket_before(read: Read, window: Window, start: int) -> None:
    """Latencies in (0.1, 0.5] have median 0.3; after the restart those in (0.5, 1] have 0.75, untouched by the old."""
    found = series(read, LATENCY, "histogram", window).set_index("time_ns")["value"].dropna()
    early, late = found[found.index < start + 150 * SECOND], found[found.index > start + 165 * SECOND]
    assert set(early.round(6)) == {0.3}
    assert set(late.round(6)) == {0.75}
    assert len(early) > 20
    assert len(late) > 20


def waits(path: Path, start: int, temporality: int, *counts: list[int]) -> Read:
    """A store with histogram ``wait`` of bounds 1 and 2, a point each second."""
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="wait", unit="s")
    metric.histogram.aggregation_temporality = temporality
    for i, of in enumerate(counts):
        metric.histogram.data_points.add(
            time_unix_nano=start + i * SECOND, count=sum(of), bucket_counts=of, explicit_bounds=[1, 2]
        )
    deliver(path, points([(0, message)]))
    return read_now(path)


def test_delta_histograms_are_added_up(tmp_path: Path, start: int) -> None:
    """Three deltas in one bucket: one observation in (0, 1] and two in (1, 2] have a median of 1.25."""
    read = waits(tmp_path / "store.duckdb", start, foreign.DELTA, [1, 0, 0], [0, 1, 0], [0, 1, 0])
    found = series(read, "wait", "histogram", Coarse(start, start + 10 * SECOND))
    assert list(found["value"]) == pytest.approx([1.25])


def test_a_histogram_that_began_anew_counts_from_zero(tmp_path: Path, start: int) -> None:
    """100 and 50 observations, after a restart 2 and 2: the median of those is 1, no difference is below zero."""
    read = waits(tmp_path / "store.duckdb", start, foreign.CUMULATIVE, [100, 50, 0], [2, 2, 0])
    found = series(read, "wait", "histogram", Window(start, start + 10 * SECOND))
    assert list(found["value"]) == pytest.approx([1.0])


def test_series_and_points_are_bounded(tmp_path: Path, start: int) -> None:
    """Of 12 series of 700 points those that reach highest are drawn, in no more than MAX_POINTS buckets each."""
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="many")
    for i in range(12):
        for tick in range(700):
            metric.gauge.data_points.add(
                time_unix_nano=start + tick * SECOND, as_double=i, attributes=foreign.pairs({"i": i})
            )
    path = tmp_path / "store.duckdb"
    deliver(path, points([(0, message)]))
    found = series(read_now(path), "many", "gauge", Window(start, start + 700 * SECOND))
    assert found["series"].nunique() == MAX_SERIES
    assert set(found["value"]) == set(range(12 - MAX_SERIES, 12))
    assert set(found["total"]) == {12}
    assert found.groupby("series").size().max() <= MAX_POINTS


def test_hosts_and_processes_are_told_apart(tmp_path: Path, start: int) -> None:
    """The same metric of two machines is two series, each with its host."""
    sent = []
    for i, host in enumerate(("node-0", "node-1")):
        sent += [(request.seq, request.message) for request in foreign.metrics(start, 0, {"host.name": host})][:1]
        sent[-1] = (i, sent[-1][1])
    path = tmp_path / "store.duckdb"
    deliver(path, points(sent))
    found = series(read_now(path), "process.memory.usage", "gauge", Window(start, start + SECOND))
    assert set(found["host"]) == {"node-0", "node-1"}


def test_targets_that_do_not_answer_come_first(read: Read) -> None:
    """The dead target is down with its reason; the engine is up."""
    found = metric_queries.scrape_targets(read, RUN)
    assert list(found["target"]) == ["gone", "engine"]
    assert list(found["up"]) == [False, True]
    assert "ConnectError" in found["last_error"][0]
    assert list(metric_queries.scrape_targets(read, None)["target"]) == ["gone", "engine"]


def test_phases_and_steps_behind_the_panels(read: Read, window: Window, start: int) -> None:
    """Wide phases and all twelve steps of the run; none for the whole store, nor for a window before the run."""
    phases, steps = metric_queries.phases(read, window), metric_queries.steps(read, window)
    assert {"sample", "train"} <= set(phases["phase"])
    assert list(steps["step"]) == list(range(1, 13))
    nowhere = Window(start, start + 300 * SECOND)
    assert metric_queries.phases(read, nowhere).empty
    assert metric_queries.steps(read, nowhere).empty
    assert metric_queries.steps(read, Window(start - 10 * SECOND, start - SECOND, RUN)).empty


def test_long_runs_show_every_nth_step(tmp_path: Path) -> None:
    """50 steps have 25 lines, at every other."""
    path = tmp_path / "store.duckdb"
    fill(path, Run(RUN, "run", steps=50, groups=1, group_size=1, tokens=2, arrays=False, texts=False))
    read = read_now(path)
    found = metric_queries.steps(read, Window(0, time.time_ns(), RUN))
    assert list(found["step"]) == list(range(2, 51, 2))


def test_windows_of_steps_and_of_all(read: Read, start: int) -> None:
    """A step's window is its span; a run's extent is that of its own points; an unknown run has none."""
    step = metric_queries.step_window(read, RUN, 2)
    assert step is not None
    assert start < step[0] < step[1]
    assert metric_queries.step_window(read, RUN, 99) is None
    assert metric_queries.extent(read, "unknown") is None
    assert metric_queries.extent(read, None) is not None


def test_store_without_metrics(bare_store: Path) -> None:
    """Nothing to show is None and empty, not an error."""
    read, window = read_now(bare_store), Window(0, 10)
    assert metric_queries.extent(read, None) is None
    assert metric_queries.catalog(read, window).empty
    assert metric_queries.scrape_targets(read, None).empty
    for kind, monotonic in (("gauge", False), ("sum", True), ("histogram", False), ("summary", False)):
        assert series(read, "x", kind, window, monotonic).empty
