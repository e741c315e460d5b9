"""Checkpoints: a plain Hugging Face directory plus what it takes to go on exactly where training stopped.

    checkpoints/step-000010/
      config.json, tokenizer files, model.safetensors   master weights in full precision, loadable by transformers
      optimizer.safetensors                             AdamW moments
      trainer.json                                      step, versions, data position, and the size of every file above

A checkpoint is written beside its final name and renamed when complete, so a directory that exists is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from core_trainer.optimizer import MasterOptimizer
from rlinsight.errors import CheckpointError

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "trainer.json"
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", STATE)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The controller's part of a checkpoint."""

    step: int  # last finished step
    sampler: dict[str, Any]  # data position


def write(folder: Path, state: TrainerState, save_policy: Callable[[Path], object], keep: int) -> Path:
    """Write ``folder/step-NNNNNN`` and drop all but the newest ``keep``. Replaces one of the same step."""
    target = folder / f"step-{state.step:06d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_policy(partial)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / STATE).write_text(json.dumps({**asdict(state), "files": sizes}, indent=2))
        for file in partial.iterdir():
            _sync(file)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _cannot_write(target, error) from None
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def read_state(directory: Path) -> TrainerState:
    """The controller's part. Raises CheckpointError when ``directory`` is no checkpoint, or a file of it is torn."""
    try:
        content = json.loads((directory / STATE).read_text())
        state = TrainerState(content["step"], content["sampler"])
        sizes: dict[str, int] = content["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {STATE}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {STATE} is unreadable ({error!r})") from None
    for name, size in sizes.items():
        file = directory / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise CheckpointError(f"checkpoint {directory} is damaged: {name} {what}; resume from an older one")
    return state


def save_policy(
    directory: Path, model: PreTrainedModel, source: Path, optimizer: MasterOptimizer, policy_version: int
) -> None:
    """Write master weights, optimizer and the files of ``source`` that are not weights."""
    try:
        _save_policy(directory, model, source, optimizer, policy_version)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(directory, error) from None


def _save_policy(
    directory: Path, model: PreTrainedModel, source: Path, optimizer: MasterOptimizer, policy_version: int
) -> None:
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copy(file, directory / file.name)
    masters = optimizer.named_master(model)  # tied weights appear once, as transformers expects
    parameters = {id(parameter) for parameter in model.parameters()}
    kept = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in parameters}
    save_file({**masters, **kept}, directory / WEIGHTS, metadata={"format": "pt"})
    versions = {"num_updates": str(optimizer.num_updates), "policy_version": str(policy_version)}
    save_file(optimizer.state_dict(), directory / OPTIMIZER, metadata=versions)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} cannot be written ({error}); free some space or set another run.dir")


def load_optimizer(directory: Path, optimizer: MasterOptimizer) -> int:
    """Restore the moments; returns the policy_version. The model was loaded from ``directory`` before."""
    path = directory / OPTIMIZER
    try:
        with safe_open(path, framework="pt") as file:
            versions = file.metadata()
        state = load_file(path, device=str(optimizer.master.device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {OPTIMIZER} is unreadable ({error})") from None
    optimizer.load_state_dict(state, int(versions["num_updates"]))
    return int(versions["policy_version"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
