"""Telemetry's share of a step's time: one run, with everything on and with nothing recorded in alternating blocks.

    python benchmarks/telemetry_tax.py [--blocks 40] [--block-steps 4] [--config FILE.yaml] [--output FILE.md]

On is everything at once, each at the pace a run has by default: text in full, token arrays, metrics, system metrics,
and two endpoints scraped. Off is what ``telemetry.enabled=false`` makes of each call, switched in policy worker and
controller between two steps, with the collector stopped (SIGSTOP); reward workers and the threads that sample metrics
go on. Whole runs of one arm differ by more than what is to be measured, in all their steps
alike, so both arms are of one run. The first step of a block, in which the other arm still has an effect, is left out,
and so are the steps in which the policy learns to answer shortly. Steps differ in the tokens they sample: the effect
is that of a linear model of a step's seconds by arm, mean response length and position, with a bootstrap interval over
neighbouring blocks.

What telemetry can cost at most is told by processor time: that inside emit calls, which telemetry measures itself, and
what its own threads and the collector used. Those run under the scheduler's idle policy and are counted by it. If
training lost all of that, steps would be longer by the bound: processor time over the processors' time in the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from rich.console import Console

from core_trainer.algorithms import advantages
from core_trainer.algorithms.registry import advantage
from rlinsight import exporter, launch, names, store, telemetry
from rlinsight.config import load
from rlinsight.otlp import Item
from rlinsight.wire import Signal

ROOT = Path(__file__).resolve().parent.parent
OFF = "RLINSIGHT_BENCHMARK_OFF"  # in the environment: a file that is there while nothing is recorded
LEARNING = 12  # steps
TABLES = ("otel_spans", "otel_logs", "otel_metrics")


# In every process that records --------------------------------------------------------------------------------------


@advantage("grpo_switched")
def grpo_switched(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """GRPO's own: this file is a plugin so that the policy worker has the switch, and a plugin must have a part."""
    return advantages.grpo(rewards, groups)


class Switch:
    """Turns recording off and on again in this process when a step begins."""

    def __init__(self, off: Path) -> None:
        self._off, self._recorder = off, telemetry._recorder
        self._step_context, put = telemetry.step_context, exporter.Exporter.put

        def switched(self: exporter.Exporter, signal: Signal, item: Item) -> None:
            if telemetry._recorder is not None:
                put(self, signal, item)

        telemetry.step_context, exporter.Exporter.put = self._begin, switched

    def _begin(self, step: int | None) -> Any:
        self._recorder = telemetry._recorder or self._recorder
        telemetry._recorder = None if self._off.exists() else self._recorder
        return self._step_context(step)


if __name__ != "__main__" and OFF in os.environ:
    Switch(Path(os.environ[OFF]))


# The run ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One step."""

    step: int
    on: bool
    seconds: float
    length: float  # mean of its responses
    idle_s: float  # processor time under the idle policy so far


class Blocks:
    """A reporter that switches between two blocks and keeps what is measured."""

    def __init__(self, told: Any, off: Path, options: argparse.Namespace) -> None:
        self.rows = list[Row]()
        self._told, self._off, self._options = told, off, options

    def stage(self, text: str) -> None:
        """Passed on."""
        self._told.stage(text)

    def stop_requested(self) -> bool:
        """Passed on."""
        return self._told.stop_requested()

    def step(self, report: Any) -> None:
        """Keep the step, and switch if it is the last of its block."""
        length = report.metrics[names.M_LENGTH_MEAN]
        self.rows.append(Row(report.step, not self._off.exists(), report.seconds, length, idle_policy_s()))
        self._told.step(report)
        block = (report.step - LEARNING) // self._options.block_steps
        # After the last step as well: the collector takes what is left.
        on = report.step < LEARNING or block % 2 == 0 or report.step == report.total_steps
        if on == self._off.exists():
            self._off.unlink() if on else self._off.touch()
            for process in psutil.Process().children():
                if "collectors" in process.cmdline():
                    process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)


def idle_policy_s() -> float:
    """Processor time of all threads of this run under the idle policy."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            for thread in process.threads():
                if os.sched_getscheduler(thread.id) == os.SCHED_IDLE:
                    total += thread.user_time + thread.system_time
        except (psutil.Error, OSError):  # it has just ended
            continue
    return total


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=40, help="of each arm")
    parser.add_argument("--block-steps", type=int, default=4, help="the first of them is left out")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--output", type=Path, help="markdown file; printed in any case")
    parser.add_argument("overrides", nargs="*", help="further section.key=value")
    options = parser.parse_args()
    if options.block_steps < 2:
        parser.error(f"--block-steps {options.block_steps}: the first of a block is left out; ask for more")
    with tempfile.TemporaryDirectory() as folder:
        path, off = Path(folder) / "store.duckdb", Path(folder) / "off"
        os.environ[OFF] = str(off)
        targets = [{"name": f"engine-{index}", "url": serve()} for index in range(2)]
        overrides = [
            f"run.dir={folder}/runs", f"telemetry.store={path}", "telemetry.text=full", "telemetry.token_arrays=true",
            "telemetry.system_metrics=true", f"telemetry.scrape={json.dumps(targets)}",
            # It ends in a block with everything on, which delivers what is left.
            f"trainer.total_steps={LEARNING + (2 * options.blocks + 1) * options.block_steps}",
            f"algorithm.plugins=[{Path(__file__).resolve()}]", "algorithm.advantage.type=grpo_switched",
            *options.overrides,
        ]  # fmt: skip
        rows = train(options, overrides, off)
        spent = store.query(
            "SELECT (SELECT coalesce(sum(overhead_s), 0) FROM health WHERE run_id IS NOT NULL) AS emit_s, "
            + ", ".join(f"(SELECT count(*) FROM {table}) AS {table}" for table in TABLES),
            store=path,
        ).to_pylist()[0]
    text = report(rows, spent, options)
    if options.output:
        options.output.write_text(text)
    print(text)


def train(options: argparse.Namespace, overrides: list[str], off: Path) -> list[Row]:
    """The run's steps."""
    kept = list[Blocks]()

    def controller(config: Any, job: Any, reporter: Any) -> Any:
        from core_trainer import controller

        kept.append(Blocks(reporter, off, options))
        return controller.run(config, job, kept[0])

    code = launch.train(load(options.config, overrides), Console(stderr=True), controller=controller).exit_code
    if code:
        sys.exit(code)
    return kept[0].rows


def serve() -> str:
    """An endpoint like that of an engine: 40 counters and 10 histograms. Returns its URL."""
    registry = CollectorRegistry()
    for index in range(40):
        Counter(f"counter_{index}", "a counter", ["engine"], registry=registry).labels("0").inc(index)
    for index in range(10):
        Histogram(f"histogram_{index}", "a histogram", registry=registry).observe(index)
    server, _ = start_http_server(0, "127.0.0.1", registry)
    return f"http://127.0.0.1:{server.server_port}/metrics"


# What it says -------------------------------------------------------------------------------------------------------


def ratio(blocks: list[list[Row]]) -> float:
    """Seconds of a step with everything on over those of the same step without."""
    rows = [row for block in blocks for row in block]
    arm, length, step, seconds = np.array([(row.on, row.length, row.step, row.seconds) for row in rows], float).T
    columns = [np.ones(len(rows)), arm, length - length.mean(), step - step.mean()]
    (off, effect, *_), *_ = np.linalg.lstsq(np.stack(columns, axis=1), seconds, rcond=None)
    return 1 + effect / off


def report(rows: list[Row], spent: dict[str, Any], options: argparse.Namespace) -> str:
    """Markdown: the machine, the command, both figures."""
    size, cores = options.block_steps, len(os.sched_getaffinity(0))
    after = rows[LEARNING:]
    blocks = [after[i : i + size] for i in range(0, 2 * options.blocks * size, size)]
    kept = [block[1:] for block in blocks]
    pairs = [kept[i : i + 2] for i in range(0, len(kept), 2)]
    draw = np.random.default_rng(1)
    drawn = [[pairs[i] for i in draw.integers(len(pairs), size=len(pairs))] for _ in range(2000)]
    low, high = np.quantile([ratio([block for pair in some for block in pair]) for some in drawn], (0.025, 0.975))
    on_s = sum(row.seconds for row in rows if row.on)
    threads_s = rows[-1].idle_s - rows[0].idle_s
    bound = (spent["emit_s"] + threads_s) / (cores * on_s)
    machine = f"{platform.processor() or platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}"
    counts = [f"{spent[table]} {kind}" for table, kind in zip(TABLES, ("spans", "log records", "points"), strict=True)]
    lines = [
        "# Telemetry tax",
        "",
        f"    python benchmarks/telemetry_tax.py --blocks {options.blocks} --block-steps {size}",
        "",
        f"`{options.config.name}` on {machine}, {time.strftime('%Y-%m-%d')}. {options.blocks} blocks of {size} steps "
        f"with everything on and as many with telemetry off, in alternation in one run.",
        "",
        f"Step time with everything on over step time without: {ratio(kept):.4f} "
        f"(95% interval {low:.4f} to {high:.4f}).",
        "",
        f"By processor time at most {bound:.2%}: {spent['emit_s']:.2f} s inside emit calls and {threads_s:.2f} s of "
        f"telemetry's own threads and the collector, in {on_s:.0f} s of steps with everything on, on {cores} cores, "
        f"for {', '.join(counts)}.",
        "",
        "| pair of blocks | on, mean s | off, mean s |",
        "|---|---|---|",
        *(
            f"| {i} | {np.mean([row.seconds for row in on]):.3f} | {np.mean([row.seconds for row in off]):.3f} |"
            for i, (on, off) in enumerate(pairs, start=1)
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
