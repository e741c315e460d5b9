"""Progress tells a person what is happening, on a terminal and in a log, and sums up what was learned."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from core_trainer.job import RunSummary, StepReport
from rlinsight import names
from rlinsight.progress import Completeness, Progress, duration, sparkline

STORE = Path("runs/rlinsight.duckdb")


def report(step: int, reward: float | None, seconds: float = 2.0, total: int = 10) -> StepReport:
    metrics = {names.M_REWARD_MEAN: reward, names.M_LENGTH_MEAN: 12.34, names.M_TOKENS_PER_S: 1234.5}
    return StepReport(step, total, seconds, metrics)  # type: ignore[arg-type]


def run(is_terminal: bool, *reports: StepReport, stop: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)
    with Progress(console, "r-1", 10, "grpo") as progress:
        progress.stage("loading the model")
        for item in reports:
            progress.step(item)
        if stop:
            progress.request_stop()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_log_gets_one_line_per_step() -> None:
    """Without a terminal each stage and each step is one plain line with every number and the time left."""
    assert run(False, report(1, 0.25), report(2, None)).splitlines() == [
        "loading the model",
        "step 1/10  reward 0.250  length 12.3  1,234 tokens/s  2.0 s  eta 18s",
        "step 2/10  reward ?  length 12.3  1,234 tokens/s  2.0 s  eta 16s",
    ]


def test_a_terminal_shows_the_same_numbers_live() -> None:
    """The live block holds step, reward with its trend and first value, length, speed and the time left."""
    shown = run(True, report(1, 0.25), report(2, 0.75), stop=True)
    for part in ("step 2/10", "0.750", "▁█", "first 0.250", "length 12.3", "1,234 tokens/s", "ETA 16s", "Ctrl-C again"):
        assert part in shown


def test_eta_follows_the_recent_pace() -> None:
    """The time left goes by the last ten steps, so a slow start is soon forgotten."""
    lines = run(False, report(1, 0.0, 100.0, 20), *[report(i, 0.0, 1.0, 20) for i in range(2, 12)]).splitlines()
    assert lines[1].endswith("eta 31m40s")
    assert lines[-1].endswith("eta 9s")


def test_a_stop_is_asked_for_once_and_said_aloud(capfd: pytest.CaptureFixture[str]) -> None:
    """The trainer sees the wish, and a log shows what it does."""
    progress = Progress(Console(file=io.StringIO()), "r-1", 10, "grpo")
    assert not progress.stop_requested()
    progress.request_stop()
    assert progress.stop_requested()
    assert "a step before its update is dropped" in capfd.readouterr().err


def test_summary_compares_the_ends_of_the_run() -> None:
    """First and last five steps are averaged; fewer in a short run, so that no step counts on both sides."""
    progress = Progress(Console(file=io.StringIO()), "r-1", 10, "grpo")
    ten = RunSummary("finished", 10, [0.0] * 5 + [1.0] * 5, Path("runs/r-1/checkpoints/step-10"))
    lines = progress.summary(ten, Completeness(1.0, 0, 0), STORE)
    assert "first 5 steps 0.000 -> last 5 steps 1.000" in lines[1]
    assert any("100.00% of records link up, 0 dropped, 0 missing" in line for line in lines)
    assert "  rlinsight dashboard" in lines
    assert any("where run_id = 'r-1'" in line for line in lines)
    assert not any("--resume" in line for line in lines)
    three = progress.summary(RunSummary("finished", 3, [0.1, 0.2, 0.3], None), None, STORE)
    assert "first step 0.100 -> last step 0.300" in three[1]


def test_only_a_whole_record_reads_100_percent() -> None:
    """A share just below 1 is not rounded up, losses are numbers, and what is unknown is no zero."""
    assert str(Completeness(0.99996, 1234, 0)) == "99.99% of records link up, 1,234 dropped, 0 missing"
    assert str(Completeness(None, None, None)) == "? of records link up, ? dropped, ? missing"


def test_summary_of_an_interrupted_run_says_how_to_go_on() -> None:
    """The resume command names the resolved config and the run; another store is named in every command."""
    progress = Progress(Console(file=io.StringIO()), "r-1", 10, "grpo")
    lines = progress.summary(
        RunSummary("interrupted", 4, [0.1], Path("runs/r-1/checkpoints/step-4")), None, Path("my store.duckdb")
    )
    assert "  rlinsight train runs/r-1/config.yaml --resume r-1" in lines
    assert "  rlinsight dashboard --store 'my store.duckdb'" in lines


def test_sparkline_and_duration() -> None:
    """Lowest to highest, blank where unknown, flat when constant; durations in the largest two units."""
    assert sparkline([0.0, None, 0.5, 1.0]) == "▁ ▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([None]) == ""
    assert [duration(s) for s in (59.4, 60, 185, 7440)] == ["59s", "1m00s", "3m05s", "2h04m"]
