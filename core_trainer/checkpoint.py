"""Checkpoints: a plain Hugging Face directory plus what it takes to go on exactly where training stopped.

    checkpoints/
      step-000010/
        config.json, tokenizer files, model.safetensors   master weights in full precision, loadable by transformers;
                                                          with LoRA adapter_config.json, adapter_model.safetensors
        optimizer.safetensors                             AdamW moments
        critic/...                                        a part of its own for whoever else has state
        trainer.json                                      the controller's state; size and CRC-32 of every file above
      best                                                name of the checkpoint with the best validation, where kept

A checkpoint is written beside its final name and renamed when complete, and renamed away before it is removed, so a
``step-`` directory that exists is whole. One that is replaced is put back should the new one not take its place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from core_trainer import lora, models
from core_trainer.optimizer import MasterOptimizer
from rlinsight.config import ModelSection, TrainerSection
from rlinsight.errors import CheckpointError

WEIGHTS, OPTIMIZER, STATE, BEST = "model.safetensors", "optimizer.safetensors", "trainer.json", "best"
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", STATE)
# Of a model's config.json: where it came from and which program wrote it, not what it is.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_CHUNK = 1 << 20
_HEAD = 4096  # bytes of each tensor that a fingerprint covers

Saver = Callable[[Path], object]  # writes one participant's files into the folder it is given


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation so far."""

    metric: str  # what was compared, e.g. loss
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The controller's part of a checkpoint; JSON types only. Random numbers are drawn from (seed, step): no state."""

    step: int  # last finished step
    sampler: dict[str, Any]  # data position, with a hash of the data
    fingerprint: dict[str, Any] = field(default_factory=dict)  # what the checkpoint belongs to, from ``fingerprint``
    kl_controller: dict[str, Any] | None = None  # None: the KL coefficient does not adapt
    best: Best | None = None  # None: nothing was validated yet
    validated: int | None = None  # step of the last validation that did not fail
    extra: dict[str, Any] = field(default_factory=dict)  # state of phases of one's own


def write(
    folder: Path, state: TrainerState, savers: Saver | Mapping[str, Saver], keep: int, keep_best: bool = False
) -> Path:
    """Write ``folder/step-NNNNNN``, which stays, and drop all but the ``keep`` highest steps. Replaces one of its step.

    ``savers`` maps subfolders to who writes them, ``"."`` being the checkpoint itself; a single saver is that one.
    ``keep_best`` marks the checkpoint of ``state.best`` when it is this one; the marked one stays until another is.
    """
    target = folder / f"step-{state.step:06d}"
    partial = folder / f".{target.name}.partial"
    try:
        _clear_leftovers(folder)
        partial.mkdir(parents=True)
        for subfolder, save in (savers if isinstance(savers, Mapping) else {".": savers}).items():
            (partial / subfolder).mkdir(parents=True, exist_ok=True)
            save(partial / subfolder)
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        files = {file.relative_to(partial).as_posix(): _content(file) for file in written}
        (partial / STATE).write_text(_as_json({**asdict(state), "files": files}))
        for path in [partial, *partial.rglob("*")]:
            _sync(path)
        _replace(target, partial)
        if keep_best and state.best is not None and state.best.step == state.step:
            marker = folder / f".{BEST}.partial"
            marker.write_text(target.name + "\n")
            _sync(marker)
            marker.rename(folder / BEST)
        _sync(folder)
    except BaseException as error:  # also when interrupted: nothing half-written stays; passed on
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _cannot_write(target, error) from None
        raise
    for old in checkpoints(folder)[:-keep]:
        if old not in (target, best(folder)):
            shutil.rmtree(_hide(old))
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, by step."""
    return sorted((path for path in folder.glob("step-[0-9]*") if path.is_dir()), key=_step)


def is_of(directory: Path | None, step: int) -> bool:
    """Whether ``directory`` is a checkpoint of ``step`` with all of its files."""
    try:
        return directory is not None and read_state(directory).step == step
    except CheckpointError:
        return False


def best(folder: Path) -> Path | None:
    """The checkpoint with the best validation; None when none is marked."""
    marker = folder / BEST
    return folder / marker.read_text().strip() if marker.is_file() else None


def improved(before: Best | None, metric: str, value: float, step: int, *, maximize: bool) -> Best | None:
    """The new best validation, or None when ``value`` does not beat ``before``, if that is of the same metric.

    NaN beats nothing.
    """
    if math.isnan(value):
        return None
    if before is None or before.metric != metric or (value > before.value if maximize else value < before.value):
        return Best(metric, value, step)
    return None


def fingerprint(model_dir: Path, **parts: Any) -> dict[str, Any]:
    """What a checkpoint belongs to: the model in ``model_dir``, and ``parts`` such as algorithm, critic, LoRA.

    Of the model, its config and a hash of its weights: adapters, and a KL to the model a run started from, mean
    something with those weights alone. ``parts`` are JSON values; None says that a run has no such part.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    model = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return {"model": model, "weights": _hash_of_weights(model_dir), **parts}


def resume(directory: Path, expected: Mapping[str, Any]) -> TrainerState:
    """The controller's part, once every file is found whole and the checkpoint to belong to what ``expected`` says.

    Reads every byte. Raises CheckpointError naming the file that is torn, or what differs.
    """
    state = read_state(directory)
    theirs, ours = _flat(state.fingerprint), _flat(dict(expected))
    different = [
        f"{key} is {json.dumps(theirs.get(key))} there and {json.dumps(ours.get(key))} in this run"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
    if different:
        raise CheckpointError(
            f"checkpoint {directory} belongs to another run: {', '.join(different)}; resume with the settings it was "
            "written with, or start a new run with model.source set to it"
        )
    check_content(directory)
    return state


def check_content(directory: Path) -> None:
    """Read every byte of a checkpoint. Raises CheckpointError naming the first file that is not as it was written."""
    read_state(directory)
    for name, content in json.loads((directory / STATE).read_text())["files"].items():
        found = _content(directory / name)
        if found != content:
            raise CheckpointError(
                f"checkpoint {directory} is damaged: the content of {name} has changed since it was written (CRC-32 "
                f"{found['crc32']}, not {content['crc32']}); take an older one"
            )


def read_state(directory: Path) -> TrainerState:
    """The controller's part. Raises CheckpointError when ``directory`` is no checkpoint, or a file of it is cut off."""
    try:
        content = json.loads((directory / STATE).read_text())
        sizes = {name: file["bytes"] for name, file in content.pop("files").items()}
        content["best"] = Best(**content["best"]) if content["best"] else None
        state = TrainerState(**content)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {STATE}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {STATE} is unreadable ({error!r})") from None
    for name, size in sizes.items():
        file = directory / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise CheckpointError(f"checkpoint {directory} is damaged: {name} {what}; take an older one")
    return state


def _content(file: Path) -> dict[str, Any]:
    """Size and checksum: finds what a disk or a copy damaged, not what somebody forged."""
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return {"bytes": file.stat().st_size, "crc32": f"{crc:08x}"}


def _hash_of_weights(model_dir: Path) -> str:
    """SHA-256 over names, types and shapes of all tensors and the first ``_HEAD`` bytes of each, 16 digits.

    Tells models of one architecture apart, such as two fine-tunes, in a few reads per tensor; a change past the
    beginning of its tensor goes unseen. Damage is not what it looks for.
    """
    digest = hashlib.sha256()
    for file in sorted(model_dir.glob("*.safetensors")):
        if file.name == OPTIMIZER:  # of a checkpoint taken as a model
            continue
        with file.open("rb") as stream:
            header = stream.read(int.from_bytes(stream.read(8), "little"))
            digest.update(header)
            tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            for begin, end in sorted(entry["data_offsets"] for entry in tensors):
                stream.seek(8 + len(header) + begin)
                digest.update(stream.read(min(_HEAD, end - begin)))
    return digest.hexdigest()[:16]


def _as_json(state: dict[str, Any]) -> str:
    try:
        return json.dumps(state, indent=2)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the trainer's state cannot be written as JSON ({error}); a controller's state_dict may hold dicts with "
            "string keys, lists, strings, numbers, booleans and None"
        ) from None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested mapping by dotted path. What is None is left out: it is the same as not being there."""
    if not isinstance(tree, dict):
        return {} if tree is None else {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return leaves


# A model with its optimizer -------------------------------------------------------------------------------------------


def load_policy(
    section: ModelSection, trainer: TrainerSection, model_dir: Path, resume: Path | None, seed: int
) -> tuple[PreTrainedModel, MasterOptimizer, int]:
    """Model to train in the compute dtype, its optimizer, and the policy_version: fresh, or from checkpoint ``resume``.

    With LoRA the model comes from ``model_dir`` in any case; ``seed`` draws fresh adapters. Raises ModelError or
    CheckpointError.
    """
    source = resume if resume is not None and section.lora is None else model_dir
    model = models.load_model(source, torch.float32)
    if section.lora is not None:
        lora.wrap(model, section.lora, seed)
        if resume is not None:
            lora.load(model, resume)
    models.to_accelerator(model)
    compute_dtype = models.compute_dtype(section.compute_dtype)
    # Masters are taken from full-precision weights, before the model's are rounded.
    optimizer = MasterOptimizer(model, trainer, torch.float32 if section.master_dtype == "float32" else compute_dtype)
    for parameter in model.parameters():  # not model.to(): rotary tables stay in float32
        parameter.data = parameter.data.to(compute_dtype)
    return model, optimizer, load_optimizer(resume, optimizer) if resume is not None else 0


def save_policy(
    directory: Path, model: PreTrainedModel, source: Path, optimizer: MasterOptimizer, policy_version: int
) -> None:
    """Write master weights, optimizer and the files of ``source`` that are not weights; of a LoRA model the adapters.

    ``source`` is the directory the model came from, which saved adapters name as the model they belong to.
    """
    try:
        masters = optimizer.named_master(model)  # tied weights appear once, as transformers expects
        if lora.adapted(model):
            lora.save(directory, model, masters, str(source))
        else:
            copy_model_files(source, directory)
            known = {id(parameter) for parameter in model.parameters()}
            state = model.state_dict(keep_vars=True)
            kept = {name: tensor for name, tensor in state.items() if id(tensor) not in known}
            save_file({**masters, **kept}, directory / WEIGHTS, metadata={"format": "pt"})
        save_optimizer(directory, optimizer, policy_version)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(directory, error) from None


def copy_model_files(source: Path, directory: Path) -> None:
    """Config, tokenizer and what else a model directory or a checkpoint holds besides weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copy(file, directory / file.name)


def save_optimizer(directory: Path, optimizer: MasterOptimizer, policy_version: int) -> None:
    """Write the moments, with the number of updates and the policy_version."""
    versions = {"num_updates": str(optimizer.num_updates), "policy_version": str(policy_version)}
    save_file(optimizer.state_dict(), directory / OPTIMIZER, metadata=versions)


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


# Files ----------------------------------------------------------------------------------------------------------------


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} cannot be written ({error}); free some space or set another run.dir")


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _hide(checkpoint: Path) -> Path:
    """Take a checkpoint, where there is one, away in one move: a killed process leaves no half of one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    if checkpoint.exists():
        checkpoint.rename(hidden)
    return hidden


def _replace(target: Path, partial: Path) -> None:
    """Move ``partial`` to ``target``; what was there before goes, or comes back when the move fails."""
    replaced = _hide(target)
    try:
        partial.rename(target)
    except BaseException:  # also when interrupted; passed on
        if replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _clear_leftovers(folder: Path) -> None:
    """Of a process that was killed: a whole checkpoint whose replacement never came is put back, the rest removed."""
    for hidden in folder.glob(".step-[0-9]*.removed"):
        target = folder / hidden.name.removeprefix(".").removesuffix(".removed")
        if not target.exists() and is_of(hidden, _step(target)):
            hidden.rename(target)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
