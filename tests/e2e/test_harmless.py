"""What telemetry does or suffers changes nothing of what is learned: whole runs of a tiny model, compared bitwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rlinsight import counts
from tests.e2e.test_launch import ROOT
from tests.e2e.test_train import MARK, Project

NOBODY_COLLECTS = """
import json, sys
from pathlib import Path
from core_trainer import controller
from core_trainer.job import Job
from rlinsight import telemetry
from rlinsight.config import load

class Quiet:
    def stage(self, text): pass
    def step(self, report): pass
    def stop_requested(self): return False

folder = Path(sys.argv[1])
config = load(Path(sys.argv[2]))
(folder / "run").mkdir(parents=True)
job = Job("down", 1, folder / "run", folder / "spool", "http://127.0.0.1:9")
telemetry.setup("controller", spool_dir=job.spool_dir, run_id="down", attempt=1, endpoint=job.collector,
                spool_bytes=config.telemetry.spool_bytes, metrics_interval_s=0.1, system=True)
summary = controller.run(config, job, Quiet())
counts = telemetry._recorder.exporter.counts
delivered = telemetry.shutdown(1)
print(json.dumps({"rewards": summary.curve, "delivered": delivered, **counts.report()}))
"""


def weights(run: Path) -> dict[str, Any]:
    (file,) = run.glob("checkpoints/step-000003/model.safetensors")
    return load_file(file)


def test_results_are_the_same_recorded_unrecorded_and_uncollected(tmp_path: Path, tiny_model: Path) -> None:
    """Everything on, telemetry off, and no collector for the whole run with a spool that is full: the same weights."""
    project = Project(tmp_path, tiny_model)
    project.tree["trainer"]["total_steps"] = 3
    project.tree["telemetry"] |= {"metrics_interval_s": 0.1}
    project.train("run.name=recorded")
    project.tree["telemetry"] = {"store": str(tmp_path / "none.duckdb"), "enabled": False}
    project.train("run.name=unrecorded")
    assert not (tmp_path / "none.duckdb").exists()
    project.tree["telemetry"] = {"spool_bytes": 1024**2, "metrics_interval_s": 0.1}
    (tmp_path / "down.json").write_text(json.dumps(project.tree))
    result = subprocess.run(
        [sys.executable, "-c", NOBODY_COLLECTS, str(tmp_path / "down"), str(tmp_path / "down.json")],
        cwd=tmp_path, env=os.environ | {MARK: str(tmp_path), "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    down = json.loads(result.stdout.splitlines()[-1])
    assert not down["delivered"]
    on, off = (next((tmp_path / "runs").glob(f"{name}-*")) for name in ("recorded", "unrecorded"))
    expected = weights(off)
    for run in (on, tmp_path / "down" / "run"):
        found = weights(run)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in expected)
    rewards = [row["r"] for row in project.rows("SELECT reward_mean AS r FROM train_metrics ORDER BY step")]
    assert rewards == down["rewards"]
    for leftover in (tmp_path / "down" / "spool").iterdir():
        counts.remove(leftover.name)
