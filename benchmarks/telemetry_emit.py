"""What telemetry costs the training thread: p50 and p99 of span(), event() and measurements, everything on.

    python benchmarks/telemetry_emit.py [--seconds 5] [--endpoint http://127.0.0.1:PORT] [--output FILE.md]

Everything on: step context, a parent span, a start record for the announced span, text, four arrays of 512 tokens,
fsynced spool. With ``--endpoint`` a collector takes the data at the same time. Emits at the rate of a busy run rather
than in a closed loop, where the background threads would compete for the interpreter lock all the time; that case is
shown too.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from opentelemetry import metrics

from rlinsight import names, telemetry

TOKENS = 512
LABELS = {"engine": "policy/0", "outcome": "ok"}
SPAN = {names.PHASE: "train", names.BUCKET: "productive", names.NUM_TOKENS: 4096, names.BATCH_SIZE: 64}


def event_attributes() -> dict[str, telemetry.AttributeValue]:
    """A consumed turn: identity, its reward and four arrays."""
    arrays = (names.TOKEN_IDS, names.ROLLOUT_LOG_PROBS, names.OLD_LOG_PROBS_ARRAY, names.LOG_PROBS_ARRAY)
    return {
        names.ROLLOUT_ID: "r-000001-0003",
        names.TURN_INDEX: 0,
        names.POLICY_VERSION: 12,
        names.ADVANTAGE: 0.25,
        names.RESPONSE_TEXT: "the answer is 7 " * 64,
        **{name: np.arange(TOKENS, dtype="<f4").tobytes() for name in arrays},
    }


def one_span() -> None:
    """Start and end, with attributes at both."""
    with telemetry.span(names.TRAIN, SPAN) as span:
        span.set({names.SKIPPED: "no"})


def one_announced_span() -> None:
    """A span and its start record."""
    with telemetry.span(names.TRAIN, SPAN, announce=True):
        pass


def measure(call: Callable[[], None], seconds: float, pause_s: float) -> list[int]:
    """Nanoseconds of each call over ``seconds``, ``pause_s`` apart."""
    taken = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - began)
        if pause_s:
            time.sleep(pause_s)
    return taken


def main() -> None:
    """Measure each call at each rate and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each of the ten measurements")
    parser.add_argument("--endpoint", help="collector base URL; only spools when absent")
    parser.add_argument("--output", type=Path, help="markdown file; printed in any case")
    options = parser.parse_args()
    event = event_attributes()
    meter = metrics.get_meter("benchmark")
    counter, histogram = meter.create_counter("calls"), meter.create_histogram("latency", "s")
    calls = {
        "span": one_span,
        "span, announced": one_announced_span,
        f"event, 4 x {TOKENS} tokens": lambda: telemetry.event(names.ROLLOUT_TRAINED, event),
        "counter, 2 labels": lambda: counter.add(1, LABELS),
        "histogram, 2 labels": lambda: histogram.record(0.25, LABELS),
    }
    rows = []
    for pause_s, rate in ((0.001, "about 900/s"), (0.0, "closed loop")):
        for label, call in calls.items():
            with tempfile.TemporaryDirectory() as folder:
                telemetry.setup(
                    "controller", spool_dir=Path(folder), run_id="b", attempt=1, endpoint=options.endpoint, system=True
                )
                with telemetry.step_context(1), telemetry.span(names.STEP, root=True):
                    taken = measure(call, options.seconds, pause_s)
                telemetry.shutdown(10 if options.endpoint else 0)
            cuts = [each / 1e3 for each in statistics.quantiles(taken, n=100)]
            mean = statistics.mean(taken) / 1e3
            rows.append(f"| {label} | {rate} | {len(taken):,} | {cuts[49]:.1f} | {cuts[98]:.1f} | {mean:.1f} |")
            print(rows[-1], file=sys.stderr)
    text = report(rows, options)
    if options.output:
        options.output.write_text(text)
    print(text)


def report(rows: list[str], options: argparse.Namespace) -> str:
    """Markdown: the command, the machine, a row per call and rate."""
    endpoint = " --endpoint URL" if options.endpoint else ""
    machine = f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    receiver = (
        "A collector takes the data at the same time." if options.endpoint else "Without a collector: only spooled."
    )
    lines = [
        "# What telemetry costs the training thread",
        "",
        f"    python benchmarks/telemetry_emit.py --seconds {options.seconds:g}{endpoint}",
        "",
        f"{machine}, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}. Everything on. {receiver}",
        "",
        "| call | rate | n | p50, µs | p99, µs | mean, µs |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
