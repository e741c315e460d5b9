"""The folder of one run: its id, resolved config, current attempt and checkpoints.

``<run.dir>/<run id>/`` holds ``config.yaml`` (resolved), ``attempt.json`` (who trains it now), ``spool/`` and
``checkpoints/step-<n>/``. Owns creating, finding and resuming a folder. Writes no checkpoints (the trainer does, under
a temporary name, so that a ``step-<n>`` folder is a whole one) and runs no query.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinsight.config import Config, SftConfig, parse
from rlinsight.errors import CheckpointError, ConfigError
from rlinsight.store import is_alive

# What may change between attempts: how long to train, where files go, what is recorded, how memory is used.
# Everything else changes what is learned, and a resumed run would no longer be one experiment.
RESUMABLE_CHANGES = (
    "run.name",
    "run.project",
    "run.dir",
    "trainer.total_steps",
    "trainer.epochs",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
    "trainer.micro_batch_tokens",
    "rollout.max_batch_size",
    "reward.concurrency",
    "telemetry",
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a run and the process that trains it."""

    run_id: str
    attempt: int  # 1 for the first start, +1 per resume
    store: str  # absolute path of the DuckDB file
    pid: int
    started_ns: int  # unix nanoseconds; tells the process from a later one that was given the same pid

    def is_alive(self) -> bool:
        """True while the process that wrote this still runs."""
        return is_alive(self.pid, self.started_ns)


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name is the run id."""
        return self.path.name

    @property
    def spool(self) -> Path:
        """Undelivered telemetry of every process of the run."""
        return self.path / "spool"

    @property
    def last_attempt(self) -> Attempt | None:
        """What ``begin_attempt`` wrote last; None when there is nothing readable."""
        try:
            return Attempt(**json.loads((self.path / "attempt.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def begin_attempt(self, config: Config | SftConfig) -> Attempt:
        """Record that this process trains the run now, and with which config."""
        last = self.last_attempt
        attempt = Attempt(
            run_id=self.run_id,
            attempt=last.attempt + 1 if last else 1,
            store=str(config.telemetry.store.resolve()),
            pid=os.getpid(),
            started_ns=time.time_ns(),
        )
        _write(self.path / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        _write(self.path / "attempt.json", json.dumps(asdict(attempt), indent=2) + "\n")
        return attempt

    def newest_checkpoint(self) -> Path | None:
        """The ``step-<n>`` folder of the highest step, or None."""
        entries = (self.path / "checkpoints").glob("step-*")
        whole = [entry for entry in entries if re.fullmatch(r"step-\d+", entry.name) and entry.is_dir()]
        return max(whole, key=checkpoint_step, default=None)


def checkpoint_step(checkpoint: Path) -> int:
    """Last finished step in a ``step-<n>`` folder."""
    return int(checkpoint.name.removeprefix("step-"))


def create(config: Config | SftConfig) -> RunDir:
    """Make a fresh folder ``<run.dir>/<name>-<date>-<time>-<4 hex>``. Raises ConfigError where it cannot be written."""
    run_id = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path = config.run.dir / run_id
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir}: cannot create {path}: {error.strerror}; set run.dir=..."
        ) from None
    return RunDir(path)


def find(config: Config | SftConfig, wanted: str | None) -> RunDir:
    """The run to resume: a run id, a folder, or (None) the newest run called ``run.name``.

    Raises CheckpointError when there is none, it is still training, has no checkpoint, or was started with a config
    that would train something else.
    """
    run = _named(config, wanted) if wanted else _newest(config)
    last = run.last_attempt
    if last is not None and last.is_alive():
        raise CheckpointError(f"run {run.run_id} is still training as pid {last.pid}; stop it first")
    checkpoint = run.newest_checkpoint()
    if checkpoint is None:
        raise CheckpointError(f"run {run.run_id} has no checkpoint under {run.path / 'checkpoints'}; start a new run")
    done = checkpoint_step(checkpoint)
    total = config.trainer.total_steps
    finished = total is not None and done >= total  # how many steps epochs come to, only the data tells
    if finished and not (done == total and _lacks_validation(config, checkpoint)):
        raise CheckpointError(
            f"run {run.run_id} has done {done} steps and trainer.total_steps={total}; "
            f"set trainer.total_steps={2 * done} to train on"
        )
    _check_same_experiment(run, config)
    return run


def abandoned_spools(config: Config | SftConfig) -> list[Path]:
    """Spool folders of runs into the same store whose process is gone, e.g. killed before it could deliver."""
    store = str(config.telemetry.store.resolve())
    runs = [RunDir(path.parent) for path in config.run.dir.glob("*/attempt.json")]
    return [run.spool for run in runs if (last := run.last_attempt) and last.store == store and not last.is_alive()]


def _named(config: Config | SftConfig, wanted: str) -> RunDir:
    for path in (config.run.dir / wanted, Path(wanted)):
        if (path / "config.yaml").is_file():
            return RunDir(path)
    raise CheckpointError(f"no run {wanted!r} under {config.run.dir}; `ls {config.run.dir}` shows those there are")


def _newest(config: Config | SftConfig) -> RunDir:
    pattern = re.compile(re.escape(config.run.name) + r"-\d{8}-\d{6}-[0-9a-f]{4}")
    names = sorted(
        path.parent.name for path in config.run.dir.glob("*/config.yaml") if pattern.fullmatch(path.parent.name)
    )
    if not names:
        raise CheckpointError(
            f"no run called {config.run.name!r} under {config.run.dir}; start one without --resume, or name a run id"
        )
    return RunDir(config.run.dir / names[-1])


def _lacks_validation(config: Config | SftConfig, checkpoint: Path) -> bool:
    """Whether the validation of the step failed after it, which a resume makes up for."""
    if isinstance(config, SftConfig) or config.validation is None:
        return False
    try:
        state = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return state.get("validated") != checkpoint_step(checkpoint)


def _check_same_experiment(run: RunDir, config: Config | SftConfig) -> None:
    file = run.path / "config.yaml"
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file} cannot be read: {' '.join(str(error).split())}; start a new run") from None
    supervised = isinstance(tree, dict) and (tree.get("algorithm") or {}).get("name") == "sft"
    if supervised != isinstance(config, SftConfig):
        command = "sft" if supervised else "train"
        raise CheckpointError(f"run {run.run_id} is one of `rlinsight {command}`; resume it with that command")
    before = parse(tree, str(file), type(config))
    old, new = _flat(before.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    changed = [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(RESUMABLE_CHANGES)
    ]
    if changed:
        raise CheckpointError(
            f"run {run.run_id} (config {before.hash()[:12]}) cannot go on with this config ({config.hash()[:12]}): "
            f"{', '.join(changed)}; set these back, or start a new run"
        )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested mapping by dotted path; lists count as leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _write(path: Path, text: str) -> None:
    """Replace a file whole, so that a reader or a crash never sees half of it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
