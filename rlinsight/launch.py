"""Composition root of a training run: what is started, in which order, and how all of it stops.

    check -> collector found or started -> run folder -> telemetry -> run.start -> trainer -> run.end -> delivered

Owns signals and exit codes. The trainer starts and stops its own workers; the collector leaves by itself once its last
owner is gone, so that even a killed run leaves no process behind.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from core_trainer.job import Job, Reporter, RunSummary
from rlinsight import host, names, preflight, run_dir, scraping, spool, store, telemetry
from rlinsight.collecting import collector, found_or_started
from rlinsight.config import Config, SftConfig, TelemetrySection
from rlinsight.errors import CollectorError, RlinsightError, SpoolError, StoreError
from rlinsight.progress import Completeness, Progress

if TYPE_CHECKING:
    from rich.console import Console

Controller = Callable[[Any, Job, Reporter], RunSummary]  # its first argument is the config it is for

# A run's last records are kilobytes; what is not acknowledged by then stays in the spool for the next start.
DELIVERY_TIMEOUT_S = 15.0
LEFTOVERS_TIMEOUT_S = 10.0
INGEST_TIMEOUT_S = 24 * 3600.0  # a spool of an offline cluster may be large; progress is kept if it is interrupted


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training run ended."""

    run_id: str
    summary: RunSummary
    exit_code: int  # of the process: 0, or 128 + signal when the user stopped it


def train(
    config: Config | SftConfig,
    console: Console,
    *,
    resume: bool = False,
    wanted: str | None = None,
    controller: Controller | None = None,
) -> Outcome:
    """Train, and deliver what was recorded.

    ``resume`` continues ``wanted`` (a run id or folder), or the newest run of the config's name. ``controller`` stands
    in for ``core_trainer.controller.run`` or ``core_trainer.sft.run``. Raises RlinsightError for whatever the user can
    act on.
    """
    sys.path.append(os.getcwd())  # a console script's path lacks the folder in which people write their rewards
    preflight.check(config, resume)
    run = run_dir.find(config, wanted) if resume else None
    section = config.telemetry
    load = partial(_trainer, config) if controller is None else lambda: controller
    collecting = collector(section.store, _keep(section), load) if section.enabled else nullcontext()
    with _Signals() as signals, collecting as endpoint:
        if endpoint is not None:
            _deliver_abandoned(config, endpoint, console)
        run = run or run_dir.create(config)
        attempt = run.begin_attempt(config)
        job = Job(
            run_id=run.run_id,
            attempt=attempt.attempt,
            run_dir=run.path,
            spool_dir=run.spool,
            collector=endpoint.http if endpoint else None,
            resume=run.newest_checkpoint(),
            token=endpoint.token if endpoint else None,
            store=config.telemetry.store.absolute(),
        )
        progress = Progress(console, run.run_id, config.trainer.total_steps, config.algorithm.name)
        recorded = _recorded(config, job) if section.enabled else nullcontext(_End())
        with progress, recorded as end, scraping.scraped(section, run.run_id, attempt.attempt):
            progress.stage(f"run {run.run_id}, attempt {job.attempt}; Ctrl-C stops it with a checkpoint")
            try:
                trainer = load()
                with signals.graceful(progress):
                    summary = trainer(config, job, progress)
                end.status = summary.status
            except Exception:  # whatever ended it, a checkpoint is there to go on from
                if (checkpoint := run.newest_checkpoint()) is not None:
                    progress.stage(f"failed; to go on after {checkpoint.name}: {progress.resume_command(checkpoint)}")
                raise
            except (KeyboardInterrupt, SystemExit):  # Ray turns signals into SystemExit while it starts
                signals.received = signals.received or signal.SIGTERM
                summary = progress.cut_short(run.newest_checkpoint())
                end.status = "interrupted"
            if end.status == "interrupted":
                end.exit_code = 128 + signals.received
                end.reason = f"stopped by {signal.Signals(signals.received).name}"
        completeness = _completeness(section.store, run.run_id) if section.enabled else "off"
        _say(console, progress.summary(summary, completeness, section.store))
        if not end.delivered:
            where = shlex.join([str(run.spool), "--store", str(section.store)])
            _say(console, [f"telemetry is left on disk; bring it into the store with: rlinsight ingest {where}"])
    return Outcome(run.run_id, summary, end.exit_code)


def ingest(directory: Path, path: Path) -> str:
    """Deliver a spool, or the one of a run folder, into the store at ``path``; returns what was done, in one line.

    Raises SpoolError when there is nothing of the kind or it cannot be read, CollectorError when some of it could not
    be delivered.
    """
    if (directory / "spool").is_dir():
        directory = directory / "spool"
    if not spool.producers(directory):
        raise SpoolError(
            f"{directory} holds no undelivered telemetry; it is delivered already, or no spool: name a run's folder"
        )
    with collector(path) as endpoint:
        delivered = spool.deliver_leftovers(directory, endpoint.http, endpoint.token, INGEST_TIMEOUT_S)
    text = f"{delivered.batches} batches, {delivered.sent} items delivered to {path}"
    if delivered.rejected:
        text += f", {delivered.rejected} refused"
    if delivered.torn_batches:
        text += f", {delivered.torn_batches} batches cut off when their process was killed"
    if delivered.lost:
        text += f", {delivered.lost} items lost with it"
    if delivered.in_use:
        text += f", {delivered.in_use} producers still in use and left alone"
    if delivered.remaining:
        raise CollectorError(f"{delivered.remaining} producers of {directory} not delivered ({text}); run it again")
    return text


def _deliver_abandoned(config: Config | SftConfig, endpoint: store.Endpoint, console: Console) -> None:
    """Bring in what earlier runs left on disk."""
    for folder in run_dir.abandoned_spools(config):
        try:
            spool.deliver_leftovers(folder, endpoint.http, endpoint.token, LEFTOVERS_TIMEOUT_S)
        except RlinsightError as error:  # of an earlier run, maybe another user's: no reason not to train
            _say(console, [f"warning: {error}"])


def _trainer(config: Config | SftConfig) -> Controller:
    """The real controller. Importing it loads torch and ray, which takes as long as a collector takes to start."""
    from core_trainer import controller, sft

    return sft.run if isinstance(config, SftConfig) else controller.run


def _keep(section: TelemetrySection) -> list[str]:
    """What a collector keeps, on its command line."""
    days = ["--keep-days", str(section.keep_days)] if section.keep_days is not None else []
    return days + (["--keep-bytes", str(int(section.keep_bytes))] if section.keep_bytes is not None else [])


# Record --------------------------------------------------------------------------------------------------------------


@dataclass
class _End:
    """How the attempt ended, for run.end and the exit code."""

    status: str = "failed"
    exit_code: int = 0
    reason: str | None = None
    delivered: bool = True


@contextmanager
def _recorded(config: Config | SftConfig, job: Job) -> Iterator[_End]:
    """Telemetry of this process with run.start and run.end around the block; everything delivered after it."""
    telemetry.setup(
        "controller",
        spool_dir=job.spool_dir,
        run_id=job.run_id,
        attempt=job.attempt,
        endpoint=job.collector,
        token=job.token,
        locate=partial(store.locate, config.telemetry.store.absolute()),
        lane="controller",
        text=config.telemetry.text,
        token_arrays=config.telemetry.token_arrays,
        token_decimals=config.telemetry.token_decimals,
        spool_bytes=config.telemetry.spool_bytes,
        metrics_interval_s=config.telemetry.metrics_interval_s,
        system=config.telemetry.system_metrics,
        resource={names.ALGORITHM: config.algorithm.name, names.MODEL: config.model.source},
    )
    end = _End()
    try:
        telemetry.event(names.RUN_START, _start_attributes(config, job))
        yield end
    except BaseException as error:  # recorded and passed on
        end.exit_code = error.exit_code if isinstance(error, RlinsightError) else 1
        end.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise
    finally:
        attributes: dict[str, Any] = {names.STATUS: end.status, names.EXIT_CODE: end.exit_code}
        telemetry.event(names.RUN_END, attributes | ({names.REASON: end.reason} if end.reason else {}))
        end.delivered = _deliver(config.telemetry.store, job.spool_dir)


def _deliver(path: Path, spool_dir: Path) -> bool:
    """End this process's telemetry and bring in what killed workers left; with a new collector if the first one died.

    True when nothing is left on disk. Never fails a run that has trained.
    """
    endpoint = None
    with suppress(RlinsightError):
        endpoint = store.read_endpoint(path) or found_or_started(path)
    telemetry.shutdown(DELIVERY_TIMEOUT_S if endpoint else 0.0)
    if endpoint is None:
        return False
    try:
        return spool.deliver_leftovers(spool_dir, endpoint.http, endpoint.token, LEFTOVERS_TIMEOUT_S).remaining == 0
    except RlinsightError:
        return False


def _start_attributes(config: Config | SftConfig, job: Job) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        names.RUN_NAME: config.run.name,
        names.PROJECT: config.run.project,
        names.CONFIG: json.dumps(config.model_dump(mode="json")),
        names.CONFIG_HASH: config.hash(),
        names.CODE_VERSION: host.code_version(),
        names.HOST: json.dumps(host.facts()),
    }
    if config.trainer.total_steps is not None:
        attributes[names.TOTAL_STEPS] = config.trainer.total_steps
    if job.resume is not None:
        attributes[names.RESUMED_FROM_STEP] = run_dir.checkpoint_step(job.resume)
    return attributes


def _completeness(path: Path, run_id: str) -> Completeness | None:
    """How whole the run's record is; None when the store does not answer."""
    try:
        row = store.query(
            "SELECT (SELECT sum(linked) / nullif(sum(n), 0) FROM v_linkage WHERE run_id = $run) AS linked, "
            "sum(dropped) AS dropped, sum(missing) AS missing FROM health WHERE run_id = $run",
            store=path,
            params={"run": run_id},
        ).to_pylist()[0]
    except StoreError:
        return None
    return Completeness(**row)


# Signals -------------------------------------------------------------------------------------------------------------


class _Signals:
    """SIGINT, SIGTERM and SIGHUP (the terminal is gone) for the length of a run.

    Before and after the trainer's own loop one signal unwinds at once. In the loop the first asks for a stop after the
    step, the second unwinds. While unwinding, signals are ignored: every wait there is bounded, and cutting it short
    would leave processes behind.
    """

    def __init__(self) -> None:
        self.received = 0
        self._progress: Progress | None = None
        self._unwinding = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks for it
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def graceful(self, progress: Progress) -> Iterator[None]:
        """In this block the first signal becomes a wish that ``progress`` hands to the trainer."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress, self._unwinding = None, True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._unwinding:
            return
        first = self.received == 0
        self.received = self.received or number
        if first and self._progress is not None:
            self._progress.request_stop()
            return
        self._unwinding = True
        raise KeyboardInterrupt


def _say(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
