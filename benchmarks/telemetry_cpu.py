"""CPU seconds that telemetry takes beside a run: the collector process, and the threads of each producer.

    python benchmarks/telemetry_cpu.py [--seconds 30] [--metrics-s 5]

Emits what the quickstart does, a step every 7 s: 64 rollouts with texts and token arrays, their rewards, 60 step
metrics, system metrics of each process, from three processes as a run has them, into a collector as a run starts it.
Nothing else is measured: on a machine that is busy CPU seconds say more than the time anything took. They are the
kernel's own, of each thread to the nanosecond. Then the same time with nothing to do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from collectors.server import start_process
from rlinsight import names, store, telemetry

STEP_S = 7.0
ROLLOUTS, TOKENS, METRICS = 64, 24, 60
THREADS = {
    "rlinsight-telemetry-writer": "encode, write",
    "rlinsight-telemetry-sender": "send",
    "rlinsight-metrics": "metrics",
}
ROLES = ("controller", "policy", "reward")


def emit(role: str, step: int) -> None:
    """What a worker of this role emits in a step."""
    with telemetry.step_context(step), telemetry.span(names.STEP, root=True, announce=True):
        for phase in ("sample", "train", "sync"):
            with telemetry.span(names.TRAIN, {names.PHASE: phase, names.BUCKET: "productive"}, announce=True):
                pass
        if role == "controller":
            for index in range(METRICS):
                telemetry.event(
                    names.STEP_METRIC,
                    {names.METRIC_NAME: f"metric.{index}", names.METRIC_VALUE: index / 7, names.METRIC_AGG: "mean"},
                )
            return
        for index in range(ROLLOUTS):
            who = {names.ROLLOUT_ID: f"r-{step:06d}-{index:04d}", names.GROUP_ID: f"g-{step}-{index // 8}"}
            now = time.time_ns()
            if role == "reward":
                telemetry.event(names.REWARD_COMPONENT, {**who, names.COMPONENT: "numeric", names.COMPONENT_VALUE: 1.0})
                telemetry.event(names.ROLLOUT_SCORED, {**who, names.REWARD_VALUE: 1.0, names.STATUS: "completed"})
                continue
            numbers = np.random.rand(4, TOKENS).astype("<f4")
            ids = np.arange(TOKENS, dtype="<i4").tobytes()
            carrier = telemetry.new_carrier()
            for turn in range(2):
                telemetry.record_span("chat", now, now + 10**6, {**who, names.TURN_INDEX: turn}, carrier=carrier)
            telemetry.record_span(names.ROLLOUT, now, now + 10**6, {**who, names.NUM_TOKENS: TOKENS}, identity=carrier)
            content = {names.RESPONSE_TEXT: "the answer is 7 " * 6, names.PROMPT_TOKEN_IDS: ids, names.TOKEN_IDS: ids}
            content |= {names.TOKEN_PIECES: [" seven"] * TOKENS, names.ROLLOUT_LOG_PROBS: numbers[0].tobytes()}
            telemetry.event(names.TURN_CONTENT, {**who, names.TURN_INDEX: 0, **content}, carrier=carrier)
            trained = {names.OLD_LOG_PROBS_ARRAY: numbers[1].tobytes(), names.LOG_PROBS_ARRAY: numbers[2].tobytes()}
            trained |= {names.ENTROPY_ARRAY: numbers[3].tobytes(), names.ADVANTAGE: 0.25}
            telemetry.event(names.ROLLOUT_TRAINED, {**who, **trained}, carrier=carrier)


def cpu_of_threads() -> dict[str, float]:
    """Seconds of this process's telemetry threads so far."""
    spent = {}
    for thread in threading.enumerate():
        if thread.name in THREADS:
            spent[THREADS[thread.name]] = (
                int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
            )
    return spent


def produce(role: str, spool: Path, endpoint: str, seconds: float, metrics_s: float) -> None:
    """One process of the run; prints seconds by thread and inside emit calls."""
    telemetry.setup(
        role, spool_dir=spool, run_id="b", attempt=1, endpoint=endpoint, system=True, token_decimals=5,
        metrics_interval_s=metrics_s,
    )  # fmt: skip
    emit(role, 0)
    time.sleep(3)
    before, began, emitting = cpu_of_threads(), time.monotonic(), 0
    step = 1
    while time.monotonic() - began < seconds:
        start = time.thread_time_ns()
        emit(role, step)
        emitting += time.thread_time_ns() - start
        step += 1
        time.sleep(max(began + (step - 1) * STEP_S - time.monotonic(), 0))
    time.sleep(3)
    spent = {name: value - before[name] for name, value in cpu_of_threads().items()} | {"emit": emitting / 1e9}
    print(*(f"{name}={value:.4f}" for name, value in spent.items()), f"steps={step - 1}", sep=";")
    telemetry.shutdown(20)


def main() -> None:
    """Run the producers beside a collector and print a line per process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=28.0)
    parser.add_argument("--metrics-s", type=float, default=5.0, help="telemetry.metrics_interval_s")
    parser.add_argument("--produce", nargs=3, metavar=("ROLE", "SPOOL", "ENDPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        role, spool, endpoint = options.produce
        produce(role, Path(spool), endpoint, options.seconds, options.metrics_s)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.duckdb"
        endpoint = start_process(path, os.getpid())
        collector = psutil.Process(endpoint.pid)
        time.sleep(2)
        idle = sum(collector.cpu_times()[:2])
        time.sleep(options.seconds)
        idle = sum(collector.cpu_times()[:2]) - idle
        rest = ["--seconds", str(options.seconds), "--metrics-s", str(options.metrics_s)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--produce", role, str(Path(folder) / "spool"), endpoint.http, *rest],
                stdout=subprocess.PIPE, text=True,
            )
            for role in ROLES
        ]  # fmt: skip
        time.sleep(6)
        before, began = sum(collector.cpu_times()[:2]), time.monotonic()
        answers = [process.communicate()[0].strip() for process in processes]
        busy = (sum(collector.cpu_times()[:2]) - before) * STEP_S / (time.monotonic() - began)
        sql = "SELECT count(*) AS batches, count(DISTINCT committed_ns) AS commits FROM ingest_batches"
        print(store.query(sql, store=path).to_pylist()[0])
        print(f"collector: {busy:.3f} s per step of {STEP_S:g} s; idle {idle / options.seconds:.2%} of a processor")
        for role, answer in zip(ROLES, answers, strict=True):
            print(f"{role}: {answer}")
        collector.terminate()


if __name__ == "__main__":
    main()
