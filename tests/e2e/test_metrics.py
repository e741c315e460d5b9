"""Metrics of a whole run: its processes and machine, the endpoints it names, and training without any record."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, start_http_server

from rlinsight.config import parse
from rlinsight.errors import ConfigError
from tests.e2e.test_launch import Place, place  # noqa: F401


def configure(place: Place, **telemetry: Any) -> None:  # noqa: F811
    tree = yaml.safe_load(place.config.read_text())
    tree["telemetry"] |= telemetry
    place.config.write_text(yaml.safe_dump(tree))


def test_a_run_records_its_machine_and_what_it_scrapes(
    place: Place,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """System metrics and those of a configured endpoint carry the run, and nothing is missing; a proxy that the
    environment names, and that nobody serves, is asked for nothing."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    registry = CollectorRegistry()
    Counter("served", "requests", registry=registry).inc(3)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    target = {"url": f"http://127.0.0.1:{server.server_port}/metrics", "name": "engine", "interval_s": 0.2}
    configure(place, scrape=[target], metrics_interval_s=0.2)
    try:
        code, _, err = place.run("slow")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (code, err) == (0, "")
    [run] = place.query("SELECT run_id FROM runs")
    names = {row["name"] for row in place.query("SELECT DISTINCT name FROM otel_metrics WHERE run_id IS NOT NULL")}
    assert {"process.memory.usage", "system.cpu.utilization", "served_total", "up"} <= names
    [scraped] = place.query("SELECT run_id, target, last_success IS NOT NULL AS seen FROM scrape_targets")
    assert scraped == {"run_id": run["run_id"], "target": "engine", "seen": True}
    assert place.query("SELECT sum(missing) AS n FROM health WHERE run_id IS NOT NULL") == [{"n": 0}]


def test_a_run_can_train_without_a_record(place: Place) -> None:  # noqa: F811
    """telemetry.enabled=false trains as ever, starts no collector and makes no store."""
    configure(place, enabled=False)
    code, out, err = place.run("finish")
    assert (code, err) == (0, "")
    assert "telemetry  off" in out
    assert not place.store.exists()


def test_settings_of_a_record_that_is_off_are_refused(place: Place) -> None:  # noqa: F811
    """An option that would do nothing is an error; defaults, as in a resolved config, are fine."""
    configure(place, enabled=False)
    resolved = parse(yaml.safe_load(place.config.read_text())).model_dump(mode="json")
    assert not parse(resolved).telemetry.enabled
    with pytest.raises(ConfigError, match="remove text"):
        parse(resolved | {"telemetry": resolved["telemetry"] | {"text": "redacted"}})
