"""The telemetry API: links between spans, what an event carries, what may leave, and that emitting is harmless."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry._logs import get_logger, get_logger_provider

from rlinsight import exporter, names, telemetry
from tests.scripted_collector import Collector, attributes, running

ROOT = Path(__file__).parents[1]
TraceFunction = Any  # typeshed's own type is private
SECRETS = ("swordfish-prompt", "swordfish-response", "swordfish-answer", "swordfish-seen", "swordfish-error", "swordf")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running(Collector()) as collector:
        yield collector


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    telemetry.shutdown(0.1)


def start(collector: Collector | None, spool: Path, **settings) -> None:
    endpoint = collector.url if collector else None
    telemetry.setup("controller", spool_dir=spool, run_id="run-1", attempt=1, endpoint=endpoint, **settings)


def test_without_setup_nothing_happens_and_nothing_fails() -> None:
    """Before setup every call is accepted and does nothing."""
    assert not telemetry.is_enabled()
    with telemetry.span(names.STEP, {names.STEP_INDEX: 1}, announce=True) as span:
        span.set({names.NUM_TOKENS: 3})
        telemetry.event(names.GROUP, {names.GROUP_ID: "g"})
        assert span.carrier() == telemetry.inject() == telemetry.new_carrier() == {}
    assert telemetry.record_span(names.ROLLOUT, 1, 2, {}) == {}
    assert telemetry.flush(0.1)
    assert telemetry.shutdown(0.1)


def test_spans_link_to_parents_roots_carriers_and_links(collector: Collector, tmp_path: Path) -> None:
    """A child has its parent's trace; a root has a trace of its own; carriers and links point across processes."""
    start(collector, tmp_path, resource={names.ALGORITHM: "grpo"})
    with telemetry.span("step", root=True) as step:
        with telemetry.span("phase"):
            call = telemetry.inject()
        reserved = telemetry.new_carrier()
        telemetry.record_span("chat", 10, 20, {}, carrier=reserved)
        done = telemetry.record_span("rollout", 5, 25, {}, identity=reserved, links=[step.carrier()])
    with telemetry.attach(call), telemetry.span("worker"):
        pass
    with telemetry.span("worker-2", carrier=call):
        pass
    assert done == reserved
    assert telemetry.shutdown(60)
    step, phase, rollout = collector.span("step"), collector.span("phase"), collector.span("rollout")
    assert phase.parent_span_id == step.span_id
    assert phase.trace_id == step.trace_id
    assert step.parent_span_id == rollout.parent_span_id == b""
    for name in ("worker", "worker-2"):
        assert collector.span(name).parent_span_id == phase.span_id
        assert collector.span(name).trace_id == step.trace_id
    assert collector.span("chat").parent_span_id == rollout.span_id
    assert collector.span("chat").trace_id == rollout.trace_id != step.trace_id
    assert reserved["traceparent"] == f"00-{rollout.trace_id.hex()}-{rollout.span_id.hex()}-01"
    assert (rollout.links[0].trace_id, rollout.links[0].span_id) == (step.trace_id, step.span_id)
    assert (rollout.start_time_unix_nano, rollout.end_time_unix_nano) == (5, 25)
    assert attributes(step.attributes)[names.LANE] == "controller/0"
    resource = collector.resource()
    assert resource[names.SERVICE_NAME] == "rlinsight.controller"
    assert (resource[names.RUN_ID], resource[names.ATTEMPT], resource[names.ALGORITHM]) == ("run-1", 1, "grpo")
    assert resource[names.SERVICE_INSTANCE_ID] == collector.requests[0].producer


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_exceptions_mark_the_span_and_go_on(kind: type[BaseException], collector: Collector, tmp_path: Path) -> None:
    """Any exception, Ctrl-C too, ends the span with status error and its message, and reaches the caller."""
    start(collector, tmp_path)
    with pytest.raises(kind), telemetry.span("broken"):
        raise kind("why")
    assert telemetry.inject() == {}
    assert telemetry.shutdown(60)
    status = collector.span("broken").status
    assert (status.code, status.message) == (2, f"{kind.__name__}: why")


def test_an_announced_span_is_visible_while_it_is_open(collector: Collector, tmp_path: Path) -> None:
    """The start record is delivered before the span ends, with its name, parent, phase and step."""
    start(collector, tmp_path)
    with telemetry.step_context(7), telemetry.span(names.STEP, root=True, announce=True) as step:
        with telemetry.span(names.TRAIN, {names.PHASE: "train"}, announce=True) as train:
            deadline = time.monotonic() + 5
            while len(collector.events(names.SPAN_START)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            first, second = collector.events(names.SPAN_START)
            assert collector.spans() == []
            carrier = train.carrier()["traceparent"]
        parent = step.carrier()["traceparent"].split("-")[2]
    assert names.START_PARENT not in attributes(first.attributes)
    seen = attributes(second.attributes)
    assert carrier == f"00-{second.trace_id.hex()}-{second.span_id.hex()}-01"
    assert (seen[names.START_NAME], seen[names.START_PARENT]) == (names.TRAIN, parent)
    assert (seen[names.PHASE], seen[names.STEP_INDEX], seen[names.LANE]) == ("train", 7, "controller/0")
    assert telemetry.shutdown(60)
    assert collector.span(names.TRAIN).start_time_unix_nano == seen[names.START_NS]


def test_events_carry_every_value_exactly(collector: Collector, tmp_path: Path) -> None:
    """Bytes stay bytes, unknown is absent, numpy scalars are numbers, and what OTLP cannot hold is counted."""
    start(collector, tmp_path)
    ids = np.arange(512, dtype="<i4").tobytes()
    values = {
        names.TOKEN_IDS: ids,
        names.TOKEN_PIECES: ["a", "\ud800b"],
        names.ANSWER: None,
        names.ADVANTAGE: np.float32(0.5),
        names.POLICY_VERSION: np.int64(3),
        names.RESPONSE_TEXT: "lone \ud800 surrogate",
        "flag": True,
        "empty": [],
        "object": object(),
        "huge": 2**70,
        "array": np.zeros(3),
    }
    with telemetry.span("here") as here:
        telemetry.event(names.TURN_CONTENT, values, time_ns=123)
    telemetry.event(names.GROUP, {}, carrier=here.carrier())
    telemetry.event(names.RUN_END, {names.REASON: ValueError("no data")})
    assert telemetry.shutdown(60)
    (turn,), (group,), (end,) = (collector.events(n) for n in (names.TURN_CONTENT, names.GROUP, names.RUN_END))
    span = collector.span("here")
    assert (turn.trace_id, turn.span_id) == (group.trace_id, group.span_id) == (span.trace_id, span.span_id)
    assert (end.trace_id, end.span_id) == (b"", b"")
    assert turn.time_unix_nano == 123
    assert turn.dropped_attributes_count == 3
    assert attributes(turn.attributes) == {
        names.TOKEN_IDS: ids,
        names.TOKEN_PIECES: ["a", "?b"],
        names.ADVANTAGE: 0.5,
        names.POLICY_VERSION: 3,
        names.RESPONSE_TEXT: "lone ? surrogate",
        "flag": True,
        "empty": [],
    }
    assert attributes(end.attributes) == {names.REASON: "ValueError: no data"}


def test_the_step_reaches_every_thread_and_is_put_back(collector: Collector, tmp_path: Path) -> None:
    """Inside step_context every span and event of the process has the step, unless it states its own."""
    start(collector, tmp_path)
    with telemetry.step_context(1):
        with telemetry.step_context(2):
            thread = threading.Thread(target=lambda: telemetry.event("in-thread", {}))
            thread.start()
            thread.join()
            telemetry.event("own", {names.STEP_INDEX: 9})
        with telemetry.span("outer"):
            pass
    telemetry.event("after", {})
    assert telemetry.shutdown(60)
    steps = {event.event_name: attributes(event.attributes).get(names.STEP_INDEX) for event in collector.events()}
    assert (steps["in-thread"], steps["own"], steps["after"]) == (2, 9, None)
    assert attributes(collector.span("outer").attributes)[names.STEP_INDEX] == 1


def emit_secrets() -> None:
    prompt, response, answer, seen, error, piece = SECRETS
    arrays = {names.PROMPT_TOKEN_IDS: b"SECRETID", names.TOKEN_IDS: b"SECRETID", names.TOKEN_PIECES: [piece, "ish"]}
    failing = telemetry.span("failing", {names.PROMPT_TEXT: prompt}, announce=True)
    with contextlib.suppress(ValueError), failing:
        telemetry.event(names.TURN_CONTENT, {names.PROMPT_TEXT: prompt, names.RESPONSE_TEXT: response, **arrays})
        telemetry.event(names.GROUP, {names.ANSWER: answer, names.PROMPT_TEXT: prompt})
        telemetry.event(names.REWARD_COMPONENT, {names.COMPONENT_EXPLANATION: seen, names.COMPONENT: "exact"})
        telemetry.event(names.ROLLOUT_SCORED, {names.REASON: f"RewardError: cannot score {response}"})
        telemetry.event(names.RUN_END, {names.REASON: f"stopped at {prompt}"})
        telemetry.event(names.RUN_END, {names.REASON: ValueError(error)})
        telemetry.event(names.ROLLOUT_TRAINED, {names.LOG_PROBS_ARRAY: b"LOGPROBS"})
        raise ValueError(f"bad rollout: {error}")


@pytest.mark.parametrize("text", ["redacted", "off"])
def test_no_text_leaves_unless_captured_in_full(text, collector: Collector, tmp_path: Path) -> None:
    """Secrets in prompts, responses, answers, explanations, token ids and exceptions never leave, on wire or disk."""
    start(collector, tmp_path, text=text)
    emit_secrets()
    assert telemetry.flush(60)
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert telemetry.shutdown(60)
    for secret in (*SECRETS, "SECRETID"):
        assert secret.encode() not in collector.raw
        assert secret.encode() not in on_disk
    assert b"LOGPROBS" in collector.raw
    assert b"LOGPROBS" in on_disk
    assert collector.span("failing").status.message == "ValueError"
    (scored,), ends = collector.events(names.ROLLOUT_SCORED), collector.events(names.RUN_END)
    assert attributes(scored.attributes)[names.REASON] == "RewardError"
    assert attributes(ends[1].attributes)[names.REASON] == "ValueError"
    seen = attributes(collector.events(names.TURN_CONTENT)[0].attributes)
    if text == "off":
        assert seen == {}
        assert names.REASON not in attributes(ends[0].attributes)
    else:
        assert re.fullmatch(r"\[redacted len=16 sha256=[0-9a-f]{12}\]", seen[names.PROMPT_TEXT])
        assert set(seen) == {names.PROMPT_TEXT, names.RESPONSE_TEXT}


def test_full_capture_keeps_texts_and_can_leave_arrays_out(collector: Collector, tmp_path: Path) -> None:
    """Mode full carries every secret (so the test above can fail); token_arrays=False removes the arrays alone."""
    start(collector, tmp_path / "full")
    emit_secrets()
    assert telemetry.shutdown(60)
    assert all(secret.encode() in collector.raw for secret in (*SECRETS, "SECRETID", "LOGPROBS"))
    with running(Collector()) as other:
        start(other, tmp_path / "texts", token_arrays=False)
        emit_secrets()
        assert telemetry.shutdown(60)
        assert all(secret.encode() in other.raw for secret in SECRETS[:5])
        assert b"SECRETID" not in other.raw
        assert b"LOGPROBS" not in other.raw
        assert names.TOKEN_PIECES.encode() not in other.raw


def test_ids_neither_read_nor_repeat_the_training_seed(tmp_path: Path) -> None:
    """Equal global seeds give different ids, and emitting leaves the global generator where it was."""
    seen = set()
    for _ in range(2):
        random.seed(0)
        state = random.getstate()
        start(None, tmp_path)
        with telemetry.span("a") as span:
            seen.add(span.carrier()["traceparent"])
        telemetry.event("e", {})
        assert random.getstate() == state
    assert len(seen) == 2


def in_process(code: str, *arguments: str, **environment: str) -> str:
    """Run ``code`` in a process of its own; returns what it printed."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


SEEDED = """
import random, sys
from pathlib import Path
from opentelemetry import trace
from rlinsight import telemetry
random.seed(0)
telemetry.setup("policy", spool_dir=Path(sys.argv[1]), run_id="r", attempt=1, endpoint=None)
print(telemetry.new_carrier()["traceparent"])
print(trace.format_trace_id(trace.get_tracer("x").start_span("y").get_span_context().trace_id))
"""


def test_processes_seeded_alike_have_different_ids(tmp_path: Path) -> None:
    """Workers that seed the global generator equally share no trace id, in our spans or in a library's."""
    lines = [line for _ in range(2) for line in in_process(SEEDED, str(tmp_path)).splitlines()]
    assert len(set(lines)) == 4


def test_spans_of_other_libraries_belong_to_ours(collector: Collector, tmp_path: Path) -> None:
    """A span any library makes inside ours is its child, with lane, step, its events and scope; ours nest in it too."""
    tracer = trace.get_tracer("a-library", "1.2")
    start(collector, tmp_path, lane="policy/3")
    with telemetry.step_context(4), telemetry.span("ours"):
        with tracer.start_as_current_span("theirs", attributes={"k": "v"}) as span:
            span.add_event("something", {"detail": 1})
            with telemetry.span("inner"):
                pass
        trace.get_current_span().set_attribute("from-elsewhere", 5)
        get_logger("a-library").emit(event_name="their-event", body="a line")
    assert telemetry.shutdown(60)
    ours, theirs, inner = (collector.span(name) for name in ("ours", "theirs", "inner"))
    assert (theirs.trace_id, theirs.parent_span_id) == (ours.trace_id, ours.span_id)
    assert inner.parent_span_id == theirs.span_id
    assert attributes(theirs.attributes) == {"k": "v", names.LANE: "policy/3", names.STEP_INDEX: 4}
    assert [(event.name, attributes(event.attributes)) for event in theirs.events] == [("something", {"detail": 1})]
    assert attributes(ours.attributes)["from-elsewhere"] == 5
    (record,) = collector.events("their-event")
    assert (record.body.string_value, record.span_id) == ("a line", ours.span_id)
    assert attributes(record.attributes)[names.STEP_INDEX] == 4
    assert collector.scopes() == {"rlinsight", "a-library"}


def test_what_other_libraries_record_cannot_cost_a_batch(collector: Collector, tmp_path: Path) -> None:
    """A library's value that OTLP cannot hold is counted on its span; an unusable name costs that span alone."""
    start(collector, tmp_path)
    tracer = trace.get_tracer("careless")
    tracer.start_span("lone \ud800", attributes={"huge": 2**70, "text\ud800": "\ud800", "list": [1, None, 2]}).end()
    tracer.start_span(["no", "name"]).end()  # type: ignore[arg-type]
    for index in range(20):
        tracer.start_span(f"span {index}", attributes={f"key {n}": "x" * 5000 for n in range(200)}).end()
    assert not telemetry.shutdown(60)
    spans = collector.spans()
    assert [span.name for span in spans] == ["lone ?", *(f"span {index}" for index in range(20))]
    first = attributes(spans[0].attributes)
    assert (first["text?"], first["list"], spans[0].dropped_attributes_count) == ("?", [1, None, 2], 1)
    assert all(len(span.attributes) == 201 for span in spans[1:])
    health = attributes(collector.events(names.PRODUCER_HEALTH)[-1].attributes)
    assert health[names.DROPPED_FAULT] == 1


def emit_foreign_secrets() -> None:
    """Content as the GenAI conventions, old and new, and failing spans carry it."""
    prompt, response, answer, seen, error, _ = SECRETS
    tracer = trace.get_tracer("engine")
    content = {
        "gen_ai.prompt": prompt,
        "gen_ai.completion.0.content": response,
        "gen_ai.input.messages": f'[{{"role": "user", "content": "{prompt}"}}]',
        "gen_ai.output.messages": [response, seen],
        "gen_ai.system_instructions": answer,
        "gen_ai.usage.input_tokens": 7,
    }
    with contextlib.suppress(ValueError), tracer.start_as_current_span("foreign", attributes=content) as span:
        span.add_event("gen_ai.content.prompt", {"gen_ai.prompt": prompt})
        get_logger("engine").emit(event_name="gen_ai.user.message", body={"content": prompt})
        raise ValueError(f"bad: {error}")
    tracer.start_span("told").set_status(trace.StatusCode.ERROR, f"cannot answer {prompt}")
    with tracer.start_as_current_span("told") as span:
        span.set_status(trace.StatusCode.ERROR, f"cannot answer {prompt}")


@pytest.mark.parametrize("text", ["redacted", "off"])
def test_no_text_of_other_libraries_leaves_unless_captured_in_full(text, collector: Collector, tmp_path: Path) -> None:
    """Content attributes, exception events, status messages and log bodies of any library obey the text mode."""
    start(collector, tmp_path, text=text)
    emit_foreign_secrets()
    assert telemetry.shutdown(60)
    for secret in SECRETS[:5]:
        assert secret.encode() not in collector.raw
    foreign = collector.span("foreign")
    assert attributes(foreign.attributes)["gen_ai.usage.input_tokens"] == 7
    assert foreign.status.message == "ValueError"
    kinds = [attributes(event.attributes).get("exception.type") for event in foreign.events]
    assert kinds == [None, "ValueError"]


def test_full_capture_keeps_the_texts_of_other_libraries(collector: Collector, tmp_path: Path) -> None:
    """Mode full carries every secret of other libraries, so the test above can fail."""
    start(collector, tmp_path)
    emit_foreign_secrets()
    assert telemetry.shutdown(60)
    assert all(secret.encode() in collector.raw for secret in SECRETS[:5])


OFF = """
import sys
from pathlib import Path
from opentelemetry import trace
from rlinsight import telemetry
telemetry.setup("controller", spool_dir=Path(sys.argv[1]), run_id="run-1", attempt=1, endpoint=sys.argv[2])
with telemetry.span("ours", {f"key {n}": "x" * 100 for n in range(200)}):
    with trace.get_tracer("x").start_as_current_span("theirs", attributes={f"key {n}": "x" * 100 for n in range(200)}):
        telemetry.event("event", {f"key {n}": "x" * 100 for n in range(200)})
assert telemetry.shutdown(60)
"""


def test_environment_variables_cannot_silence_or_truncate(collector: Collector, tmp_path: Path) -> None:
    """OTEL_SDK_DISABLED, a sampler that is off and length and count limits change nothing of what is recorded."""
    limits = ("ATTRIBUTE", "SPAN_ATTRIBUTE", "LOGRECORD_ATTRIBUTE")
    environment = {f"OTEL_{name}_COUNT_LIMIT": "1" for name in limits}
    environment |= {f"OTEL_{name}_VALUE_LENGTH_LIMIT": "1" for name in limits}
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_SAMPLER": "always_off"}
    in_process(OFF, str(tmp_path), collector.url, **environment, **off)
    ours, theirs, (event,) = collector.span("ours"), collector.span("theirs"), collector.events("event")
    assert (theirs.parent_span_id, event.span_id) == (ours.span_id, theirs.span_id)
    for item in (ours, theirs, event):
        seen = attributes(item.attributes)
        assert all(seen[f"key {n}"] == "x" * 100 for n in range(200))


OTHER_PROVIDER = """
import sys
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from rlinsight import telemetry
trace.set_tracer_provider(TracerProvider())
telemetry.setup("controller", spool_dir=Path(sys.argv[1]), run_id="run-1", attempt=1, endpoint=sys.argv[2])
with telemetry.span("ours"), trace.get_tracer("x").start_as_current_span("theirs"):
    pass
assert telemetry.shutdown(60)
"""


def test_a_provider_set_by_the_program_feeds_us_too(collector: Collector, tmp_path: Path) -> None:
    """A program that made its own SDK provider global before setup keeps it, and its spans are recorded as well."""
    in_process(OTHER_PROVIDER, str(tmp_path), collector.url)
    assert collector.span("theirs").parent_span_id == collector.span("ours").span_id


def test_setup_again_starts_a_new_recording(collector: Collector, tmp_path: Path, caplog: Any) -> None:
    """After a second setup a tracer got before works on, as the new producer; a span still open then is nobody's."""
    start(collector, tmp_path, lane="first")
    tracer = trace.get_tracer("a-library")
    tracer.start_span("one").end()
    open_span = tracer.start_span("open")
    start(collector, tmp_path, lane="second")
    open_span.end()
    tracer.start_span("two").end()
    assert telemetry.shutdown(60)
    tracer.start_span("after").end()
    lanes = {span.name: attributes(span.attributes)[names.LANE] for span in collector.spans()}
    assert lanes == {"one": "first", "two": "second"}
    assert len({request.producer for request in collector.requests}) == 2
    assert caplog.text == ""


def test_spans_that_a_library_never_ends_are_forgotten_with_it(collector: Collector, tmp_path: Path) -> None:
    """What is kept of open spans is bounded by the spans that somebody still holds; those are sent when they end."""
    start(collector, tmp_path)
    recorder = telemetry._recorder
    assert recorder is not None
    tracer = trace.get_tracer("a-library")
    held = tracer.start_span("held")
    for _ in range(100):
        tracer.start_span("lost")
    assert len(recorder._open) == 1
    held.end()
    assert len(recorder._open) == 0
    assert telemetry.shutdown(60)
    assert [span.name for span in collector.spans()] == ["held"]


def test_shutting_the_global_provider_down_does_not_silence_us(collector: Collector, tmp_path: Path) -> None:
    """A library that flushes and shuts down the global providers ends no recording."""
    start(collector, tmp_path)
    for provider in (trace.get_tracer_provider(), get_logger_provider()):
        assert provider.force_flush()  # type: ignore[attr-defined]
        provider.shutdown()  # type: ignore[attr-defined]
    with telemetry.span("after"):
        telemetry.event("after", {})
    assert telemetry.shutdown(60)
    assert collector.span("after").span_id == collector.events("after")[0].span_id


def test_an_unusable_spool_is_a_warning_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A spool directory that cannot be made never fails training; every item counts as dropped."""
    (tmp_path / "file").write_text("in the way")
    start(None, tmp_path / "file")
    assert "set one that is writable" in caplog.text
    with telemetry.span("a"):
        telemetry.event("e", {})
    assert not telemetry.flush(5)
    recorder = telemetry._recorder
    assert recorder is not None
    assert recorder.exporter.counts.dropped_disk == recorder.exporter.counts.emitted == 2
    assert not telemetry.shutdown(1)


def test_a_bad_call_is_counted_and_not_raised(
    collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is no string, attributes that are no mapping or a broken carrier do not reach the training code."""
    start(collector, tmp_path)
    telemetry.event(3, {})  # type: ignore[arg-type]
    telemetry.event("e", 5)  # type: ignore[arg-type]
    with telemetry.span(None, {}):  # type: ignore[arg-type]
        pass
    with telemetry.span("fine", carrier={"traceparent": "nonsense"}, links=[{"traceparent": ""}]):
        pass
    telemetry.shutdown(5)
    assert caplog.text.count("could not be built") == 1
    assert [span.name for span in collector.spans()] == ["", "fine"]
    health = attributes(collector.events(names.PRODUCER_HEALTH)[-1].attributes)
    assert health[names.DROPPED_FAULT] == 2


def test_a_hung_disk_costs_bounded_memory_and_no_time(tmp_path: Path) -> None:
    """While the writer hangs, emitting stays fast and the queue's cap drops the rest, counted."""
    start(None, tmp_path)
    recorder = telemetry._recorder
    assert recorder is not None
    segments = recorder.exporter._segments
    assert segments is not None
    blob = b"x" * 1024**2
    with segments._changed:  # every commit waits for this lock
        telemetry.event("first", {})
        time.sleep(0.3)
        took = []
        for _ in range(300):
            began = time.perf_counter()
            telemetry.event("big", {"blob": blob})
            took.append(time.perf_counter() - began)
        assert sorted(took)[150] < 0.01  # the median: a busy machine delays some
        assert recorder.exporter._bytes <= exporter.QUEUE_BYTES
        assert recorder.exporter.counts.dropped_queue >= 300 - exporter.QUEUE_BYTES // len(blob)


def test_emitting_may_interrupt_emitting(collector: Collector, tmp_path: Path) -> None:
    """An emit call at any line of another one, as a finalizer or signal handler makes it, neither hangs nor is lost."""
    start(collector, tmp_path)
    interruptions = 0

    def interrupt(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal interruptions
        if event == "line":
            interruptions += 1
            telemetry.event("inner", {})
        return interrupt

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        return interrupt if frame.f_code.co_filename == exporter.__file__ else None

    def emit() -> None:
        sys.settrace(trace)
        telemetry.event("outer", {})
        sys.settrace(None)

    thread = threading.Thread(target=emit, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert telemetry.shutdown(60)
    assert (len(collector.events("outer")), len(collector.events("inner"))) == (1, interruptions)
    assert interruptions > 5


def test_a_signal_handler_may_emit(collector: Collector, tmp_path: Path) -> None:
    """Emitting from a signal handler that interrupts an emit call neither deadlocks nor loses an item."""
    start(collector, tmp_path)
    fired = 0

    def handler(*_: object) -> None:
        nonlocal fired
        fired += 1
        telemetry.event("from-handler", {})

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        began, emitted = time.monotonic(), 0
        while time.monotonic() - began < 0.5:
            telemetry.event("from-loop", {})
            emitted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert telemetry.shutdown(60)
    assert fired > 20
    assert (len(collector.events("from-handler")), len(collector.events("from-loop"))) == (fired, emitted)


def test_a_forked_child_is_silent_until_it_sets_up_itself(collector: Collector, tmp_path: Path) -> None:
    """A fork inside a span duplicates nothing; the child may record under its own producer."""
    start(collector, tmp_path)
    with telemetry.span("parent"), trace.get_tracer("a-library").start_as_current_span("their parent"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert not telemetry.is_enabled()
                telemetry.event("lost", {})
                telemetry.setup("child", spool_dir=tmp_path, run_id="run-1", attempt=1, endpoint=collector.url)
                telemetry.event("from-child", {})
                trace.get_current_span().end()  # the parent's, as a library would
                assert telemetry.shutdown(60)
                code = 0
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry.shutdown(60)
    assert [span.name for span in collector.spans()] == ["their parent", "parent"]
    assert len(collector.events("from-child")) == 1
    assert collector.events("lost") == []
    assert len({request.producer for request in collector.requests}) == 2


def test_a_fork_waits_for_no_lock_of_its_parent(tmp_path: Path) -> None:
    """A child born while another thread is inside an emit call leaves its open span without hanging."""
    start(None, tmp_path)
    recorder = telemetry._recorder
    assert recorder is not None
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with recorder.exporter._lock:
            held.set()
            release.wait()

    with telemetry.span("parent"):
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # kills a child that hangs
        else:
            release.set()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_final_health_report_accounts_for_every_item(collector: Collector, tmp_path: Path) -> None:
    """After shutdown: emitted equals stored, nothing is dropped, and the cost of emitting was measured."""
    start(collector, tmp_path)
    for _ in range(700):
        with telemetry.span("a"):
            telemetry.event("e", {})
    assert telemetry.shutdown(60)
    health = attributes(collector.events(names.PRODUCER_HEALTH)[-1].attributes)
    assert health[names.EMITTED] == len(collector.spans()) + len(collector.events())
    assert health[names.SENT] == health[names.EMITTED] - 1  # the report itself was still on its way
    assert sum(value for name, value in health.items() if ".dropped" in name) == 0
    assert health[names.OVERHEAD_NS] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_shutdown_overtakes_counts_nowhere(collector: Collector, tmp_path: Path) -> None:
    """A thread still inside an emit call when the last report is made changes no count: shutdown is True and exact."""
    start(collector, tmp_path)
    recorder = telemetry._recorder
    assert recorder is not None
    inside, release = threading.Event(), threading.Event()

    class SlowScalar:
        def item(self) -> int:
            inside.set()
            release.wait(10)
            return 1

    slow: Any = SlowScalar()
    late = threading.Thread(target=lambda: telemetry.record_span("late", 1, 2, {"slow": slow}))
    late.start()
    assert inside.wait(5)
    telemetry.event("e", {})
    assert telemetry.shutdown(60)
    release.set()
    late.join()
    assert recorder.exporter.counts.emitted == recorder.exporter.counts.sent == len(collector.events())
    assert collector.spans() == []
