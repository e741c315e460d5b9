"""The loop of a supervised run, its worker in this process instead of Ray: validation, checkpoints, stops, failures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core_trainer import checkpoint, sft
from core_trainer.job import Job, RunSummary, StepReport
from core_trainer.workers.base import Place
from rlinsight import config, telemetry
from rlinsight.config import SftConfig
from rlinsight.errors import CheckpointError, TrainingError


class Group:
    """A worker group of one, called directly."""

    fail_at: int | None = None  # step whose update is refused

    def __init__(self, worker: Any, role: str, world_size: int, *args: Any, num_gpus: float) -> None:
        self.worker = worker(Place(role, 0, 1), *args)

    def call(self, method: str, *args: Any, step: int | None = None, timeout_s: float | None = None) -> list[Any]:
        assert (timeout_s is not None) == (method == "start")
        if method == "optim_step" and step == Group.fail_at:
            raise TrainingError("the gradient is not finite")
        torch.set_num_threads(1)
        return [getattr(self.worker, method)(*args)]

    def scatter(self, method: str, parts: Sequence[Any], step: int | None = None) -> list[Any]:
        return self.call(method, parts[0], step=step)

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return self.call(method, *args)[0]

    def split_groups(self, samples: Sequence[Any]) -> list[Sequence[Any]]:
        return [samples]

    def close(self, timeout_s: float) -> None:
        """Nothing was started."""


class Watcher:
    """A reporter that remembers, and asks for a stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after, self.steps, self.stages = stop_after, [], []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, report: StepReport) -> None:
        self.steps.append((report.step, report.total_steps, report.metrics["loss/total"]))

    def stop_requested(self) -> bool:
        return self.stop_after is not None and len(self.steps) >= self.stop_after


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sft, "WorkerGroup", Group)
    monkeypatch.setattr(sft.SftCluster, "_start_ray", lambda *_: None)
    monkeypatch.setattr(Group, "fail_at", None)
    yield
    telemetry.shutdown(0)


def train(
    path: Path, model: Path, watcher: Watcher, name: str = "run", resume: Path | None = None, **trainer: Any
) -> RunSummary:
    """16 examples learnt from and 4 held out."""
    data = path / "sums.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"{a} + {b}?", "answer": f"It is {a + b}."}) + "\n"
            for a in range(5)
            for b in range(4)
        )
    )
    tree = {
        "model": {"source": str(model), "compute_dtype": "float32"},
        "data": {"train": str(data), "validation_fraction": 0.2},
        "trainer": {"prompts_per_step": 8, "learning_rate": 5e-3, "validate_every": 1, **trainer},
        "telemetry": {"enabled": False},
    }
    job = Job(run_id="r", attempt=1, run_dir=path / name, spool_dir=path / "spool", collector=None, resume=resume)
    return sft.run(config.parse(tree, "config", SftConfig), job, watcher)


def test_a_stop_and_a_resume_equal_one_go(tmp_path: Path, tiny_model: Path) -> None:
    """Losses, the best validation and every weight are the same; a finished run is not resumed."""
    whole, first, second = Watcher(), Watcher(stop_after=3), Watcher()
    done = train(tmp_path, tiny_model, whole, epochs=3)
    assert (done.status, done.step) == ("finished", 6)
    cut = train(tmp_path, tiny_model, first, "cut", epochs=3)
    assert (cut.status, cut.step) == ("interrupted", 3)
    resumed = train(tmp_path, tiny_model, second, "cut", cut.checkpoint, epochs=3)
    assert first.steps + second.steps == whole.steps
    assert cut.curve + resumed.curve == done.curve
    assert done.curve[-1] < done.curve[0] - 1
    assert done.checkpoint is not None
    assert resumed.checkpoint is not None
    assert checkpoint.read_state(resumed.checkpoint) == checkpoint.read_state(done.checkpoint)
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        mine, theirs = load_file(resumed.checkpoint / name), load_file(done.checkpoint / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    with pytest.raises(CheckpointError, match="has done 6 of 6 steps"):
        train(tmp_path, tiny_model, Watcher(), "cut", resumed.checkpoint, epochs=3)
    with pytest.raises(CheckpointError, match=r'algorithm is "sft" there and "grpo" in this run'):
        checkpoint.resume(resumed.checkpoint, checkpoint.fingerprint(tiny_model, algorithm="grpo"))


def test_the_best_validation_is_kept(tmp_path: Path, tiny_model: Path) -> None:
    """With one checkpoint kept, the one with the lowest validation loss stays beside the last."""
    watcher = Watcher()
    train(tmp_path, tiny_model, watcher, total_steps=6, learning_rate=5e-2, keep_best=True, keep_checkpoints=1)
    said = [text.split() for text in watcher.stages if text.startswith("validation loss")]
    values = {int(words[-1]): float(words[2]) for words in said}
    assert list(values) == list(range(7))
    folder = tmp_path / "run" / "checkpoints"
    best = checkpoint.best(folder)
    assert best is not None
    assert best.name == f"step-{min(values, key=lambda step: values[step]):06d}"
    assert {path.name for path in checkpoint.checkpoints(folder)} == {best.name, "step-000006"}


def test_validation_is_every_so_many_steps(tmp_path: Path, tiny_model: Path) -> None:
    """Before training, at each multiple, and after the last step, which is none."""
    watcher = Watcher()
    train(tmp_path, tiny_model, watcher, total_steps=5, validate_every=2)
    said = [text for text in watcher.stages if text.startswith("validation loss")]
    assert [int(text.split()[-1]) for text in said] == [0, 2, 4, 5]


def test_initial_weights_that_stay_the_best_are_kept(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 0 stays beside the last, and no step is written twice."""
    losses = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(
        Group,
        "scatter",
        lambda self, method, parts, step=None: (
            [next(losses) * sum(sample.num_tokens for sample in parts[0])]
            if method == "loss"
            else self.call(method, parts[0], step=step)
        ),
    )
    watcher = Watcher()
    train(tmp_path, tiny_model, watcher, total_steps=2, keep_best=True, keep_checkpoints=1, checkpoint_every=2)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["step-000000", "step-000002"]
    assert checkpoint.best(folder) == folder / "step-000000"
    assert [text for text in watcher.stages if text.startswith("writing")] == [
        f"writing checkpoint of step {step}" for step in (0, 2)
    ]


def test_a_failed_step_leaves_the_last_whole_one(tmp_path: Path, tiny_model: Path) -> None:
    """An update that is refused changes nothing: the checkpoint is of the step before, and the run goes on from it."""
    whole = Watcher()
    train(tmp_path, tiny_model, whole, "whole", total_steps=4)
    Group.fail_at = 3
    first, second = Watcher(), Watcher()
    with pytest.raises(TrainingError):
        train(tmp_path, tiny_model, first, total_steps=4)
    (left,) = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    assert left.name == "step-000002"
    Group.fail_at = None
    train(tmp_path, tiny_model, second, resume=left, total_steps=4)
    assert first.steps + second.steps == whole.steps
