"""Checkpoints are whole or not there, and say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core_trainer import checkpoint, models
from core_trainer.checkpoint import TrainerState
from core_trainer.optimizer import MasterOptimizer
from rlinsight.config import TrainerSection
from rlinsight.errors import CheckpointError


def write(folder: Path, step: int, content: str = "x", keep: int = 2) -> Path:
    """A checkpoint of one small file."""
    return checkpoint.write(
        folder, TrainerState(step, {"epoch": 0}), lambda d: (d / "weights").write_text(content), keep=keep
    )


def test_the_newest_are_kept_and_states_read_back(tmp_path: Path) -> None:
    """Older ones go, a step written again is replaced, and nothing partial is left."""
    for step in (1, 2, 10):
        write(tmp_path, step)
    again = write(tmp_path, 10, "new")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000002", "step-000010"]
    assert (again / "weights").read_text() == "new"
    assert checkpoint.read_state(again) == TrainerState(10, {"epoch": 0})


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    """A full disk is one clear error; the checkpoints that were there stay, and no partial one is taken for whole."""
    write(tmp_path, 1)

    def fill_up(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left"):
        checkpoint.write(tmp_path, TrainerState(2, {}), fill_up, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_damage_is_named(tmp_path: Path) -> None:
    """A cut file, a missing file, an unreadable state and a folder that is no checkpoint are told apart."""
    path = write(tmp_path, 1, "0123456789")
    (path / "weights").write_text("0123")
    with pytest.raises(CheckpointError, match="weights has 4 bytes, not 10"):
        checkpoint.read_state(path)
    (path / "weights").unlink()
    with pytest.raises(CheckpointError, match="weights is missing"):
        checkpoint.read_state(path)
    (path / checkpoint.STATE).write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer\.json is unreadable"):
        checkpoint.read_state(path)
    (path / checkpoint.STATE).unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.read_state(path)


def test_the_folder_is_a_model_for_transformers(tmp_path: Path, tiny_model: Path) -> None:
    """Master weights, tokenizer and config load with plain transformers; moments come back bit for bit."""
    model = models.load_model(tiny_model, torch.float32)
    optimizer = MasterOptimizer(model, TrainerSection(learning_rate=1e-3), torch.float32)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.accumulate()
    optimizer.step(1)
    path = checkpoint.write(
        tmp_path, TrainerState(1, {}), lambda d: checkpoint.save_policy(d, model, tiny_model, optimizer, 1), keep=1
    )
    loaded = models.load_model(path, torch.float32)
    models.load_tokenizer(path)
    for name, master in optimizer.named_master(model).items():
        assert torch.equal(dict(loaded.named_parameters())[name], master), name
    twin = MasterOptimizer(loaded, TrainerSection(learning_rate=1e-3), torch.float32)
    assert checkpoint.load_optimizer(path, twin) == 1
    for key, value in optimizer.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value), key
    assert json.loads((path / checkpoint.STATE).read_text())["files"]["model.safetensors"] > 0
