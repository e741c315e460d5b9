"""A run's folder is created, found again and continued only where that is the same experiment."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from rlinsight import config, run_dir
from rlinsight.errors import CheckpointError, ConfigError

TREE = {
    "run": {"name": "r"},
    "model": {"source": "some/model"},
    "data": {"train": "data.jsonl"},
    "reward": {"functions": [{"type": "numeric"}]},
    "trainer": {"total_steps": 10},
}


def settings(tmp_path: Path, **sections: dict) -> config.Config:
    tree = {**TREE, **{name: {**TREE.get(name, {}), **values} for name, values in sections.items()}}
    tree["run"] = {**tree["run"], "dir": str(tmp_path / "runs")}
    return config.parse(tree)


def stopped_run(tmp_path: Path, step: int | None = 4, **sections: dict) -> run_dir.RunDir:
    """A run whose process is gone, with a checkpoint at ``step``."""
    made = settings(tmp_path, **sections)
    run = run_dir.create(made)
    run.begin_attempt(made)
    file = run.path / "attempt.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"started_ns": 1}))
    if step is not None:
        (run.path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    return run


def test_a_new_run_has_a_sortable_id_and_its_resolved_config(tmp_path: Path) -> None:
    """The id tells name and time; config.yaml holds every default and loads to the same hash."""
    run = run_dir.create(settings(tmp_path))
    attempt = run.begin_attempt(settings(tmp_path))
    assert re.fullmatch(r"r-\d{8}-\d{6}-[0-9a-f]{4}", run.run_id)
    assert (attempt.attempt, attempt.pid, attempt.is_alive()) == (1, os.getpid(), True)
    assert config.load(run.path / "config.yaml").hash() == settings(tmp_path).hash()


def test_each_start_is_the_next_attempt(tmp_path: Path) -> None:
    """Attempts count up from what the folder says."""
    run = stopped_run(tmp_path)
    assert run_dir.find(settings(tmp_path), None).begin_attempt(settings(tmp_path)).attempt == 2
    assert run.last_attempt is not None
    assert run.last_attempt.attempt == 2


def test_newest_checkpoint_goes_by_number_and_skips_unfinished_ones(tmp_path: Path) -> None:
    """step-10 is newer than step-9, and a folder still being written does not count."""
    run = stopped_run(tmp_path, step=9)
    for name in ("step-10", "step-11.new", "step-x"):
        (run.path / "checkpoints" / name).mkdir()
    assert run.newest_checkpoint() == run.path / "checkpoints" / "step-10"


def test_runs_are_found_by_name_id_and_folder(tmp_path: Path) -> None:
    """Without an id the newest run of the same name is taken, never one whose name merely starts alike."""
    run = stopped_run(tmp_path)
    other = tmp_path / "runs" / "r-b-20990101-000000-abcd"
    other.mkdir()
    (other / "config.yaml").write_text("")
    same = settings(tmp_path)
    assert run_dir.find(same, None).path == run.path
    assert run_dir.find(same, run.run_id).path == run.path
    assert run_dir.find(same, str(run.path)).path == run.path


def test_nothing_to_resume_is_said_plainly(tmp_path: Path) -> None:
    """No run, an unknown id and a run without a checkpoint are three different answers."""
    with pytest.raises(CheckpointError, match="no run called 'r' under"):
        run_dir.find(settings(tmp_path), None)
    run = stopped_run(tmp_path, step=None)
    with pytest.raises(CheckpointError, match="no run 'nope' under"):
        run_dir.find(settings(tmp_path), "nope")
    with pytest.raises(CheckpointError, match=f"run {run.run_id} has no checkpoint"):
        run_dir.find(settings(tmp_path), None)


def test_a_run_that_still_trains_is_not_resumed(tmp_path: Path) -> None:
    """Two processes never train the same run."""
    run = stopped_run(tmp_path)
    run.begin_attempt(settings(tmp_path))
    with pytest.raises(CheckpointError, match=f"still training as pid {os.getpid()}"):
        run_dir.find(settings(tmp_path), None)


def test_a_finished_run_needs_more_steps(tmp_path: Path) -> None:
    """Resuming at or past total_steps is refused with the setting that makes sense of it."""
    stopped_run(tmp_path, step=10)
    with pytest.raises(CheckpointError, match=r"has done 10 steps and trainer.total_steps=10"):
        run_dir.find(settings(tmp_path), None)
    assert run_dir.find(settings(tmp_path, trainer={"total_steps": 11}), None)


def test_a_finished_run_whose_last_validation_failed_is_resumed_for_it(tmp_path: Path) -> None:
    """Unless it validates nothing, or its checkpoint does not tell."""
    validated = {"validation": {"datasets": [{"source": "held_out.jsonl"}]}}
    run = stopped_run(tmp_path, step=10, **validated)
    state = run.path / "checkpoints" / "step-10" / "trainer.json"
    for content in (None, {"validated": 10}):
        if content is not None:
            state.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="has done 10 steps"):
            run_dir.find(settings(tmp_path, **validated), None)
    state.write_text(json.dumps({"validated": 9}))
    assert run_dir.find(settings(tmp_path, **validated), None).path == run.path
    with pytest.raises(CheckpointError, match="has done 10 steps"):
        run_dir.find(settings(tmp_path, trainer={"total_steps": 9}, **validated), None)
    with pytest.raises(CheckpointError, match="has done 10 steps"):
        run_dir.find(settings(tmp_path), None)


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"group_size": 4}},
        {"trainer": {"learning_rate": 1e-3}},
        {"run": {"seed": 7}},
        {"model": {"source": "b"}},
    ],
)
def test_a_config_that_trains_something_else_is_refused(tmp_path: Path, change: dict) -> None:
    """The refusal names the key with both values, and both config hashes."""
    run = stopped_run(tmp_path)
    changed = settings(tmp_path, **change)
    section, key = next((section, key) for section, values in change.items() for key in values)
    with pytest.raises(CheckpointError) as refusal:
        run_dir.find(changed, None)
    assert f"{section}.{key}: " in str(refusal.value)
    assert changed.hash()[:12] in str(refusal.value)
    assert settings(tmp_path).hash()[:12] in str(refusal.value)
    assert run.run_id in str(refusal.value)


def test_settings_that_do_not_change_what_is_learned_may_differ(tmp_path: Path) -> None:
    """A resumed run may train longer, checkpoint more often, keep the best one, use less memory, and record less."""
    validated = {"validation": {"datasets": [{"source": "held_out.jsonl"}]}}
    stopped_run(tmp_path, **validated)
    trainer = {"total_steps": 99, "checkpoint_every": 5, "keep_best": True, "micro_batch_tokens": 64}
    assert run_dir.find(settings(tmp_path, trainer=trainer, telemetry={"text": "off"}, **validated), None)


def test_spools_of_dead_runs_into_the_same_store_are_found(tmp_path: Path) -> None:
    """What a killed run could not deliver is picked up later; living runs and other stores are left alone."""
    dead = stopped_run(tmp_path)
    run_dir.create(settings(tmp_path)).begin_attempt(settings(tmp_path))
    assert run_dir.abandoned_spools(settings(tmp_path)) == [dead.spool]
    assert run_dir.abandoned_spools(settings(tmp_path, telemetry={"store": str(tmp_path / "o.duckdb")})) == []


def test_an_unwritable_run_folder_is_one_clear_error(tmp_path: Path) -> None:
    """The error names the folder and the setting."""
    (tmp_path / "runs").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"run.dir=.*cannot create"):
        run_dir.create(settings(tmp_path))
