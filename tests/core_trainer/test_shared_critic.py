"""A value head on the policy's backbone, through the policy worker: its gradient, its optimizer, its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer import checkpoint, value_model
from core_trainer.algorithms import registry
from core_trainer.batching import TrainSample
from core_trainer.forward import sample_scores
from core_trainer.job import Job
from core_trainer.value_model import ValueHead
from core_trainer.workers.base import Place
from core_trainer.workers.policy import CRITIC, PolicyWorker
from rlinsight import config, names, telemetry
from rlinsight.errors import TrainingError
from tests.core_trainer.test_value_model import naive_values, valued_samples

SEED = 3


@pytest.fixture(autouse=True)
def _telemetry_ends() -> Iterator[None]:
    yield
    telemetry.shutdown(0)


def make_worker(
    model: Path, path: Path, resume: Path | None = None, algorithm: dict[str, Any] | None = None, **critic: Any
) -> PolicyWorker:
    """A worker in this process, in float32."""
    tree = {
        "run": {"seed": SEED},
        "model": {"source": str(model), "compute_dtype": "float32"},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "algorithm": {"name": "ppo", "num_epochs": 2, "kl": None, "critic": {"type": "shared", **critic}}
        | (algorithm or {}),
        "trainer": {"learning_rate": 1e-3, "warmup_steps": 3},
    }
    job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None)
    worker = PolicyWorker(Place("policy", 0, 1), job, config.parse(tree), {})
    worker.start(model, resume, None)
    torch.set_num_threads(1)  # at these sizes more of them only wait for each other
    return worker


def off_policy_samples(seed: int = 7) -> list[TrainSample]:
    """Valued samples with old log-probs."""
    rng = np.random.default_rng(seed)
    samples = valued_samples(seed)
    for sample in samples:
        sample.old_log_probs = (-6.2 + rng.normal(0, 0.1, sample.num_tokens)).astype(np.float32)
    return samples


def head_of(worker: PolicyWorker) -> ValueHead:
    assert worker.head is not None
    return worker.head


def train(worker: PolicyWorker, steps: range) -> list[tuple[float, float]]:
    """Losses of policy and values; the targets are another for each step."""
    losses = []
    for step in steps:
        stats, values = worker.forward_backward(off_policy_samples(step), 0.0, record=False)
        worker.optim_step(step)
        losses.append((stats.loss, values.loss))
    return losses


def test_a_fresh_head_comes_from_the_seed(tmp_path: Path, tiny_model: Path) -> None:
    """On the policy's own states: its values are those of a critic of its own with the same weights."""
    worker = make_worker(tiny_model, tmp_path)
    assert torch.equal(head_of(worker).weight, ValueHead(64, SEED).weight)
    model = value_model.load(tiny_model, SEED)
    samples = off_policy_samples()
    for mine, sample in zip(worker.log_probs(samples)["values"], samples, strict=True):
        np.testing.assert_allclose(mine, naive_values(model, sample).detach().numpy(), atol=1e-5)


def test_one_pass_gives_all_that_an_advantage_may_ask_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and sums of squared probabilities together, the latter as a run without a critic computes them."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    plugin = tmp_path / "both.py"
    plugin.write_text(
        "from core_trainer.algorithms.registry import advantage\n"
        "@advantage('of_shared_critic')\n"
        "def both(token_rewards, values, sum_pi_squared):\n"
        "    return token_rewards - values * sum_pi_squared, token_rewards\n"
    )
    algorithm = {"plugins": [str(plugin)], "advantage": {"type": "of_shared_critic"}}
    worker, plain = make_worker(tiny_model, tmp_path, algorithm=algorithm), make_worker(tiny_model, tmp_path)
    samples = off_policy_samples()
    found, without = worker.log_probs(samples), plain.log_probs(samples)
    assert (set(found), set(without)) == ({"old_log_probs", "values", "sum_pi_squared"}, {"old_log_probs", "values"})
    expected = sample_scores(plain.model, samples, 1.0, 4096, sum_pi_squared=True)["sum_pi_squared"]
    for mine, theirs in zip(found["sum_pi_squared"], expected, strict=True):
        assert np.array_equal(mine, theirs)
    for name in without:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found[name], without[name], strict=True))


def test_a_resumed_head_is_the_uninterrupted_one(tmp_path: Path, tiny_model: Path) -> None:
    """Two updates, a checkpoint and two more give the losses, weights and moments of four updates, bit for bit."""
    whole, half = make_worker(tiny_model, tmp_path), make_worker(tiny_model, tmp_path)
    losses = train(whole, range(1, 5))
    first = train(half, range(1, 3))
    saved = tmp_path / "saved"
    (saved / CRITIC).mkdir(parents=True)
    half.save(saved)
    half.save_value_head(saved / CRITIC)
    assert {file.name for file in (saved / CRITIC).iterdir()} == {value_model.HEAD, checkpoint.OPTIMIZER}
    resumed = make_worker(tiny_model, tmp_path, saved)
    assert torch.equal(head_of(resumed).weight, head_of(half).weight)
    assert not torch.equal(head_of(resumed).weight, ValueHead(64, SEED).weight)
    assert first + train(resumed, range(3, 5)) == losses
    for mine, theirs in (
        (resumed.optimizer, whole.optimizer),
        (resumed.head_optimizer, whole.head_optimizer),
    ):
        assert torch.equal(mine.master, theirs.master)
        assert mine.num_updates == theirs.num_updates == 4
        for key, value in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[key], value), key


def test_the_head_learns_at_its_own_rate(tmp_path: Path, tiny_model: Path) -> None:
    """AdamW's first step is the rate times the gradient's sign; warm-up scales both rates; the head's norm is told."""
    worker = make_worker(tiny_model, tmp_path, learning_rate=3e-2, clip=None)
    before = head_of(worker).weight.detach().clone(), worker.optimizer.master.clone()
    worker.forward_backward(off_policy_samples(), 0.0, record=False)
    expected = float(torch.linalg.vector_norm(worker.head_optimizer.gradient))
    backbone = float(torch.linalg.vector_norm(worker.optimizer.gradient))
    stats = worker.optim_step(1)
    moved = (
        float((head_of(worker).weight.detach() - before[0]).abs().max()),
        float((worker.optimizer.master - before[1]).abs().max()),
    )
    assert moved == pytest.approx((3e-2 / 3, 1e-3 / 3), rel=1e-2)
    assert stats.grad_norms["value_head"] == pytest.approx(expected, rel=1e-4)
    assert stats.grad_norm == pytest.approx(backbone, rel=1e-4)
    assert "value_head" in names.M_GRAD_NORM_GROUPS


def test_coef_scales_what_reaches_the_backbone(tmp_path: Path, tiny_model: Path) -> None:
    """The gradient is the policy's plus coef times that of the values."""
    gradients = []
    for coef in (0.1, 0.2, 0.4):
        worker = make_worker(tiny_model, tmp_path, coef=coef)
        worker.forward_backward(off_policy_samples(), 0.0, record=False)
        gradients.append(worker.optimizer.gradient.clone())
    assert float((gradients[1] - gradients[0]).abs().max()) > 1e-5
    torch.testing.assert_close(gradients[2] - gradients[1], 2 * (gradients[1] - gradients[0]), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("broken", ["head", "backbone"])
def test_a_gradient_that_is_not_finite_updates_neither(tmp_path: Path, tiny_model: Path, broken: str) -> None:
    """Whichever of the two is broken: weights, moments and policy_version stay, and the next step works."""
    worker = make_worker(tiny_model, tmp_path)
    train(worker, range(1, 2))
    optimizers = {"head": worker.head_optimizer, "backbone": worker.optimizer}
    before = {name: (o.master.clone(), o.state_dict()["exp_avg"].clone()) for name, o in optimizers.items()}
    worker.forward_backward(off_policy_samples(), 0.0, record=False)
    optimizers[broken].gradient[0] = float("nan")
    with pytest.raises(TrainingError, match="gradient norm of step 2 is nan"):
        worker.optim_step(2)
    for name, optimizer in optimizers.items():
        assert torch.equal(optimizer.master, before[name][0])
        assert torch.equal(optimizer.state_dict()["exp_avg"], before[name][1])
        assert optimizer.num_updates == 1
        assert not bool(optimizer.gradient.any())
    assert worker.policy_version == 1
    train(worker, range(3, 4))
    assert all(bool(torch.isfinite(o.master).all()) and o.num_updates == 2 for o in optimizers.values())
