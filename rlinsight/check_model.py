"""``rlinsight check-model``: runs each part of a check in a process of its own, shows what came of it and stores it.

Owns the processes, the words and the record. What is measured and how it is judged is core_trainer's (checks.py,
check_model.py); this module stays free of torch.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from core_trainer.checks import ENGINES, Answer, Latency, Report, Spec
from rlinsight import host, names, preflight, store, telemetry
from rlinsight.collecting import collector
from rlinsight.errors import CollectorError, ConfigError, ModelError

Say = Callable[[str], object]

DELIVERY_TIMEOUT_S = 15.0
PACKAGES = {"vllm": ("vllm", "vLLM is not installed here; run: make vllm (docs/vllm.md has other ways)")}


@dataclass(frozen=True, slots=True)
class Check:
    """What a check found."""

    check_id: str
    source: str
    reports: list[Report]  # training first, then the engines as asked
    asked: frozenset[str]  # engines named by the user

    @property
    def passed(self) -> bool:
        """Whether training and every engine took the model; one that is not installed counts if it was asked for."""
        return all(
            report.status == "ok" or (report.status == "not installed" and report.part not in self.asked)
            for report in self.reports
        )


def run(spec: Spec, engines: Sequence[str] | None, path: Path, timeout_s: float, say: Say) -> Check:
    """Check training and ``engines`` (None: all there are), and store the outcome in the store at ``path``.

    ``spec`` is the training part's. A part that takes longer than ``timeout_s`` is ended. Raises ConfigError for an
    unknown engine, ModelError when there is no such model, CollectorError or StoreError when the store cannot be
    written.
    """
    unknown = [engine for engine in engines or () if engine not in ENGINES]
    if unknown:
        raise ConfigError(f"--engines {unknown[0]} is not known; give some of {', '.join(ENGINES)}")
    missing = [package for package in preflight.TRAINING_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"checking a model needs {', '.join(missing)}; run: pip install 'rlinsight[train]'")
    check_id = f"check-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with _unwinding(), collector(path) as endpoint:  # before the minutes that follow: the store may be unusable
        training, reference = _part(spec, timeout_s, say)
        reports = [training]
        for engine in engines or ENGINES:
            package, how = PACKAGES.get(engine, (None, None))
            if package is not None and importlib.util.find_spec(package) is None:
                reports.append(Report(engine, "not installed", how))
            else:
                reports.append(_part(replace(spec, part=engine, reference=reference), timeout_s, say)[0])
        check = Check(check_id, spec.source, reports, frozenset(engines or ()))
        _record(check, endpoint, path)
    return check


# Processes -----------------------------------------------------------------------------------------------------------


def _part(spec: Spec, timeout_s: float, say: Say) -> tuple[Report, list[Answer] | None]:
    """One part, in a process of its own. Raises ModelError when there is no such model."""
    answer: dict[str, Any] = {}
    with tempfile.TemporaryFile() as log:
        # -P: a queue.py in the working directory is not the standard library's.
        command = [sys.executable, "-P", "-m", "core_trainer.check_model"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with _ended_after(process, timeout_s) as late:
                try:
                    json.dump(asdict(spec), process.stdin)
                    process.stdin.close()
                except BrokenPipeError:  # it died at once; its exit code and log say why
                    pass
                for line in process.stdout:
                    if not line.endswith("\n"):
                        break  # it was killed while it wrote
                    answer |= json.loads(line)
                    if "stage" in answer:
                        say(answer.pop("stage"))
                code = process.wait()
        if "error" in answer:
            raise ModelError(answer["error"])
        if "report" in answer:
            reference = answer.get("reference")
            return Report.parse(answer["report"]), reference and [Answer(**item) for item in reference]
        if late.is_set():
            return Report(spec.part, "failed", f"not done after {timeout_s:g} s; give it more with --timeout"), None
        return Report(spec.part, "failed", _death(code, log)), None


@contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP (the terminal is gone) leave the block as Ctrl-C does, so that no process stays behind."""

    def leave(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # another one would cut short what ends the processes
        raise SystemExit(128 + number)  # as a shell tells it

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}  # nohup has SIGHUP ignored
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_after(process: subprocess.Popen[str], timeout_s: float) -> Iterator[threading.Event]:
    """Kill the process when the time is over, or when the block is left before it ended; the event tells the former."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        process.kill()  # nothing when it has ended


def _death(code: int, log: IO[bytes]) -> str:
    """How a process ended that gave no answer, with the last line it wrote."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    last = f" ({lines[-1].strip()[:300]})" if lines else ""
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}{last}"
    return f"its process ended with exit code {code}{last}"


# Record --------------------------------------------------------------------------------------------------------------


def _record(check: Check, endpoint: store.Endpoint, path: Path) -> None:
    """Every report and every step of the ladder as an event of its own. Raises CollectorError if not all is stored."""
    with tempfile.TemporaryDirectory(prefix="rlinsight-check-") as spool:
        telemetry.setup(
            "check",
            spool_dir=Path(spool),
            run_id=None,
            attempt=None,
            endpoint=endpoint.http,
            token=endpoint.token,
            locate=partial(store.locate, path.absolute()),
            resource={names.MODEL: check.source},
        )
        facts = {names.CODE_VERSION: host.code_version(), names.HOST: json.dumps(host.facts())}
        for report in check.reports:
            telemetry.event(names.MODEL_CHECK, {**_report_attributes(check, report), **facts})
            for step in report.latency:
                telemetry.event(names.MODEL_CHECK_LATENCY, _latency_attributes(check, report, step))
        if not telemetry.shutdown(DELIVERY_TIMEOUT_S):
            raise CollectorError(f"the collector of {path} did not take the results; run the check again")


def _report_attributes(check: Check, report: Report) -> dict[str, Any]:
    attributes = {
        names.CHECK_ID: check.check_id,
        names.CHECK_PART: report.part,
        names.CHECK_STATUS: report.status,
        names.REASON: report.reason,
        names.CHECK_ARCHITECTURE: report.architecture,
        names.CHECK_PARAMETERS: report.num_parameters,
        names.CHECK_DTYPE: report.dtype,
        names.CHECK_LOAD_S: report.load_s,
        names.CHECK_PROMPTS: report.num_prompts,
        names.CHECK_TOKENS: report.num_tokens,
        names.CHECK_PARITY: report.parity,
        names.CHECK_MAX_GAP: report.max_log_prob_gap,
        names.CHECK_MEAN_GAP: report.mean_log_prob_gap,
        names.CHECK_TOKENS_PER_S: report.tokens_per_s,
    }
    parted = report.divergence
    if parted is not None:
        attributes |= {
            names.CHECK_DIVERGENT_PROMPT: parted.prompt,
            names.CHECK_DIVERGENT_POSITION: parted.position,
            names.CHECK_EXPECTED_PIECE: parted.expected_piece,
            names.CHECK_FOUND_PIECE: parted.found_piece,
            names.CHECK_EXPECTED_LOG_PROB: parted.expected_log_prob,
            names.CHECK_FOUND_LOG_PROB: parted.found_log_prob,
            names.CHECK_LEAD: parted.lead,
        }
    return {name: value for name, value in attributes.items() if value is not None}


def _latency_attributes(check: Check, report: Report, step: Latency) -> dict[str, Any]:
    attributes = {
        names.CHECK_ID: check.check_id,
        names.CHECK_PART: report.part,
        names.CHECK_CONCURRENCY: step.concurrency,
        names.CHECK_REQUESTS: step.num_requests,
        names.OUTPUT_TOKENS: step.output_tokens,
        names.CHECK_TOKENS_PER_S: step.tokens_per_s,
        **{names.CHECK_LATENCY[key]: value for key, value in step.seconds.items()},
    }
    return {name: value for name, value in attributes.items() if value is not None}


# Words ---------------------------------------------------------------------------------------------------------------


def render(check: Check) -> list[str]:
    """The check for people: what each part did, what is wrong, how fast the engines are, and the verdict last."""
    facts = next((report for report in check.reports if report.architecture), None)
    what = f" ({facts.architecture}, {facts.num_parameters:,} weights, {facts.dtype})" if facts else ""
    rows = [["part", "status", "greedy parity", "log-prob gap max", "mean", "tokens/s", "load s"]]
    rows += [_row(report) for report in check.reports]
    lines = [f"{check.source}{what}", "", *_table(rows), ""]
    for report in check.reports:
        lines += [f"{report.part}: {report.reason}"] if report.reason else []
        lines += [_divergence(report)] if report.divergence else []
    timed = [(report.part, step) for report in check.reports for step in report.latency]
    if timed:
        rows = [["ms: p50 / p90 / p99", "callers", "first token", "per token", "inter-token", "tokens/s"]]
        for part, step in timed:
            spreads = [_spread(step, key) for key in ("ttft", "tpot", "inter_token")]
            rows.append([part, str(step.concurrency), *spreads, f"{step.tokens_per_s:.0f}"])
        lines += ["" if lines[-1] else None, *_table(rows), ""]
    return [line for line in [*lines, verdict(check)] if line is not None]


def verdict(check: Check) -> str:
    """One line: whether one may train with this model, and on which engine."""
    passed = [report for report in check.reports if report.status == "ok"]
    good = [report.part for report in passed if report.part == "training" or report.parity is not None]
    alone = [report.part for report in passed if report.part not in good]
    bad = [
        f"{report.part} ({report.status})" for report in check.reports if report.status not in ("ok", "not installed")
    ]
    absent = [report.part for report in check.reports if report.status == "not installed"]
    words = "OK" if check.passed else "NOT OK"
    parts = [f"{', '.join(good)} agree with transformers"] if good else []
    parts += [f"{', '.join(alone)} agree with training alone"] if alone else []
    parts += [f"not {', '.join(bad)}"] if bad else []
    parts += [f"{', '.join(absent)} not checked: not installed"] if absent else []
    return f"{words}: {'; '.join(parts)}"


def _row(report: Report) -> list[str]:
    tokens, load = report.tokens_per_s, report.load_s
    parity = "-"
    if report.parity is not None and report.num_prompts is not None:
        parity = f"{round(report.parity * report.num_prompts)} of {report.num_prompts}"
    gaps = [f"{gap:.1e}" if gap is not None else "-" for gap in (report.max_log_prob_gap, report.mean_log_prob_gap)]
    speed = [f"{tokens:.0f}" if tokens is not None else "-", f"{load:.1f}" if load is not None else "-"]
    return [report.part, report.status, parity, *gaps, *speed]


def _divergence(report: Report) -> str:
    parted = report.divergence
    assert parted is not None

    def token(piece: str | None, log_prob: float | None) -> str:
        return "the end" if log_prob is None else f"{piece!r} at log-prob {log_prob:.5f}"

    lead = "" if parted.lead is None else f"; transformers prefers its own by {parted.lead:.1e}"
    return (
        f"{report.part}: first other token of prompt {parted.prompt} at {parted.position}: "
        f"transformers writes {token(parted.expected_piece, parted.expected_log_prob)}, "
        f"{report.part} {token(parted.found_piece, parted.found_log_prob)}{lead}"
    )


def _spread(step: Latency, what: str) -> str:
    values = [step.seconds[f"{what}_p{p}_s"] for p in (50, 90, 99)]
    return " / ".join("-" if value is None else f"{value * 1000:.1f}" for value in values)


def _table(rows: list[list[str]]) -> list[str]:
    """Columns side by side, the first one flush left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
