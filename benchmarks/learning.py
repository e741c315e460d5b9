"""Does every recipe learn? Trains a tiny random model with each preset on a task it can solve, over several seeds.

    python benchmarks/learning.py [--presets grpo ppo ...] [--seeds 1 2 3] [--steps 50] [--folder DIR]

The task: answer arithmetic whose result is odd with the letter e, and other arithmetic with the letter o, eight of them
in twelve tokens. The model starts from random weights and scores about 0.25 by chance; 1 is a perfect answer, and a
policy that ignores the prompt can reach 0.5. The KL penalty of the recipes that have one is off: it would hold the
policy to a model that knows nothing. ReMax, whose only baseline is the reward of one greedy response, learns from a
noisier signal and has twice the steps. A recipe solves it when the reward of its last five steps is at least 0.8
in the mean over seeds. ``--folder`` keeps the runs, and those that are whole there are not trained again; several
processes can work on different presets in one. Results go to benchmarks/results/learning.md. Uses the ``rlinsight``
command as a user would, and SQL to read the outcome.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import psutil
import yaml

from rlinsight import store
from rlinsight.config.presets import Preset

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.tiny import make_tiny_model  # noqa: E402  # the model of the tests, from the repository's root

SOLVED = 0.8
WINDOW = 5  # steps at the beginning and at the end
REWARD = """
def letters(prompt, response, answer):
    return min(response.count("e" if int(answer) % 2 else "o") / 8, 1.0)
"""
CURVE = """
SELECT list(m.reward_mean ORDER BY m.step) AS rewards, sum(s.end_ns - s.start_ns) / 1e9 AS seconds
FROM train_metrics m JOIN steps s USING (run_id, step) WHERE m.run_id LIKE ? || '-%'
GROUP BY m.run_id ORDER BY count(*) DESC, m.run_id DESC LIMIT 1
"""


def main() -> None:
    """Train, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", default=list(get_args(Preset)), choices=get_args(Preset))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="keep the runs here and take those that are whole from it")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/learning.md")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        model = folder / "model"
        if not model.exists():
            make_tiny_model(model)
        (folder / "reward.py").write_text(REWARD)
        for preset in options.presets:
            steps = options.steps * (2 if preset == "remax" else 1)
            runs = [train(folder, model, preset, seed, steps) for seed in options.seeds]
            rows.append((preset, runs))
            print(row(preset, runs), file=sys.stderr)
    options.output.write_text(report(rows, options))
    print(options.output.read_text())


def train(folder: Path, model: Path, preset: str, seed: int, steps: int) -> dict[str, Any]:
    """One run; rewards by step and the seconds of all steps."""
    name = f"{preset}-{seed}"
    tree = {
        "run": {"name": name, "dir": str(folder / "runs"), "seed": seed},
        "model": {"source": str(model)},
        "data": {
            "train": "reasoning_gym:basic_arithmetic",
            "task_args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]},
            "size": 256,
        },
        "reward": {"functions": [{"type": "function", "function": "reward.py:letters"}]},
        "rollout": {"group_size": 8, "max_new_tokens": 12},
        "algorithm": {"name": preset, "kl": None},
        "trainer": {"total_steps": steps, "prompts_per_step": 16, "learning_rate": 2e-3, "warmup_steps": 5},
        "telemetry": {"store": str(folder / "store.duckdb"), "system_metrics": False},
    }
    if preset == "ppo":
        tree["algorithm"]["critic"] = {"type": "model", "learning_rate": 2e-3}
    database = folder / "store.duckdb"
    if database.exists() and (found := curve(database, name)) and len(found["rewards"]) == steps:
        return found
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    command = [Path(sys.executable).parent / "rlinsight", "train", file]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = curve(database, name)
    assert found is not None, "the run has just finished"
    return found


def curve(database: Path, name: str) -> dict[str, Any] | None:
    """Rewards by step and the seconds of all steps, of the longest run of that name."""
    return next(iter(store.query(CURVE, store=database, params=[name]).to_pylist()), None)


def row(preset: str, runs: list[dict[str, Any]]) -> str:
    """One line of the table."""
    first = [statistics.mean(run["rewards"][:WINDOW]) for run in runs]
    last = [statistics.mean(run["rewards"][-WINDOW:]) for run in runs]
    spread = f"{statistics.stdev(last):.3f}" if len(last) > 1 else ""
    seconds = statistics.mean(run["seconds"] / len(run["rewards"]) for run in runs)
    solved = "yes" if statistics.mean(last) >= SOLVED else "no"
    steps = len(runs[0]["rewards"])
    return (
        f"| {preset} | {steps} | {statistics.mean(first):.3f} | {statistics.mean(last):.3f} | {spread} "
        f"| {min(last):.3f} | {solved} | {seconds:.2f} |"
    )


def report(rows: list[tuple[str, list[dict[str, Any]]]], options: argparse.Namespace) -> str:
    """Markdown: the task, one line per preset, the curves."""
    machine = f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores"
    seeds, presets = " ".join(map(str, options.seeds)), " ".join(options.presets)
    lines = [
        "# Which recipes learn",
        "",
        f"    python benchmarks/learning.py --presets {presets} --seeds {seeds} --steps {options.steps}",
        "",
        f"On {machine}, {time.strftime('%Y-%m-%d')}: a random two-layer model, steps of 16 prompts "
        f"with 8 rollouts each, seeds {seeds}. The task is described in `benchmarks/learning.py`; 1 is perfect, 0.5 is "
        f"what a policy that ignores the prompt can reach, and solved means at least {SOLVED} over the last {WINDOW} "
        "steps in the mean over seeds. KL penalties are off.",
        "",
        f"| preset | steps | first {WINDOW} steps | last {WINDOW} steps, mean over seeds | std over seeds | worst seed "
        "| solved | s a step |",
        "|---|---|---|---|---|---|---|---|",
        *(row(preset, runs) for preset, runs in rows),
        "",
        "Reward at every tenth step, first seed:",
        "",
        *(f"- {preset}: " + " ".join(f"{r:.2f}" for r in runs[0]["rewards"][::10]) for preset, runs in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
