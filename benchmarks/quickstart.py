"""Does SmolLM2 learn? Trains a configuration once per seed and writes the reward curves.

    python benchmarks/quickstart.py --seeds 1 2 3 4 5
    python benchmarks/quickstart.py --config configs/ppo.yaml --seeds 1 2 3

Results go to benchmarks/results, in a file of the configuration's name. Uses the ``rlinsight`` command as a user would,
and SQL to read the outcome.
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

import psutil

from rlinsight import store

ROOT = Path(__file__).resolve().parent.parent
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.duckdb"
        walls = [train(options.config, seed, path) for seed in options.seeds]
        rows = store.query(CURVE, store=path).to_pylist()
    text = report(options.config, rows, walls)
    (ROOT / f"benchmarks/results/{options.config.stem}.md").write_text(text)
    print(text)


def train(config: Path, seed: int, path: Path) -> float:
    """One run; returns its wall time in seconds, from command to exit."""
    began = time.perf_counter()
    overrides = [f"run.seed={seed}", f"run.dir={path.parent / 'runs'}", f"telemetry.store={path}"]
    command = [Path(sys.executable).parent / "rlinsight", "train", config.absolute(), *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    return time.perf_counter() - began


def report(config: Path, rows: list[dict], walls: list[float]) -> str:
    """Markdown: verdict, one row per seed, mean and spread, and the curves."""
    gains = [statistics.mean(row["rewards"][-5:]) - statistics.mean(row["rewards"][:5]) for row in rows]
    passed = sum(gain >= GAIN for gain in gains)
    machine = f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores"
    lines = [
        f"# configs/{config.name}: does it learn?",
        "",
        f"    python benchmarks/quickstart.py --config configs/{config.name} --seeds "
        + " ".join(str(row["seed"]) for row in rows),
        "",
        f"On {machine}, {time.strftime('%Y-%m-%d')}. Reward is the mean over the step's rollouts.",
        f"Reward of the last five steps is at least {GAIN} above the first five in {passed} of {len(rows)} seeds.",
        "",
        "| seed | first 5 | last 5 | gain | best step | s per step | wall, command to exit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, gain, wall in zip(rows, gains, walls, strict=True):
        rewards = row["rewards"]
        first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
        lines.append(
            f"| {row['seed']} | {first:.3f} | {last:.3f} | {gain:+.3f} | {max(rewards):.3f} "
            f"| {row['seconds'] / len(rewards):.1f} | {wall:.0f} s |"
        )
    for name, part in (("first", slice(5)), ("last", slice(-5, None))):
        means = [statistics.mean(row["rewards"][part]) for row in rows]
        spread = f", standard deviation {statistics.stdev(means):.3f}" if len(means) > 1 else ""
        lines += ["", f"The {name} five steps: {statistics.mean(means):.3f} in the mean over seeds{spread}."]
    seeds_named = " | ".join(f"seed {row['seed']}" for row in rows)
    lines += ["", f"| step | {seeds_named} |", "|---" * (len(rows) + 1) + "|"]
    for step, values in enumerate(zip(*(row["rewards"] for row in rows), strict=True), start=1):
        lines.append(f"| {step} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
