"""Training from Python: the same run as ``rlinsight train``, in the calling process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from rlinsight import launch
from rlinsight.config import Config, load, parse
from rlinsight.errors import ConfigError, RlinsightError

if TYPE_CHECKING:
    from core_trainer.controller import Controller


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """How a run went, and where to find it."""

    run_id: str  # as in every table of the store
    status: Literal["finished", "interrupted"]
    step: int  # last finished step
    rewards: list[float]  # mean reward of each step
    checkpoint: Path | None  # newest one: resumable, and loadable by transformers
    store: Path  # for ``rlinsight.query(sql, store=...)``


def train(
    config: Config | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    controller: type[Controller] | None = None,
) -> TrainedRun:
    """Train a model, and return when it is trained.

    ``config`` is a YAML file, a mapping of its sections, or a parsed Config; ``overrides`` are ``section.key=value``
    changes to a file. ``resume`` goes on with the newest run of that name. ``controller`` is a subclass of
    ``core_trainer.controller.Controller`` with a loop of its own. Raises RlinsightError for what the user can act on.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RlinsightError(
            "train() heeds Ctrl-C, and Python hands signals to the main thread alone; call it there, or in a process"
        )
    if isinstance(config, str | Path):
        config = load(Path(config), list(overrides))
    elif overrides:
        raise ConfigError("overrides change a file; put their values into the mapping instead")
    elif not isinstance(config, Config):
        config = parse(dict(config))
    outcome = launch.train(config, Console(), resume=resume, controller=controller.run if controller else None)
    summary = outcome.summary
    return TrainedRun(
        outcome.run_id, summary.status, summary.step, summary.curve, summary.checkpoint, config.telemetry.store
    )
