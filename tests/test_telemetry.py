"""The telemetry API: links between spans, what an event carries, what may leave, and that emitting is harmless."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from rlinsight import exporter, names, telemetry
from tests.scripted_collector import Collector, attributes, running

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
    assert telemetry.shutdown(5)
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
    assert telemetry.shutdown(5)
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
    assert telemetry.shutdown(5)
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
    assert telemetry.shutdown(5)
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
    assert telemetry.shutdown(5)
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
    assert telemetry.flush(5)
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert telemetry.shutdown(5)
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
    assert telemetry.shutdown(5)
    assert all(secret.encode() in collector.raw for secret in (*SECRETS, "SECRETID", "LOGPROBS"))
    with running(Collector()) as other:
        start(other, tmp_path / "texts", token_arrays=False)
        emit_secrets()
        assert telemetry.shutdown(5)
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
        began = time.monotonic()
        for _ in range(300):
            telemetry.event("big", {"blob": blob})
        assert time.monotonic() - began < 3
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
    assert telemetry.shutdown(5)
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
    assert telemetry.shutdown(10)
    assert fired > 20
    assert (len(collector.events("from-handler")), len(collector.events("from-loop"))) == (fired, emitted)


def test_a_forked_child_is_silent_until_it_sets_up_itself(collector: Collector, tmp_path: Path) -> None:
    """A fork inside a span duplicates nothing; the child may record under its own producer."""
    start(collector, tmp_path)
    with telemetry.span("parent"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert not telemetry.is_enabled()
                telemetry.event("lost", {})
                telemetry.setup("child", spool_dir=tmp_path, run_id="run-1", attempt=1, endpoint=collector.url)
                telemetry.event("from-child", {})
                assert telemetry.shutdown(5)
                code = 0
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry.shutdown(5)
    assert [span.name for span in collector.spans()] == ["parent"]
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
    assert telemetry.shutdown(10)
    health = attributes(collector.events(names.PRODUCER_HEALTH)[-1].attributes)
    assert health[names.EMITTED] == len(collector.spans()) + len(collector.events())
    assert health[names.SENT] == health[names.EMITTED] - 1  # the report itself was still on its way
    assert sum(value for name, value in health.items() if ".dropped" in name) == 0
    assert health[names.OVERHEAD_NS] > 0
    assert list(tmp_path.iterdir()) == []
