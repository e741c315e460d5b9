"""Metrics of any library in a process: what a series is, what arrives, and that measuring is harmless."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.metrics import Observation

from rlinsight import meters, names, telemetry
from rlinsight.exporter import BATCH_S
from rlinsight.wire import DELIVER_S
from tests.scripted_collector import Collector, attributes, running

METER = metrics.get_meter("a-library", "1.2")
OBSERVED: dict[str, Callable[[], Iterable[Observation]]] = {}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running(Collector()) as collector:
        yield collector


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    telemetry.shutdown(0.1)
    OBSERVED.clear()


def observe(name: str, read: Callable[[], Iterable[Observation]]) -> None:
    """An observable gauge that is read until the test ends: the instrument itself lives as long as the process."""
    OBSERVED[name] = read
    METER.create_observable_gauge(name, [lambda _: OBSERVED[name]() if name in OBSERVED else []])


def start(collector: Collector | None, spool: Path, **settings: Any) -> None:
    endpoint = collector.url if collector else None
    settings = {"metrics_interval_s": 1e6, **settings}  # on a multiple of which no test falls
    telemetry.setup("controller", spool_dir=spool, run_id="run-1", attempt=1, endpoint=endpoint, **settings)


def health(collector: Collector) -> dict[str, Any]:
    return attributes(collector.events(names.PRODUCER_HEALTH)[-1].attributes)


def test_every_process_collects_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One write before a delivery that other processes make too: a transaction of the store holds the points of all."""

    class Asked:
        def get(self, timeout: float) -> None:
            moments.append((now + timeout) % DELIVER_S)
            raise queue.Empty

    unstarted, moments = object.__new__(meters.Meters), list[float]()
    unstarted._asked, unstarted._interval_s = Asked(), 5.0  # type: ignore[assignment]
    for now in (1000.0, 1001.3, 1003.7, 1003.8):
        monkeypatch.setattr(meters.time, "time", lambda now=now: now)
        unstarted._wait()
    assert moments == pytest.approx([DELIVER_S - BATCH_S] * 4)


def test_metrics_of_any_library_arrive_with_our_resource(collector: Collector, tmp_path: Path) -> None:
    """Counter, gauge and histogram arrive as measured, cumulative, each collection once, linked to the current span."""
    start(collector, tmp_path)
    counter, gauge = METER.create_counter("requests", "1", "served"), METER.create_gauge("depth")
    histogram = METER.create_histogram("latency", "s", explicit_bucket_boundaries_advisory=[1, 10])
    observe("temperature", lambda: [Observation(36.6, {"room": "a"})])
    with telemetry.span("work") as span:
        counter.add(2, {"route": "a"})
        histogram.record(4)
    gauge.set(7)
    assert telemetry.flush(60)
    counter.add(3, {"route": "a"})
    assert telemetry.shutdown(60)
    first, second = collector.metrics("requests")
    (one,), (two,) = first.sum.data_points, second.sum.data_points
    assert (one.as_int, two.as_int, first.sum.aggregation_temporality, first.sum.is_monotonic) == (2, 5, 2, True)
    assert one.start_time_unix_nano == two.start_time_unix_nano < one.time_unix_nano < two.time_unix_nano
    assert (first.unit, first.description, attributes(one.attributes)) == ("1", "served", {"route": "a"})
    assert collector.metrics("depth")[0].gauge.data_points[0].as_int == 7
    assert collector.metrics("temperature")[0].gauge.data_points[0].as_double == 36.6
    (point,) = collector.metrics("latency")[0].histogram.data_points
    assert (list(point.explicit_bounds), list(point.bucket_counts), point.sum) == ([1, 10], [0, 1, 0], 4)
    traceparent = span.carrier()["traceparent"].split("-")
    for exemplar in (one.exemplars[0], point.exemplars[0]):
        assert [exemplar.trace_id.hex(), exemplar.span_id.hex()] == traceparent[1:3]
    assert len(two.exemplars) == 0  # measured outside any span
    assert collector.metric_resource()[names.RUN_ID] == "run-1"


def test_every_point_is_accounted_for(collector: Collector, tmp_path: Path) -> None:
    """Emitted equals stored, points included; a point no request can hold is dropped alone, as a fault."""
    start(collector, tmp_path)
    counter = METER.create_counter("many")
    for key in range(900):
        counter.add(1, {"key": key})
    METER.create_gauge("too.big").set(2**70)
    observe("broken", lambda: [Observation(1 / 0)])
    assert not telemetry.shutdown(5)
    assert collector.num_points() >= 900
    seen = health(collector)
    assert seen[names.EMITTED] - 1 == collector.num_points() + len(collector.events()) + len(collector.spans())
    assert seen[names.DROPPED_FAULT] == 1
    assert collector.metrics("too.big") == []


def test_ids_and_texts_are_no_labels(collector: Collector, tmp_path: Path) -> None:
    """Measurements that differ in an id are one series; the id goes with the exemplar, and is counted."""
    start(collector, tmp_path, text="redacted")
    counter = METER.create_counter("tokens")
    with telemetry.span("work"):
        for index in range(5):
            ids = {names.ROLLOUT_ID: f"r-{index}", names.STEP_INDEX: index, "gen_ai.prompt": f"secret {index}"}
            counter.add(1, {**ids, "engine": "native"})
    assert telemetry.shutdown(60)
    (point,) = collector.metrics("tokens")[0].sum.data_points
    assert (point.as_int, attributes(point.attributes)) == (5, {"engine": "native"})
    assert attributes(point.exemplars[0].filtered_attributes)[names.ROLLOUT_ID] == "r-4"
    assert b"secret" not in collector.raw
    assert health(collector)[names.LABELS_DROPPED] == 15


def test_too_many_series_overflow_into_one(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the limit attribute sets share the series marked otel.metric.overflow; nothing is lost from the sum."""
    monkeypatch.setattr(meters, "SERIES", 10)
    start(collector, tmp_path)
    counter = METER.create_counter("exploding")
    for key in range(50):
        counter.add(1, {"key": key})
    assert telemetry.flush(60)
    assert telemetry.shutdown(60)
    points = collector.metrics("exploding")[0].sum.data_points
    overflow = [point.as_int for point in points if attributes(point.attributes) == {"otel.metric.overflow": True}]
    assert (len(points), overflow) == (11, [40])
    assert health(collector)[names.METRICS_OVERFLOWING] == 1
    assert caplog.text.count("use fewer labels") == 1


def test_each_recording_counts_from_zero(collector: Collector, tmp_path: Path) -> None:
    """After a second setup the same counter is another producer's, from zero; between recordings nothing is kept."""
    counter = METER.create_counter("restarted")
    start(collector, tmp_path)
    counter.add(5)
    assert telemetry.shutdown(60)
    counter.add(100)
    start(collector, tmp_path)
    counter.add(1)
    assert telemetry.shutdown(60)
    first, second = collector.metrics("restarted")
    assert (first.sum.data_points[0].as_int, second.sum.data_points[0].as_int) == (5, 1)


def test_measuring_leaves_the_training_seed_alone(tmp_path: Path) -> None:
    """No instrument draws from the global random generator, exemplars included."""
    start(None, tmp_path)
    instruments = METER.create_counter("c"), METER.create_histogram("h"), METER.create_gauge("g")
    counter, histogram, gauge = instruments
    random.seed(7)
    before = random.getstate()
    with telemetry.span("work"):
        for index in range(50):
            counter.add(1)
            histogram.record(index)
            gauge.set(index)
    telemetry.flush(5)
    assert random.getstate() == before


@pytest.mark.slow
def test_a_hung_instrument_holds_nobody_up(collector: Collector, tmp_path: Path) -> None:
    """While a callback hangs, measuring, emitting, shutdown and the next setup go on; events still arrive."""
    hung, release = threading.Event(), threading.Event()

    def hang() -> list[Observation]:
        hung.set()
        release.wait(30)
        return []

    start(collector, tmp_path)
    counter = METER.create_counter("going.on")
    observe("hanging", hang)
    try:
        assert not telemetry.flush(0.5)
        assert hung.is_set()
        began = time.monotonic()
        for _ in range(1000):
            counter.add(1)
        telemetry.event("still here", {})
        telemetry.shutdown(4)
        start(collector, tmp_path)
        telemetry.event("and again", {})
        telemetry.shutdown(4)
        assert time.monotonic() - began < 20
    finally:
        release.set()
    assert len(collector.events("still here")) == len(collector.events("and again")) == 1


def test_a_forked_child_measures_nothing_and_waits_for_no_lock(collector: Collector, tmp_path: Path) -> None:
    """A child born while its parent collects neither hangs nor repeats the parent's counts; its own setup works."""
    start(collector, tmp_path)
    counter = METER.create_counter("forked")
    counter.add(1)
    inside, release = threading.Event(), threading.Event()

    def slow() -> list[Observation]:
        inside.set()
        release.wait(30)
        return []

    observe("slow", slow)
    threading.Thread(target=telemetry.flush, args=(20,), daemon=True).start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # kills a child that hangs
        code = 1
        try:
            release.set()
            counter.add(10)
            telemetry.setup("child", spool_dir=tmp_path, run_id="run-1", attempt=1, endpoint=collector.url)
            counter.add(100)
            code = 0 if telemetry.shutdown(5) else 2
        finally:
            os._exit(code)
    release.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry.shutdown(60)
    values = {metric.sum.data_points[0].as_int for metric in collector.metrics("forked")}
    assert values == {1, 100}


def test_shutting_the_global_provider_down_does_not_silence_us(collector: Collector, tmp_path: Path) -> None:
    """A library that flushes and shuts down the global meter provider ends no recording, of new meters either."""
    start(collector, tmp_path)
    provider: Any = metrics.get_meter_provider()
    assert provider.force_flush()
    provider.shutdown()
    metrics.get_meter("another").create_counter("after").add(1)
    assert telemetry.shutdown(60)
    assert collector.metrics("after")[-1].sum.data_points[0].as_int == 1


OTHER_PROVIDER = """
import sys
from pathlib import Path
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from rlinsight import telemetry
theirs = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([theirs]))
telemetry.setup("controller", spool_dir=Path(sys.argv[1]), run_id="r", attempt=1, endpoint=sys.argv[2], system=True)
counter = metrics.get_meter("x").create_counter("shared")
for index in range(3):
    counter.add(1, {"rlinsight.rollout.id": f"r-{index}"})
assert telemetry.shutdown(60)
found = [m for r in theirs.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics]
assert [(m.name, len(m.data.data_points)) for m in found] == [("shared", 3)], found
"""


def test_a_provider_set_by_the_program_feeds_us_too(collector: Collector, tmp_path: Path) -> None:
    """The program's own provider and its readers see what they saw before; ours sees the same without ids."""
    in_process(OTHER_PROVIDER, str(tmp_path), collector.url)
    (point,) = collector.metrics("shared")[-1].sum.data_points
    assert (point.as_int, attributes(point.attributes)) == (3, {})
    assert collector.metrics(names.PROCESS_MEMORY) != []


BAD = """
import random, sys
from pathlib import Path
from rlinsight import telemetry
telemetry.setup("controller", spool_dir=Path(sys.argv[1]), run_id="run-1", attempt=1, endpoint=sys.argv[2])
with telemetry.span("alive"):
    telemetry.event("event", {})
from opentelemetry import metrics
metrics.get_meter("x").create_counter("alive").add(1)
assert telemetry.shutdown(60)
"""
BROKEN = [
    *(f"OTEL_{item}_COUNT_LIMIT" for item in ("ATTRIBUTE", "SPAN_ATTRIBUTE", "SPAN_EVENT", "LINK_ATTRIBUTE")),
    *("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_METRICS_EXEMPLAR_FILTER", "OTEL_TRACES_SAMPLER"),
    *(f"OTEL_PYTHON_{kind}_PROVIDER" for kind in ("TRACER", "METER", "LOGGER")),
    *("OTEL_METRIC_EXPORT_INTERVAL", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS"),
    *("OTEL_PROPAGATORS", "OTEL_PYTHON_CONTEXT", "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"),
]


def test_unusable_environment_variables_stop_nothing(collector: Collector, tmp_path: Path) -> None:
    """Settings of OpenTelemetry that make its SDK raise cost a warning, not the import, the setup or a record."""
    in_process(BAD, str(tmp_path), collector.url, **dict.fromkeys(BROKEN, "abc"), OTEL_SDK_DISABLED="true")
    assert collector.span("alive").span_id == collector.events("event")[0].span_id
    assert collector.metrics("alive")[0].sum.data_points[0].as_int == 1


def in_process(code: str, *arguments: str, **environment: str) -> None:
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, cwd=root, timeout=60, env=os.environ | environment
    )
