"""Checkpoints are whole or not there, and say what is wrong with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core_trainer import checkpoint, models
from core_trainer.checkpoint import TrainerState
from core_trainer.optimizer import MasterOptimizer
from rlinsight.config import TrainerSection
from rlinsight.errors import CheckpointError
from tests.tiny import make_tiny_model


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


def test_a_checkpoint_that_cannot_be_replaced_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is complete, but the move to its name fails after the old one was moved away."""
    path = write(tmp_path, 1, "old")
    plain = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return plain(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(tmp_path, 1, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    assert (path / "weights").read_text() == "old"
    checkpoint.check_content(path)


def test_what_was_just_written_stays(tmp_path: Path) -> None:
    """Also where a run that went back finds higher steps; among the others steps count, not names."""
    for step in (999_999, 1_000_000, 1_000_001):
        write(tmp_path, step)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]
    path = write(tmp_path, 3)
    assert checkpoint.read_state(path).step == 3
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000003", "step-1000000", "step-1000001"]
    write(tmp_path, 1_000_002)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-1000001", "step-1000002"]


def test_what_is_whole_need_not_be_written_again(tmp_path: Path) -> None:
    """Another step, a cut file and no folder are no checkpoint of the step."""
    path = write(tmp_path, 4, "0123")
    assert checkpoint.is_of(path, 4)
    assert not checkpoint.is_of(path, 5)
    assert not checkpoint.is_of(None, 4)
    (path / "weights").write_text("01")
    assert not checkpoint.is_of(path, 4)


def test_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    """With what may be in it, and nothing is left behind."""
    with pytest.raises(CheckpointError, match=r"cannot be written as JSON .*set.* state_dict may hold"):
        checkpoint.write(tmp_path, TrainerState(1, {}, extra={"seen": {1, 2}}), lambda d: None, keep=1)
    assert list(tmp_path.iterdir()) == []


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
    (path / checkpoint.STATE).write_text('{"step": 1}')
    with pytest.raises(CheckpointError, match=r"trainer\.json is unreadable"):
        checkpoint.read_state(path)
    (path / checkpoint.STATE).unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.read_state(path)


def test_every_participant_writes_and_is_checked(tmp_path: Path) -> None:
    """A critic has a folder of its own; one changed bit in it, size unchanged, is found on resume and named."""
    savers = {
        ".": lambda d: (d / "weights").write_text("policy"),
        "critic": lambda d: (d / "weights").write_text("critic"),
    }
    path = checkpoint.write(tmp_path, TrainerState(1, {}), savers, keep=1)
    assert (path / "weights").read_text() == "policy"
    assert (path / "critic" / "weights").read_text() == "critic"
    assert checkpoint.resume(path, {}) == TrainerState(1, {})
    (path / "critic" / "weights").write_text("Critic")
    with pytest.raises(CheckpointError, match=r"damaged: the content of critic/weights has changed .*CRC-32"):
        checkpoint.resume(path, {})


def test_the_whole_state_reads_back(tmp_path: Path) -> None:
    """Controller, best validation, data position and the state of other phases survive as they were."""
    state = TrainerState(
        step=3,
        sampler={"epoch": 1, "position": 2, "fingerprint": "ab"},
        fingerprint={"model": {"hidden_size": 64}, "critic": None},
        kl_controller={"coef": 0.1},
        best=checkpoint.Best("mean@1", 0.5, 2),
        extra={"teacher": {"round": 4}},
    )
    path = checkpoint.write(tmp_path, state, lambda d: None, keep=1)
    assert checkpoint.resume(path, state.fingerprint) == state


def test_a_foreign_checkpoint_is_refused_by_what_differs(tmp_path: Path, tiny_model: Path) -> None:
    """Another architecture, another precision, a critic too many and an adapter too few are each named."""
    mine = checkpoint.fingerprint(tiny_model, algorithm="ppo", critic={"type": "model"}, lora=None, dtype="float32")
    path = checkpoint.write(tmp_path, TrainerState(1, {}, mine), lambda d: None, keep=1)
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    theirs = checkpoint.fingerprint(other, algorithm="grpo", critic=None, lora={"rank": 8}, dtype="bfloat16")
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(path, theirs)
    for part in (
        'algorithm is "ppo" there and "grpo" in this run',
        'critic.type is "model" there and null in this run',
        'dtype is "float32" there and "bfloat16" in this run',
        "lora.rank is null there and 8 in this run",
        "model.hidden_size is 64 there and 32 in this run",
    ):
        assert part in str(refused.value)
    assert checkpoint.resume(path, mine).step == 1
    assert checkpoint.fingerprint(path.parent / "other")["model"]["hidden_size"] == 32


def test_other_weights_of_the_same_architecture_are_foreign(tmp_path: Path, tiny_model: Path) -> None:
    """One number of one tensor tells two models apart; a copy, also with another run's moments in it, is the same."""
    mine = checkpoint.fingerprint(tiny_model)
    path = checkpoint.write(tmp_path / "c", TrainerState(1, {}, mine), lambda d: None, keep=1)
    twin = tmp_path / "twin"
    shutil.copytree(tiny_model, twin)
    save_file({"moments": torch.ones(3)}, twin / checkpoint.OPTIMIZER)
    assert checkpoint.resume(path, checkpoint.fingerprint(twin)).step == 1
    weights = load_file(twin / checkpoint.WEIGHTS)
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, twin / checkpoint.WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r'belongs to another run: weights is "\w{16}" there and "\w{16}" in this'
    ):
        checkpoint.resume(path, checkpoint.fingerprint(twin))


def test_the_best_is_kept_until_beaten(tmp_path: Path) -> None:
    """The marked checkpoint outlives newer ones, a worse validation moves no mark, a better one frees the old."""
    best = None
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 1.0, 2.5], start=1):
        best = checkpoint.improved(best, "loss", loss, step, maximize=False) or best
        state = TrainerState(step, {}, best=best)
        checkpoint.write(tmp_path, state, lambda d: None, keep=1, keep_best=True)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000002", "step-000006"]
    assert checkpoint.best(tmp_path) == tmp_path / "step-000002"
    best = checkpoint.improved(best, "loss", 0.5, 7, maximize=False)
    checkpoint.write(tmp_path, TrainerState(7, {}, best=best), lambda d: None, keep=1, keep_best=True)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000007"]
    assert (tmp_path / checkpoint.BEST).read_text() == "step-000007\n"
    assert checkpoint.improved(best, "loss", 0.4, 8, maximize=True) is None
    assert checkpoint.improved(None, "loss", 0.4, 8, maximize=True) == checkpoint.Best("loss", 0.4, 8)
    assert checkpoint.improved(best, "mean@1", 0.4, 8, maximize=True) == checkpoint.Best("mean@1", 0.4, 8)


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    """Half-written and half-removed folders are taken for no checkpoint, and the next write clears them."""
    write(tmp_path, 1)
    for name in (".step-000002.partial", ".step-000000.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000001"]
    write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


def test_what_a_killed_process_moved_away_comes_back(tmp_path: Path) -> None:
    """A whole checkpoint whose replacement never came; not where it came, and not one half removed."""
    for step in (1, 2, 3):
        write(tmp_path, step, keep=9)
    for step in (1, 2, 3):
        shutil.copytree(tmp_path / f"step-{step:06d}", tmp_path / f".step-{step:06d}.removed")
    shutil.rmtree(tmp_path / "step-000001")
    shutil.rmtree(tmp_path / "step-000002")
    (tmp_path / ".step-000002.removed" / "weights").unlink()
    (tmp_path / ".step-000003.removed" / "weights").write_text("y")
    write(tmp_path, 4, keep=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003", "step-000004"]
    assert (tmp_path / "step-000003" / "weights").read_text() == "x"


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
    assert json.loads((path / checkpoint.STATE).read_text())["files"]["model.safetensors"]["bytes"] > 0
