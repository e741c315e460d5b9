"""`rlinsight sft` on a tiny model, from the command line to the store and into `rlinsight train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from rlinsight import store
from rlinsight.errors import StoreError
from tests.e2e.test_launch import assert_linked, heed_signals
from tests.e2e.test_train import COMMAND, Project

ROWS = [{"prompt": f"{a} + {b}?", "answer": f"It is {a + b}."} for a in range(5) for b in range(4)]


def tree(project: Project) -> dict[str, Any]:
    """A supervised config: 16 examples learnt from, 4 held out."""
    data = project.path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "run": {"name": "warm", "dir": str(project.path / "runs")},
        "model": project.tree["model"],
        "data": {"train": str(data), "validation_fraction": 0.2},
        "trainer": {
            "epochs": 2,
            "prompts_per_step": 4,
            "learning_rate": 2e-2,
            "validate_every": 1,
            "keep_best": True,
            "keep_checkpoints": 1,
        },
        "telemetry": {"store": str(project.store)},
    }


def sft(project: Project, config: dict[str, Any], *arguments: str, exit_code: int = 0) -> str:
    file = project.path / "sft.yaml"
    file.write_text(yaml.safe_dump(config))
    result = subprocess.run(
        [COMMAND, "sft", file, *arguments], cwd=project.path, text=True, capture_output=True, timeout=600
    )
    assert result.returncode == exit_code, result.stdout + result.stderr
    if exit_code == 0:
        assert_linked(project.store)
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Project:
    """A folder in which a supervised run was made, with validation after each step and its best checkpoint kept."""
    project = Project(tmp_path_factory.mktemp("warm"), tiny_model)
    out = sft(project, tree(project))
    assert "step 8/8  loss" in out
    assert "validation loss" in out
    return project


def test_a_supervised_run_is_recorded(warm: Project) -> None:
    """Loss falls; steps and validations are stored, with nothing lost."""
    (row,) = warm.rows("SELECT status, algorithm, steps_done, last_reward FROM runs WHERE name = 'warm'")
    assert row == {"status": "finished", "algorithm": "sft", "steps_done": 8, "last_reward": None}
    of_run = f"run_id = '{warm.run('warm').name}'"
    steps = warm.rows(f"SELECT * FROM train_metrics WHERE {of_run} ORDER BY step")
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert steps[-1]["loss_total"] < steps[0]["loss_total"] - 1
    assert all(row["grad_norm"] and row["tokens_per_s"] and row["num_tokens"] for row in steps)
    evals = warm.rows(f"SELECT step, metric, value, num_samples FROM evals WHERE {of_run} ORDER BY step")
    assert [(row["step"], row["metric"], row["num_samples"]) for row in evals] == [(s, "loss", 4) for s in range(9)]
    assert evals[-1]["value"] < evals[0]["value"] - 1
    assert all(row["fraction"] >= 0.9 for row in warm.rows(f"SELECT fraction FROM v_phase_coverage WHERE {of_run}"))
    health = warm.rows(f"SELECT dropped, missing FROM health WHERE {of_run}")
    assert health == [{"dropped": 0, "missing": 0}] * 2  # controller and worker


def test_a_supervised_run_is_resumed_exported_and_trained_on(warm: Project) -> None:
    """A resume equals one go bit for bit; train starts from the checkpoint, which is exported as it is."""
    config, whole = tree(warm), warm.run("warm")
    steps_instead = ["run.name=cut", "trainer.epochs=1"]
    sft(warm, config, *steps_instead, "trainer.total_steps=3")
    out = sft(warm, config, *steps_instead, "trainer.total_steps=8", "--resume")
    assert "attempt 2" in out
    mine, theirs = (load_file(warm.run(n) / "checkpoints/step-000008/model.safetensors") for n in ("warm", "cut"))
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)

    out = sft(warm, config, "--resume", whole.name, exit_code=1)
    assert "has done 8 of 8 steps" in out
    out = warm.train("--resume", whole.name, "trainer.total_steps=20", exit_code=1)
    assert "is one of `rlinsight sft`; resume it with that command" in out

    warm.train("run.name=rl", f"model.source={whole / 'checkpoints/step-000008'}", "trainer.total_steps=1")
    (row,) = warm.rows("SELECT status FROM runs WHERE name = 'rl'")
    assert row == {"status": "finished"}

    exported = subprocess.run(
        [COMMAND, "export-model", whole / "checkpoints/step-000008", warm.path / "model", "--dtype", "float32"],
        text=True,
        capture_output=True,
    )
    assert exported.returncode == 0, exported.stderr
    saved = load_file(warm.path / "model" / "model.safetensors")
    assert all(np.array_equal(mine[key], saved[key]) for key in saved)


def test_ranks_change_nothing_and_the_best_stays(warm: Project) -> None:
    """Two workers take the same steps up to summation order; the best validation's checkpoint outlives later ones."""
    sft(warm, tree(warm), "run.name=two", "trainer.num_workers=2")
    losses = warm.rows(
        "SELECT one.step, one.loss_total AS a, two.loss_total AS b FROM train_metrics one JOIN train_metrics two "
        "USING (step) WHERE one.run_id LIKE 'warm%' AND two.run_id LIKE 'two%' ORDER BY step"
    )
    assert len(losses) == 8
    assert losses[0]["a"] == pytest.approx(losses[0]["b"], rel=1e-5)
    assert losses[-1]["a"] == pytest.approx(losses[-1]["b"], rel=0.1)
    for name in ("warm", "two"):
        folder = warm.run(name) / "checkpoints"
        values = warm.rows(
            f"SELECT step, value FROM evals WHERE run_id LIKE '{name}%' AND step > 0 ORDER BY value, step LIMIT 1"
        )
        best = f"step-{values[0]['step']:06d}"
        assert (folder / "best").read_text() == best + "\n"
        kept = sorted(path.name for path in folder.iterdir() if path.is_dir())
        assert kept == sorted({best, "step-000008"})


def test_ctrl_c_leaves_a_resumable_run(tmp_path: Path, tiny_model: Path) -> None:
    """One Ctrl-C finishes the step, writes a checkpoint, exits with 130 and says how to go on."""
    project = Project(tmp_path, tiny_model)
    config = tree(project)
    config["trainer"] |= {"epochs": 500}
    file = project.path / "sft.yaml"
    file.write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [COMMAND, "sft", file],
        cwd=project.path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
        start_new_session=True,
    )
    until = time.monotonic() + 600
    while time.monotonic() < until:
        try:
            if store.query("SELECT 1 FROM steps WHERE step >= 2", store=project.store).num_rows:
                break
        except StoreError:
            pass  # not there yet
        time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, out + err
    assert "rlinsight sft " in out
    assert "--resume" in out
    (row,) = project.rows("SELECT status, steps_done FROM runs")
    assert row["status"] == "interrupted"
    sft(project, config, "--resume", f"trainer.total_steps={row['steps_done'] + 2}", "trainer.epochs=1")
    (row,) = project.rows("SELECT status, attempts FROM runs")
    assert row == {"status": "finished", "attempts": 2}
