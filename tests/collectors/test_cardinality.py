"""Series of foreign senders are bounded, and a sender is told what was refused."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from collectors import cardinality
from collectors.cardinality import Cardinality
from collectors.decode import Decoder
from collectors.scrape_parse import attributes
from rlinsight import schema


def request(process: str, name: str, labels: list[str]) -> ExportMetricsServiceRequest:
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    resource.resource.attributes.extend(attributes({"service.instance.id": process}))
    points = resource.scope_metrics.add().metrics.add(name=name).gauge.data_points
    for label in labels:
        points.add(time_unix_nano=1, as_double=1, attributes=attributes({"request": label}))
    return message


def test_series_beyond_the_limit_are_refused_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known series go on, new ones beyond the limit are rejected with a reason; other metrics, processes are free."""
    monkeypatch.setattr(cardinality, "SERIES_PER_METRIC", 3)
    con = duckdb.connect()
    schema.apply(con, Path(":memory:"))
    decoder = Decoder(schema.columns(con))
    first = decoder.metrics(request("a", "depth", ["1", "2", "3", "4", "5"]), "b", 7)
    assert (first.items, first.rejected, len(first.rows["otel_metrics"])) == (5, 2, 3)
    assert first.problem == "metric 'depth': more than 3 series from one process; use fewer labels, and no ids"
    again = decoder.metrics(request("a", "depth", ["1", "2", "3", "4"]), "b", 7)
    assert (again.rejected, len(again.rows["otel_metrics"])) == (1, 3)
    assert decoder.metrics(request("b", "depth", ["9"]), "b", 7).rejected == 0
    assert decoder.metrics(request("a", "other", ["9"]), "b", 7).rejected == 0


def test_a_process_has_a_limit_over_all_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that makes up metric names runs into its own limit."""
    monkeypatch.setattr(cardinality, "SERIES_PER_PROCESS", 2)
    limits = Cardinality()
    assert [limits.refusal("p", name, "{}") is None for name in "aabc"] == [True, True, True, False]


def test_processes_unheard_of_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: the process heard of longest ago makes room, and starts anew when it comes back."""
    monkeypatch.setattr(cardinality, "SERIES_PER_METRIC", 1)
    monkeypatch.setattr(cardinality, "PROCESSES", 2)
    limits = Cardinality()
    assert [limits.refusal(process, "m", "1") for process in "aba"] == [None] * 3
    assert limits.refusal("c", "m", "1") is None  # b goes
    assert limits.refusal("a", "m", "2") is not None
    assert limits.refusal("b", "m", "2") is None
