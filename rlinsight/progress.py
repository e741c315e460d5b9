"""What a person sees while training: a live block on a terminal, one line per step elsewhere, a summary at the end.

Implements ``core_trainer.job.Reporter``. Owns the words and the layout, and remembers the user's wish to stop; signal
handling is ``launch``'s.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from rlinsight import names

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from core_trainer.job import RunSummary, StepReport

BARS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 40  # steps drawn in a sparkline
PACE_STEPS = 10  # steps the ETA averages over: short enough to follow a change, long enough to be calm
SUMMARY_STEPS = 5  # steps averaged at each end of the learning summary


class Completeness(NamedTuple):
    """How whole the stored record of a run is; None is unknown."""

    linked: float | None  # share of trace edges that join, from ``v_linkage``
    dropped: int | None  # items its processes gave up, from ``health``
    missing: int | None  # items emitted that neither arrived nor were given up, from ``health``

    def __str__(self) -> str:
        # Only a whole record may read 100%: 99.996% must not be rounded up to it.
        linked = "?" if self.linked is None else f"{self.linked if self.linked == 1 else min(self.linked, 0.9999):.2%}"
        return f"{linked} of records link up, {_count(self.dropped)} dropped, {_count(self.missing)} missing"


class Shown(NamedTuple):
    """What people watch in a kind of run. Each metric is (label, name, format); the first is drawn as a curve."""

    command: str  # what starts and resumes it
    metrics: list[tuple[str, str, str]]
    columns: str  # of view train_metrics, for the query to run next


SAMPLED = Shown(
    "train",
    [("reward", names.M_REWARD_MEAN, ".3f"), ("length", names.M_LENGTH_MEAN, ".1f")],
    "step, reward_mean, response_length_mean, entropy",
)
SUPERVISED = Shown(
    "sft",
    [("loss", names.M_LOSS, ".4f"), ("grad norm", names.M_GRAD_NORM, ".3f")],
    "step, loss_total, grad_norm, learning_rate",
)


class Progress:
    """Reporter of one attempt. Use as a context manager around the run."""

    def __init__(self, console: Console, run_id: str, total_steps: int | None, algorithm: str) -> None:
        self.console, self.run_id = console, run_id
        self.total_steps = total_steps  # None: only the trainer knows, and says so with the first step
        self.shown = SUPERVISED if algorithm == "sft" else SAMPLED
        self.started = time.monotonic()
        self._stopping = False
        self._stage = ""
        self._note = ""
        self._latest: StepReport | None = None
        self._curve: list[float | None] = []
        self._seconds: deque[float] = deque(maxlen=PACE_STEPS)
        self._tokens_per_s: list[float] = []
        self._live = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(self, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # Reporter --------------------------------------------------------------------------------------------------------

    def stage(self, text: str) -> None:
        """Say what is happening before the first step or after the last."""
        self._stage = text
        if self._live is None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, report: StepReport) -> None:
        """Say that a step is done."""
        self._latest, self._stage, self.total_steps = report, "", report.total_steps
        self._curve.append(report.metrics.get(self.shown.metrics[0][1]))
        self._seconds.append(report.seconds)
        if (speed := report.metrics.get(names.M_TOKENS_PER_S)) is not None:
            self._tokens_per_s.append(speed)
        if self._live is None:
            self.console.print(self._line(report), markup=False, highlight=False, soft_wrap=True)

    def stop_requested(self) -> bool:
        """True once the user asked for a stop."""
        return self._stopping

    # Drawing ---------------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Remember the wish to stop and say what it does. Safe to call inside a signal handler."""
        self._stopping = True
        self._note = (
            "stopping with a checkpoint: an update that has begun is finished, a step before its update is dropped; "
            "Ctrl-C again stops now"
        )
        # A handler may have interrupted a print, and Python's buffers refuse to be entered twice.
        if self._live is None:
            os.write(2, f"{self._note}\n".encode())

    def _line(self, report: StepReport) -> str:
        metrics = report.metrics
        parts = [
            f"step {report.step}/{report.total_steps}",
            *(f"{label} {_number(metrics.get(name), form)}" for label, name, form in self.shown.metrics),
            f"{_number(metrics.get(names.M_TOKENS_PER_S), ',.0f')} tokens/s",
            f"{report.seconds:.1f} s",
            f"eta {self._eta(report)}",
        ]
        return "  ".join(parts)

    def _eta(self, report: StepReport) -> str:
        left = report.total_steps - report.step
        return duration(left * fmean(self._seconds)) if self._seconds else "?"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live block: run, bar and ETA; reward with its trend; length and speed."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        report = self._latest
        elapsed = duration(time.monotonic() - self.started)
        if report is None:
            yield Text.assemble((self.run_id, "bold"), f"  {self._stage or 'starting'}  ", (elapsed, "dim"))
        else:
            head = Table.grid(padding=(0, 2))
            head.add_row(
                Text(self.run_id, style="bold"),
                Text(f"step {report.step}/{report.total_steps}"),
                ProgressBar(total=report.total_steps, completed=report.step, width=24),
                Text(f"{report.seconds:.1f} s/step"),
                Text(f"{elapsed} gone, ETA {self._eta(report)}" if not self._stage else self._stage, style="dim"),
            )
            yield head
            metrics = report.metrics
            (label, name, form), *others = self.shown.metrics
            body = Table.grid(padding=(0, 2))
            body.add_row(
                f"  {label}",
                _number(metrics.get(name), form),
                Text(sparkline(self._curve), style="green"),
                Text(f"first {_number(self._curve[0], form)}", style="dim"),
            )
            yield body
            yield Text(
                "".join(f"  {label} {_number(metrics.get(name), form)} " for label, name, form in others)
                + f"  speed {_number(metrics.get(names.M_TOKENS_PER_S), ',.0f')} tokens/s"
            )
        if self._note:
            yield Text(self._note, style="yellow")

    # Summary ---------------------------------------------------------------------------------------------------------

    def cut_short(self, checkpoint: Path | None) -> RunSummary:
        """What is known of an attempt whose trainer was stopped before it could say."""
        from core_trainer.job import RunSummary

        curve = [value for value in self._curve if value is not None]
        return RunSummary("interrupted", self._latest.step if self._latest else 0, curve, checkpoint)

    def summary(self, summary: RunSummary, record: Completeness | str | None, store: Path) -> list[str]:
        """Closing lines: what was learned, how long it took, how complete the record is, what to run next.

        ``record`` is None when the store could not be asked; text stands for itself.
        """
        curve = summary.curve
        lines = [f"{self.run_id}: {summary.status} at step {summary.step}/{self.total_steps or '?'}"]
        if len(curve) >= 2:
            n = min(SUMMARY_STEPS, len(curve) // 2)
            label, _, form = self.shown.metrics[0]
            first, last = format(fmean(curve[:n]), form), format(fmean(curve[-n:]), form)
            which = f"{n} steps" if n > 1 else "step"
            lines.append(f"  {label:<10} first {which} {first} -> last {which} {last}  {sparkline(curve)}")
        elapsed = time.monotonic() - self.started
        speed = f", {fmean(self._tokens_per_s):,.0f} tokens/s" if self._tokens_per_s else ""
        per_step = f", {sum(self._seconds) / len(self._seconds):.1f} s per step" if self._seconds else ""
        lines.append(f"  time       {duration(elapsed)}{per_step}{speed}")
        lines.append(f"  telemetry  {record or 'not asked'}")
        if summary.checkpoint is not None:
            lines.append(f"  checkpoint {summary.checkpoint}")
        commands = self._next_commands(store)
        if summary.status == "interrupted" and summary.checkpoint is not None:
            commands.insert(0, f"  {self.resume_command(summary.checkpoint)}")
        return [*lines, "", "next:", *commands]

    def resume_command(self, checkpoint: Path) -> str:
        """Continues the run of a checkpoint. Ready to paste."""
        config = checkpoint.parents[1] / "config.yaml"
        return f"rlinsight {self.shown.command} {shlex.quote(str(config))} --resume {self.run_id}"

    def _next_commands(self, store: Path) -> list[str]:
        """Ready to paste."""
        where = "" if store == Path("runs/rlinsight.duckdb") else f" --store {shlex.quote(str(store))}"
        query = f"select {self.shown.columns} from train_metrics where run_id = '{self.run_id}' order by step"
        return [f"  rlinsight dashboard{where}", f'  rlinsight sql{where} "{query}"']


def sparkline(values: list[float | None] | list[float]) -> str:
    """Bars from the smallest value to the largest, at most TREND_WIDTH wide; a blank where the value is unknown."""
    shown = values[-TREND_WIDTH:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    scale = (len(BARS) - 1) / span if span else 0.0
    return "".join(" " if value is None else BARS[round((value - low) * scale)] for value in shown)


def duration(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h04m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
