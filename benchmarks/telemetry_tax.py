"""Telemetry's share of a step's time: whole runs with everything on and with telemetry off, in alternation.

    python benchmarks/telemetry_tax.py [--pairs 8] [--steps 12] [--config configs/quickstart.yaml] [--output FILE.md]

On is everything at once, each at the pace a run has by default: text in full, token arrays, metrics, system metrics,
and two endpoints scraped. Off is ``telemetry.enabled=false``. Both arms train the same steps from the same seed;
which of a pair goes first alternates, so that a machine that warms up or slows down favours neither. The step times
are those of the trainer's own progress report; the first two steps of a run warm up and are left out. Both arms sample
the same tokens, so each step is compared with the same step of the other arm, whose work is the same: the ratio of a
pair is the median of its steps' ratios, with a bootstrap interval over pairs.

That ratio needs a machine with nothing else to do. What telemetry can cost at most is told by processor time, which
others disturb little: the time inside emit calls, which telemetry measures itself, and what its own threads and the
collector used. Those run under the scheduler's idle policy and are counted by it, from the end of the warm-up to the
end of the last step. If training lost all of that, steps would be longer by the bound: processor time over the
processors' time in those steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from rlinsight import store

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2  # steps
TABLES = ("otel_spans", "otel_logs", "otel_metrics")
TRAIN = """
import json, os, sys
from pathlib import Path
import psutil
from rich.console import Console
from core_trainer import controller
from rlinsight import launch
from rlinsight.config import load

config, steps = load(Path(sys.argv[1]), sys.argv[3:]), []

def idle_policy_s():
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            for thread in process.threads():
                if os.sched_getscheduler(thread.id) == os.SCHED_IDLE:
                    total += thread.user_time + thread.system_time
        except (psutil.Error, OSError):  # it has just ended
            continue
    return total

def timed(config, job, reporter):
    told = reporter.step
    def step(report):
        steps.append((report.seconds, idle_policy_s()))
        told(report)
    reporter.step = step
    return controller.run(config, job, reporter)

code = launch.train(config, Console(stderr=True), controller=timed).exit_code
Path(sys.argv[2]).write_text(json.dumps(steps))
sys.exit(code)
"""
EMITTING = "SELECT coalesce(sum(overhead_s), 0) AS s, count(*) AS n FROM health WHERE run_id IS NOT NULL"


def main() -> None:
    """Run the pairs and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="of each run; the first two are left out")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--output", type=Path, help="markdown file; printed in any case")
    parser.add_argument("overrides", nargs="*", help="further section.key=value of both arms")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are left out; ask for more")
    with tempfile.TemporaryDirectory() as folder:
        urls = [serve() for _ in range(2)]
        pairs, costs = [], []
        for index in range(options.pairs):
            arms = {}
            for arm in ("on", "off") if index % 2 == 0 else ("off", "on"):
                place = Path(folder) / f"{index}-{arm}"
                arms[arm], used = train(options, place, settings(arm, place, urls))
                print(f"pair {index + 1} {arm}:", *(f"{s:.3f}" for s in arms[arm]), "s", file=sys.stderr)
                if arm == "on":
                    costs.append(spent(place) | {"threads_s": used})
            pairs.append((arms["on"], arms["off"]))
    text = report(pairs, costs, options)
    if options.output:
        options.output.write_text(text)
    print(text)


def serve() -> str:
    """An endpoint like that of an engine: 40 counters and 10 histograms. Returns its URL."""
    registry = CollectorRegistry()
    for index in range(40):
        Counter(f"counter_{index}", "a counter", ["engine"], registry=registry).labels("0").inc(index)
    for index in range(10):
        Histogram(f"histogram_{index}", "a histogram", registry=registry).observe(index)
    server, _ = start_http_server(0, "127.0.0.1", registry)
    return f"http://127.0.0.1:{server.server_port}/metrics"


def settings(arm: str, place: Path, urls: list[str]) -> list[str]:
    """Overrides of one arm."""
    if arm == "off":
        return [f"telemetry.store={place / 'store.duckdb'}", "telemetry.enabled=false"]
    targets = [{"name": f"engine-{index}", "url": url} for index, url in enumerate(urls)]
    return [
        f"telemetry.store={place / 'store.duckdb'}",
        "telemetry.text=full",
        "telemetry.token_arrays=true",
        "telemetry.system_metrics=true",
        f"telemetry.scrape={json.dumps(targets)}",
    ]


def train(options: argparse.Namespace, place: Path, overrides: list[str]) -> tuple[list[float], float]:
    """One run in a process of its own; seconds of its steps after the warm-up, and of telemetry's threads in them."""
    place.mkdir()
    common = [f"run.dir={place / 'runs'}", f"trainer.total_steps={options.steps}", *options.overrides]
    subprocess.run(
        [sys.executable, "-c", TRAIN, str(options.config), str(place / "seconds.json"), *common, *overrides],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    steps, used = zip(*json.loads((place / "seconds.json").read_text()), strict=True)
    return list(steps[WARM_UP:]), used[-1] - used[WARM_UP - 1]


def spent(place: Path) -> dict[str, Any]:
    """Seconds inside emit calls, of how many processes, and what was recorded, of one run."""
    path = place / "store.duckdb"
    (row,) = store.query(EMITTING, store=path).to_pylist()
    counts = ", ".join(f"(SELECT count(*) FROM {table}) AS {table}" for table in TABLES)
    (size,) = store.query(f"SELECT {counts}", store=path).to_pylist()
    return row | size


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """95% bootstrap interval of the median ratio over pairs."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def report(pairs: list[tuple[list[float], list[float]]], costs: list[dict[str, Any]], options: Any) -> str:
    """Markdown: the machine, the command, the bound by processor time, the ratio, one row per pair."""
    ratios = [statistics.median(a / b for a, b in zip(on, off, strict=True)) for on, off in pairs]
    ratio = statistics.median(ratios)
    low, high = interval(ratios)
    seconds = statistics.mean(sum(on) for on, _ in pairs)
    # Emit calls are counted over the whole run, start-up and warm-up included, so their share is rather too large.
    inside, threads = (statistics.mean(row[name] for row in costs) for name in ("s", "threads_s"))
    cores = len(os.sched_getaffinity(0))
    bound = (inside + threads) / (cores * seconds)
    spans, records, points = (round(statistics.mean(row[table] for row in costs)) for table in TABLES)
    machine = f"{platform.processor() or platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}"
    lines = [
        "# Telemetry tax",
        "",
        f"    python benchmarks/telemetry_tax.py --pairs {options.pairs} --steps {options.steps}",
        "",
        f"`{options.config.name}` on {machine}, {time.strftime('%Y-%m-%d')}. Everything on against telemetry off, "
        f"{options.pairs} alternating pairs, {options.steps - WARM_UP} steps each.",
        "",
        f"At most {bound:.2%} of a step: {inside:.2f} s inside emit calls of {costs[0]['n']} processes, and "
        f"{threads:.2f} s of processor time of telemetry's own threads and the collector, which run when a processor "
        f"has nothing else to do, in {seconds:.0f} s of steps on {cores} cores. The run stored {spans} spans, "
        f"{records} log records and {points} metric points.",
        "",
        f"Step time with everything on over step time without: {ratio:.4f} (95% interval {low:.4f} to {high:.4f}).",
        "",
        "| pair | on, median s | off, median s | median ratio of a step |",
        "|---|---|---|---|",
        *(
            f"| {i} | {statistics.median(on):.4f} | {statistics.median(off):.4f} | {step:.4f} |"
            for i, ((on, off), step) in enumerate(zip(pairs, ratios, strict=True), start=1)
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
