"""Two ranks of the policy train what one would: adapters alone, and a backbone with a value head."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core_trainer.job import Job
from core_trainer.workers.base import Place
from core_trainer.workers.policy import PolicyWorker
from core_trainer.workers.worker_group import free_port
from rlinsight import config, telemetry
from tests.core_trainer.test_critic import ranks_of
from tests.core_trainer.test_shared_critic import off_policy_samples

pytestmark = pytest.mark.slow  # starts processes
RATE = 1e-3
KINDS: dict[str, dict[str, Any]] = {
    "adapters": {"model": {"lora": {"rank": 4}}, "algorithm": {"num_epochs": 2}},
    "shared critic": {"algorithm": {"name": "ppo", "num_epochs": 2, "kl": None, "critic": {"type": "shared"}}},
}


def train(kind: str, source: Path, path: Path, rank: int, ranks: int, port: int | None) -> None:
    """Two updates on this rank's groups, all of them of one rank; writes weights and what the updates say."""
    sections = KINDS[kind]
    tree = {
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "trainer": {"learning_rate": RATE},
        "telemetry": {"enabled": False},
        **sections,
        "model": {"source": str(source), "compute_dtype": "float32", **sections.get("model", {})},
    }
    job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None)
    worker = PolicyWorker(Place("policy", rank, ranks), job, config.parse(tree), {})
    worker.start(source, None, port)
    torch.set_num_threads(1)
    said = []
    for step in (1, 2):
        samples = off_policy_samples(step)
        worker.forward_backward(samples if ranks == 1 else ranks_of(samples)[rank], 0.0, record=False)
        said.append(asdict(worker.optim_step(step)))
    masters = {"policy": worker.optimizer.master}
    if worker.head is not None:
        masters["head"] = worker.head_optimizer.master
    save_file(masters, path / f"{rank}-of-{ranks}.safetensors")
    (path / f"{rank}-of-{ranks}.json").write_text(json.dumps(said))
    telemetry.shutdown(0)
    if ranks > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_what_one_would(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    """Gradients meet over gloo: both ranks end with the same bits, and with one rank's weights up to rounding."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    arguments = [(kind, tiny_model, tmp_path, rank, 2, port) for rank in range(2)]
    ranks = [context.Process(target=train, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    train(kind, tiny_model, tmp_path, 0, 1, None)
    first, second, one = (load_file(tmp_path / f"{name}.safetensors") for name in ("0-of-2", "1-of-2", "0-of-1"))
    assert set(one) == ({"policy", "head"} if kind == "shared critic" else {"policy"})
    for name, alone in one.items():
        assert torch.equal(first[name], second[name])
        # AdamW's first updates are the sign of the gradient: where that is rounding, they may differ by 2 rates each.
        apart = (alone - first[name]).abs()
        assert float(apart.max()) <= 4 * RATE
        assert float((apart > 1e-5).float().mean()) < 1e-3
    said, alone = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0-of-2", "0-of-1"))
    assert said[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-4)
    assert said[0]["grad_norms"] == pytest.approx(alone[0]["grad_norms"], rel=1e-4)
    assert said[0]["grad_norm"] > 1e-3
