"""A secret in what is captured as text never leaves a process that does not capture texts, whatever carries it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import metrics, trace
from opentelemetry._logs import get_logger

from rlinsight import names, store, telemetry
from rlinsight.otlp import TEXT_KEYS, TEXT_PREFIXES, TextMode
from tests.collectors import live

SECRET = "swordfish-4711"
TRACER, LOGGER, METER = trace.get_tracer("a-library"), get_logger("a-library"), metrics.get_meter("a-library")
COUNTER, HISTOGRAM = METER.create_counter("calls"), METER.create_histogram("seconds")
ENDINGS = {key: f"{key.rstrip('.')}.0.message.content" for key in TEXT_PREFIXES}
KEYS = st.sampled_from(sorted(TEXT_KEYS | set(ENDINGS.values())))
# What libraries make of a text: the text, part of one, JSON, lists, messages, bytes.
VALUES = st.sampled_from(
    [
        SECRET,
        f"before {SECRET} after",
        json.dumps([{"role": "user", "content": SECRET}]),
        [SECRET, "and more"],
        [{"role": "user", "content": SECRET}],
        {"parts": [{"text": SECRET}]},
        SECRET.encode(),
        SECRET * 1000,
    ]
)


def in_span(key: str, value: Any) -> None:
    TRACER.start_span("theirs", attributes={key: value}).end()


def in_our_span(key: str, value: Any) -> None:
    with telemetry.span("ours", {key: value}, announce=True) as span:
        span.set({key: value})


def in_span_event(key: str, value: Any) -> None:
    with TRACER.start_as_current_span("theirs") as span:
        span.add_event("message", {key: value})


def in_link(key: str, value: Any) -> None:
    with TRACER.start_as_current_span("theirs") as span:
        link = trace.Link(span.get_span_context(), {key: value})
        TRACER.start_span("linked", links=[link]).end()


def in_our_event(key: str, value: Any) -> None:
    telemetry.event(names.GROUP, {key: value})


def in_log(key: str, value: Any) -> None:
    LOGGER.emit(event_name="message", attributes={key: value})


def inside_an_attribute(key: str, value: Any) -> None:
    LOGGER.emit(event_name="message", attributes={"payload": {"request": [{key: value}]}})


def in_body(key: str, value: Any) -> None:
    LOGGER.emit(event_name="message", body={key: value})


def in_metric(key: str, value: Any) -> None:
    with telemetry.span("measured"):
        COUNTER.add(1, {key: value})
        HISTOGRAM.record(1, {key: value})


def in_exception(key: str, value: Any) -> None:
    with contextlib.suppress(ValueError), TRACER.start_as_current_span("theirs"), telemetry.span("ours"):
        raise ValueError(f"cannot use {key}: {value}")


def in_status(key: str, value: Any) -> None:
    with TRACER.start_as_current_span("theirs") as span:
        span.set_status(trace.StatusCode.ERROR, f"cannot use {value}")


def in_reason(key: str, value: Any) -> None:
    telemetry.event(names.RUN_END, {names.REASON: f"stopped at {value}"})
    telemetry.event(names.ROLLOUT_SCORED, {names.REASON: f"RewardError: cannot score {value}"})


PLACES: list[Callable[[str, Any], None]] = [
    in_span, in_our_span, in_span_event, in_link, in_our_event, in_log, inside_an_attribute, in_body, in_metric,
    in_exception, in_status, in_reason,
]  # fmt: skip


def spooled(folder: Path, text: TextMode, places: list[Callable[[str, Any], None]], key: str, value: Any) -> bytes:
    """What is on disk after the secret was put into these places; the spool holds requests as they are sent."""
    telemetry.setup("controller", spool_dir=folder, run_id="r", attempt=1, endpoint=None, text=text)
    for place in places:
        place(key, value)
    telemetry.shutdown(5)
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("text", ["redacted", "off"])
def test_no_secret_reaches_the_spool(text: TextMode, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any content key, any shape of value, in any part of any signal."""

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(key=KEYS, value=VALUES)
    def check(key: str, value: Any) -> None:
        assert SECRET.encode() not in spooled(tmp_path_factory.mktemp("spool"), text, PLACES, key, value)

    check()


@pytest.mark.parametrize("place", [place for place in PLACES if place is not in_metric])
def test_in_full_each_place_would_tell(place: Callable[[str, Any], None], tmp_path: Path) -> None:
    """Captured in full the secret is on disk from each of the places, so the test above can fail."""
    assert SECRET.encode() in spooled(tmp_path, "full", [place], "gen_ai.prompt", SECRET)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["redacted", "off", "full"])
def test_no_secret_reaches_the_store(text: TextMode, tmp_path: Path) -> None:
    """Neither the bytes of the DuckDB file nor any value in it holds the secret; in full it is there to be found."""
    path = tmp_path / "store.duckdb"
    with live.collector(path) as collector:
        endpoint = collector.endpoint.http
        telemetry.setup("controller", spool_dir=tmp_path / "spool", run_id="r", attempt=1, endpoint=endpoint, text=text)
        for place in PLACES:
            for key in ("input.value", "llm.input_messages.0.message.content", "gen_ai.prompt", names.PROMPT_TEXT):
                place(key, SECRET)
        assert telemetry.shutdown(20)
        assert collector.stop() == 0
    tables = store.query("SELECT table_name AS name FROM duckdb_tables() WHERE NOT internal", store=path).to_pylist()
    values = [store.query(f"SELECT t::VARCHAR AS text FROM {table['name']} t", store=path) for table in tables]
    told = SECRET in "".join(row["text"] for table in values for row in table.to_pylist())
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert told == (text == "full")
    assert text == "full" or SECRET.encode() not in stored
