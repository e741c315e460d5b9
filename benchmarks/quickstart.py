"""Does the quickstart learn? Trains configs/quickstart.yaml once per seed and writes the reward curves.

    python benchmarks/quickstart.py --seeds 1 2 3 4 5

Results go to benchmarks/results/quickstart.md. Uses the ``rlinsight`` command as a user would, and SQL to read the
outcome.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from rlinsight import store

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.yaml"
GAIN = 0.5  # last five steps over first five
CURVE = """
SELECT run_id, any_value(seed) AS seed, list(reward_mean ORDER BY step) AS rewards, sum(seconds) AS seconds
FROM (
  SELECT m.run_id, m.step, m.reward_mean, (s.end_ns - s.start_ns) / 1e9 AS seconds,
         json_extract(r.config, '$.run.seed')::INTEGER AS seed
  FROM train_metrics m JOIN steps s USING (run_id, step) JOIN runs r USING (run_id)
)
GROUP BY run_id ORDER BY seed
"""


def main() -> None:
    """Train per seed, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/quickstart.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quickstart.duckdb"
        walls = [train(seed, path) for seed in options.seeds]
        rows = store.query(CURVE, store=path).to_pylist()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(rows, walls, options.seeds))
    print(options.output.read_text())


def train(seed: int, path: Path) -> float:
    """One run; returns its wall time in seconds, from command to exit."""
    began = time.perf_counter()
    overrides = [f"run.seed={seed}", f"run.dir={path.parent / 'runs'}", f"telemetry.store={path}"]
    subprocess.run([Path(sys.executable).parent / "rlinsight", "train", CONFIG, *overrides], cwd=ROOT, check=True)
    return time.perf_counter() - began


def report(rows: list[dict], walls: list[float], seeds: list[int]) -> str:
    """Markdown: verdict, one row per seed, and the curves."""
    gains = [mean(row["rewards"][-5:]) - mean(row["rewards"][:5]) for row in rows]
    passed = sum(gain >= GAIN for gain in gains)
    machine = f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores"
    lines = [
        "# Quickstart: does it learn?",
        "",
        f"    python benchmarks/quickstart.py --seeds {' '.join(map(str, seeds))}",
        "",
        f"`{CONFIG}` on {machine}, {time.strftime('%Y-%m-%d')}. Reward is the mean over the step's 64 rollouts.",
        f"Reward of the last five steps is at least {GAIN} above the first five in {passed} of {len(rows)} seeds.",
        "",
        "| seed | first 5 | last 5 | gain | best step | s per step | wall, command to exit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, gain, wall in zip(rows, gains, walls, strict=True):
        rewards = row["rewards"]
        lines.append(
            f"| {row['seed']} | {mean(rewards[:5]):.3f} | {mean(rewards[-5:]):.3f} | {gain:+.3f} | {max(rewards):.3f} "
            f"| {row['seconds'] / len(rewards):.1f} | {wall:.0f} s |"
        )
    seeds_named = " | ".join(f"seed {row['seed']}" for row in rows)
    lines += ["", f"| step | {seeds_named} |", "|---" * (len(rows) + 1) + "|"]
    for step, values in enumerate(zip(*(row["rewards"] for row in rows), strict=True), start=1):
        lines.append(f"| {step} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
