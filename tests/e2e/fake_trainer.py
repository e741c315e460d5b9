"""A trainer double for tests of launch: real telemetry and checkpoints, no model. Run as a program it is `train`.

    python -m tests.e2e.fake_trainer CONFIG MODE [--resume]

MODE says how it goes: ``finish``, ``slow`` (waits in each step), ``held`` (so too, and in the last one until the test
lets it go: on a machine however busy it outlives what is done to it), ``stuck`` (never asks whether to stop), ``fail``
(an error the user can act on), ``bug`` (any other), ``crash`` (fails and leaves a checkpoint), ``exit`` (as Ray does on
SIGTERM while it starts), ``spoil`` (leaves a spool folder that cannot be delivered), ``die`` (collector, then process
are killed in the middle of a step).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from core_trainer.job import Job, Reporter, RunSummary, StepReport
from rlinsight import launch, names, store, telemetry
from rlinsight.config import Config, load
from rlinsight.errors import RewardError, RlinsightError


def trainer(mode: str) -> launch.Controller:
    """A stand-in for ``core_trainer.controller.run``."""

    def run(config: Config, job: Job, reporter: Reporter) -> RunSummary:
        first = 1 + (int(job.resume.name.removeprefix("step-")) if job.resume else 0)
        rewards: list[float] = []
        checkpoint = job.resume
        for step in range(first, config.trainer.total_steps + 1):
            with telemetry.step_context(step), telemetry.span(names.STEP, announce=True, root=True):
                if mode == "held":
                    _hold(step == config.trainer.total_steps, config.telemetry.store)
                _misbehave(mode, step, config.telemetry.store, job.spool_dir)
                rewards.append(step / config.trainer.total_steps)
                attributes = {names.METRIC_NAME: names.M_REWARD_MEAN, names.METRIC_VALUE: rewards[-1]}
                telemetry.event(names.STEP_METRIC, attributes)
            reporter.step(StepReport(step, config.trainer.total_steps, 0.1, {names.M_REWARD_MEAN: rewards[-1]}))
            if reporter.stop_requested() or step == config.trainer.total_steps:
                checkpoint = job.run_dir / "checkpoints" / f"step-{step}"
                checkpoint.mkdir(parents=True)
                break
        status = "finished" if step == config.trainer.total_steps else "interrupted"
        return RunSummary(status, step, rewards, checkpoint)

    return run


def may_end(path: Path, pid: int) -> Path:
    """The file that lets the run of a process end, by the path of its store."""
    return path.with_name(f"go-{pid}")


def _hold(last: bool, path: Path) -> None:
    time.sleep(0.3)
    while last and not may_end(path, os.getpid()).exists():
        time.sleep(0.1)


def _misbehave(mode: str, step: int, path: Path, spool_dir: Path) -> None:
    if mode in ("slow", "stuck"):
        time.sleep(0.3 if mode == "slow" else 600)
    elif mode == "fail" and step == 2:
        raise RewardError("reward numeric timed out; raise its timeout_s")
    elif mode == "exit" and step == 2:
        sys.exit(15)
    elif mode == "bug" and step == 2:
        raise ZeroDivisionError("a bug")
    elif mode == "crash" and step == 2:
        (spool_dir.parent / "checkpoints" / "step-1").mkdir(parents=True)
        raise RewardError("the actor ran out of memory; lower trainer.micro_batch_tokens")
    elif mode == "spoil" and step == 2:
        (spool_dir / "policy-0-dead" / "lock").mkdir(parents=True)
    elif mode == "die" and step == 2:
        telemetry.flush(5)
        endpoint = store.read_endpoint(path)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        telemetry.event(names.STEP_METRIC, {names.METRIC_NAME: "after/the/collector", names.METRIC_VALUE: 1.0})
        telemetry.flush(1)  # to disk; nobody is there to take it
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train the config named on the command line with the double."""
    from rich.console import Console

    _, config, mode, *rest = sys.argv
    try:
        run = launch.train(load(Path(config)), Console(), resume="--resume" in rest, controller=trainer(mode))
        code = run.exit_code
    except RlinsightError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
