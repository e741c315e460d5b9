"""What exposition formats become as OTLP, and when a counter is known to have begun anew."""

from __future__ import annotations

import math
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from collectors import scrape_parse
from collectors.scrape_parse import OPENMETRICS, Malformed, Resets, parse
from tests.scripted_collector import attributes

NOW = 1_800_000_000_000_000_000


def scrape(text: str | bytes, content_type: str = "text/plain", resets: Resets | None = None, at: int = NOW) -> Any:
    return parse(text if isinstance(text, str) else text.decode(), content_type, at, resets or Resets())


def metric(answer: Any, name: str) -> Metric:
    (found,) = [metric for metric in answer.metrics if metric.name == name]
    return found


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("requests", "served", ["route"], registry=made).labels("a").inc(2)
    Gauge("depth", "queued", registry=made).set(7)
    latency = Histogram("latency", "how long", buckets=[1, 10], registry=made)
    latency.observe(4, exemplar={"trace_id": "ab" * 16, "span_id": "cd" * 8, "user": "u"})
    latency.observe(40)
    Summary("size", "how big", registry=made).observe(3)
    Info("build", "what", registry=made).info({"version": "1"})
    Info("target", "who", registry=made).info({"zone": "z"})
    Enum("state", "how", states=["up", "down"], registry=made)
    return made


@pytest.mark.parametrize("content_type", ["text/plain; version=0.0.4", f"{OPENMETRICS}; version=1.0.0"])
def test_each_kind_becomes_its_otlp_kind(content_type: str) -> None:
    """Counters, gauges, histograms and summaries of a real client, in either format; target_info is the resource."""
    openmetrics = content_type.startswith(OPENMETRICS)
    answer = scrape((generate_openmetrics if openmetrics else generate_latest)(registry()), content_type)
    counter = metric(answer, "requests_total")
    (point,) = counter.sum.data_points
    assert (counter.description, counter.sum.is_monotonic, counter.sum.aggregation_temporality) == ("served", True, 2)
    assert (point.as_double, attributes(point.attributes), point.time_unix_nano) == (2, {"route": "a"}, NOW)
    assert point.start_time_unix_nano > 1_700_000_000_000_000_000  # from _created
    assert metric(answer, "depth").gauge.data_points[0].as_double == 7
    (histogram,) = metric(answer, "latency").histogram.data_points
    assert (list(histogram.explicit_bounds), list(histogram.bucket_counts)) == ([1, 10], [0, 1, 1])
    assert (histogram.count, histogram.sum) == (2, 44)
    (summary,) = metric(answer, "size").summary.data_points
    assert (summary.count, summary.sum) == (1, 3)
    assert answer.resource == {"zone": "z"}
    assert not [metric.name for metric in answer.metrics if metric.name.endswith("_created")]
    if openmetrics:
        (exemplar,) = histogram.exemplars
        assert (exemplar.trace_id, exemplar.span_id, exemplar.as_double) == (b"\xab" * 16, b"\xcd" * 8, 4)
        assert attributes(exemplar.filtered_attributes) == {"user": "u"}
        assert not metric(answer, "build_info").sum.is_monotonic
        assert [point.as_double for point in metric(answer, "state").sum.data_points] == [1, 0]


def test_quantiles_that_are_no_number_are_kept() -> None:
    """An empty summary's quantiles are NaN; a sample's own timestamp is kept; untyped samples are gauges."""
    answer = scrape('# TYPE s summary\ns{quantile="0.5"} NaN\ns_sum 0\ns_count 0\nloose{a="b"} 1.5 1800000000123\n')
    (quantile,) = metric(answer, "s").summary.data_points[0].quantile_values
    assert (quantile.quantile, math.isnan(quantile.value)) == (0.5, True)
    (point,) = metric(answer, "loose").gauge.data_points
    assert (point.as_double, point.time_unix_nano) == (1.5, 1_800_000_000_123_000_000)


def test_a_histogram_that_is_none_is_kept_as_exposed() -> None:
    """Buckets that shrink, or lack +Inf, make no OTLP histogram; their samples stay as gauges."""
    answer = scrape('# TYPE h histogram\nh_bucket{le="1"} 5\nh_bucket{le="+Inf"} 3\nh_sum 1\nh_count 3\n')
    buckets = {
        attributes(point.attributes)["le"]: point.as_double for point in metric(answer, "h_bucket").gauge.data_points
    }
    assert buckets == {"1": 5, "+Inf": 3}
    assert metric(answer, "h_count").gauge.data_points[0].as_double == 3


def test_a_counter_that_falls_began_after_the_scrape_before() -> None:
    """A start is unknown at first and moves to the scrape before when the value falls; other series keep theirs."""
    resets = Resets()

    def starts(at: int, one: int, other: int) -> list[int]:
        text = f'# TYPE c_total counter\nc_total{{k="1"}} {one}\nc_total{{k="2"}} {other}\n'
        points = metric(scrape(text, resets=resets, at=at), "c_total").sum.data_points
        return [point.start_time_unix_nano for point in points]

    assert starts(100, 5, 5) == [0, 0]
    assert starts(200, 7, 6) == [0, 0]
    assert starts(300, 2, 7) == [200, 0]
    assert starts(400, 3, 8) == [200, 0]


def test_the_start_of_the_process_is_the_start_of_its_counters() -> None:
    """process_start_time_seconds says when a target's counters began, and _created of one series knows better."""
    text = (
        "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1000\n# TYPE c_total counter\nc_total 3\n"
    )
    assert metric(scrape(text), "c_total").sum.data_points[0].start_time_unix_nano == 1000 * 10**9
    text += "# TYPE c_created gauge\nc_created 2000\n"
    assert metric(scrape(text), "c_total").sum.data_points[0].start_time_unix_nano == 2000 * 10**9


@pytest.mark.parametrize(
    ("text", "content_type"),
    [
        ("<html>404</html>", "text/html"),
        ("a{b=c} 1\n", "text/plain"),
        ("a one\n", "text/plain"),
        ("# TYPE h histogram\nh_bucket 5\n", "text/plain"),
        ('# TYPE h histogram\nh_bucket{le="+Inf"} 1e300\nh_count 1e300\n', "text/plain"),
        ("# TYPE a counter\na_total 1\n", OPENMETRICS),  # no EOF: cut short
        ("a 1\n" * 1001, "text/plain"),
    ],
)
def test_what_is_no_exposition_is_refused(text: str, content_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any text that is not in the format it is said to be in, or too long, is Malformed and nothing else."""
    monkeypatch.setattr(scrape_parse, "MAX_SAMPLES", 1000)
    with pytest.raises(Malformed):
        scrape(text, content_type)
