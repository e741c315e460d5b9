"""The policy worker's loss is the one configured: its accumulated gradient equals a naive loop's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer import models
from core_trainer.batching import TrainSample
from core_trainer.job import Job
from core_trainer.metrics import TokenStats
from core_trainer.workers.base import Place
from core_trainer.workers.policy import PolicyWorker
from rlinsight import config, telemetry
from tests.core_trainer.test_shared_prefix import naive_log_probs, ragged_samples


def make_worker(model: Path, path: Path, **sections: Any) -> PolicyWorker:
    """A worker in this process, in float32."""
    tree = {
        "model": {"source": str(model), "compute_dtype": "float32"},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        **sections,
    }
    job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None)
    worker = PolicyWorker(Place("policy", 0, 1), job, config.parse(tree), {})
    worker.start(model, None, None)
    return worker


def samples_off_policy() -> list[TrainSample]:
    """Samples whose old log-probs are far enough that the clip cuts some, with weights and a partly masked response."""
    rng = np.random.default_rng(4)
    samples = ragged_samples()
    for sample in samples:
        sample.old_log_probs = (-6.2 + rng.normal(0, 0.5, sample.num_tokens)).astype(np.float32)
        sample.ref_log_probs = (-6.2 + rng.normal(0, 0.5, sample.num_tokens)).astype(np.float32)
        sample.token_weight = float(rng.uniform(0.01, 0.1))
        sample.loss_mask = rng.random(sample.num_tokens) < 0.8
    return samples


@pytest.mark.parametrize("token_budget", [20, 10_000])
@pytest.mark.parametrize(("kl_coef", "estimator"), [(0.0, "k3"), (0.5, "k3"), (0.5, "k2")])
def test_gradient_and_statistics_equal_a_naive_loop(
    tmp_path: Path, tiny_model: Path, token_budget: int, kl_coef: float, estimator: str
) -> None:
    """Temperature, clip, masks, weights and the KL term all act, whatever the micro-batches."""
    algorithm = {"num_epochs": 2, "clip_low": 0.1, "clip_high": 0.3, "kl_coef": kl_coef, "kl_estimator": estimator}
    worker = make_worker(
        tiny_model,
        tmp_path,
        algorithm=algorithm,
        rollout={"temperature": 0.7},
        trainer={"micro_batch_tokens": token_budget},
    )
    try:
        samples = samples_off_policy()
        stats: TokenStats = worker.forward_backward(samples, worker.config.algorithm, record=True)
    finally:
        telemetry.shutdown(0)

    model = models.load_model(tiny_model, torch.float32)
    policy_loss = kl_loss = torch.zeros(())
    num_clipped = 0
    for sample in samples:
        new = naive_log_probs(model, sample, 0.7)
        for t in range(sample.num_tokens):
            if not sample.loss_mask[t]:
                continue
            ratio = torch.exp(new[t] - float(sample.old_log_probs[t]))  # type: ignore[index]
            advantage = float(sample.advantages[t])
            cut = ratio.item() > 1.3 if advantage > 0 else ratio.item() < 0.9
            loss = torch.tensor(-advantage * (1.3 if advantage > 0 else 0.9)) if cut else -advantage * ratio
            num_clipped += cut
            d = new[t] - float(sample.ref_log_probs[t])  # type: ignore[index]
            kl = d**2 / 2 if estimator == "k2" else torch.exp(-d) + d - 1
            policy_loss = policy_loss + sample.token_weight * loss
            kl_loss = kl_loss + sample.token_weight * kl
    (policy_loss + kl_coef * kl_loss).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(worker.optimizer.gradient, expected, atol=2e-5, rtol=1e-3)
    assert stats.policy_loss == pytest.approx(policy_loss.item(), abs=1e-4)
    assert stats.kl_loss == pytest.approx(kl_loss.item() if kl_coef else 0.0, abs=1e-4)
    assert stats.num_clipped == num_clipped > 0
    assert stats.num_tokens == sum(int(s.loss_mask.sum()) for s in samples)
