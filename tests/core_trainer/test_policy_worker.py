"""The policy worker's loss is the one configured: its accumulated gradient equals a naive loop's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer import models
from core_trainer.algorithms import policy_losses, registry
from core_trainer.batch import set_losses
from core_trainer.batching import PackedBatch, TrainSample
from core_trainer.forward import scores
from core_trainer.job import Job
from core_trainer.logprobs import TokenScores
from core_trainer.metrics import TokenStats
from core_trainer.workers.base import Place
from core_trainer.workers.policy import PolicyWorker
from rlinsight import config, names, telemetry
from tests.core_trainer.scripted_engine import ScriptedEngine
from tests.core_trainer.scripted_server import ScriptedServer
from tests.core_trainer.test_critic import ranks_of
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


def test_it_tells_its_replicas(tmp_path: Path, tiny_model: Path) -> None:
    """By the names their weight syncs go by: its own, or each server's."""
    first, second = ScriptedServer(tiny_model), ScriptedServer(tiny_model)
    with first.running(), second.running():
        servers = {"engine": "openai", "openai": {"urls": [first.url, second.url]}, "max_new_tokens": 16}
        data = {"train": "d.jsonl", "max_prompt_tokens": 64}
        for rollout, expected in (({}, ["policy/0"]), (servers, [s.url.split("/")[2] for s in (first, second)])):
            worker = make_worker(tiny_model, tmp_path, rollout=rollout, data=data)
            try:
                assert worker.start(tiny_model, None, None) == expected
                assert [entry.sync.replica for entry in worker.sync_weights()] == expected
            finally:
                worker.close()


@pytest.mark.parametrize(
    ("sleep_level", "expected"), [(1, ["sync 0", "sleep"]), (2, ["sync 0", "sleep", "wake", "sync 0"])]
)
def test_an_engine_that_drops_its_weights_is_given_them_again(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, sleep_level: int, expected: list[str]
) -> None:
    """Also where the policy has not changed, as while a critic warms up."""
    engine = ScriptedEngine()
    monkeypatch.setattr("core_trainer.workers.policy.build_engine", lambda *_, **__: engine)
    rollout = {"engine": "vllm", "vllm": {"sleep_level": sleep_level}}
    worker = make_worker(tiny_model, tmp_path, rollout=rollout)
    try:
        assert len(worker.sync_weights()) == 1
        with worker.hybrid.training():
            pass
        assert len(worker.sync_weights()) == sleep_level - 1
    finally:
        telemetry.shutdown(0)
    assert engine.calls == ["wake", *expected]


@pytest.mark.parametrize("budget", [1, 25, 10_000])
@pytest.mark.parametrize("critic", [None, {"type": "shared"}], ids=["no critic", "shared critic"])
def test_the_skipped_pass_would_give_the_updates_own_log_probs(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, budget: int, critic: dict[str, Any] | None
) -> None:
    """Bit for bit, whatever the micro-batches: so one on-policy update needs no pass before it."""
    recorded: dict[str, dict[str, np.ndarray]] = {}
    monkeypatch.setattr(
        "core_trainer.workers.policy.record_trained",
        lambda sample, version, found, clipped: recorded.update({sample.rollout_id: found}),
    )
    algorithm = {"name": "ppo", "kl": None, "num_mini_batches": 1, "critic": critic} if critic else {}
    worker = make_worker(
        tiny_model, tmp_path, algorithm=algorithm, trainer={"micro_batch_tokens": budget}, rollout={"temperature": 0.7}
    )
    try:
        samples = ragged_samples()
        for sample in samples:
            zeros = np.zeros(sample.num_tokens, dtype=np.float32)
            sample.token_weight, sample.values, sample.returns = 1.0, zeros, zeros
        before = worker.log_probs(samples)["old_log_probs"]
        worker.forward_backward(samples, 0.0, record=True)
    finally:
        telemetry.shutdown(0)
    for sample, expected in zip(samples, before, strict=True):
        for name in (names.LOG_PROBS_ARRAY, names.OLD_LOG_PROBS_ARRAY):
            assert np.array_equal(recorded[sample.rollout_id][name], expected), (sample.rollout_id, name)


def samples_off_policy() -> list[TrainSample]:
    """Samples whose old log-probs are far enough that the clip cuts some, with weights and a partly masked response,
    off whose mask nothing may reach the loss.
    """
    rng = np.random.default_rng(4)
    samples = ragged_samples()
    for sample in samples:
        sample.old_log_probs = (-6.2 + rng.normal(0, 0.5, sample.num_tokens)).astype(np.float32)
        sample.ref_log_probs = (-6.2 + rng.normal(0, 0.5, sample.num_tokens)).astype(np.float32)
        sample.token_weight = float(rng.uniform(0.01, 0.1))
        sample.weights = rng.uniform(0.5, 1.5, sample.num_tokens).astype(np.float32)
        sample.loss_mask = rng.random(sample.num_tokens) < 0.8
        sample.ref_log_probs[~sample.loss_mask] = np.nan
    return samples


def naive_entropy(model: torch.nn.Module, sample: TrainSample, temperature: float) -> torch.Tensor:
    """Entropy of each token's distribution, from one unpadded sequence."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]))[None]
    logits = model(tokens).logits[0, len(sample.prompt_token_ids) - 1 : -1] / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def test_an_entropy_that_is_off_the_mask_reaches_nothing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN there leaves loss and gradient as they are."""

    def spoilt(model: Any, batch: PackedBatch, *args: Any, **options: Any) -> TokenScores:
        found = scores(model, batch, *args, **options)
        return found._replace(entropy=found.entropy.where(batch.gather("loss_mask", torch.bool), torch.nan))

    worker = make_worker(tiny_model, tmp_path, algorithm={"num_epochs": 2, "entropy_coef": 0.1})
    try:
        stats, _ = worker.forward_backward(samples_off_policy(), 0.0, record=False)
        expected = worker.optimizer.gradient.clone()
        worker.optimizer.gradient.zero_()
        monkeypatch.setattr("core_trainer.workers.policy.scores", spoilt)
        again, _ = worker.forward_backward(samples_off_policy(), 0.0, record=False)
    finally:
        telemetry.shutdown(0)
    assert again == stats
    torch.testing.assert_close(worker.optimizer.gradient, expected, atol=0, rtol=0)


@pytest.mark.parametrize("token_budget", [20, 10_000])
@pytest.mark.parametrize(
    ("kl_coef", "estimator", "entropy_coef"), [(0.0, "k3", 0.0), (0.5, "k3", 0.0), (0.5, "k2", 0.1)]
)
def test_gradient_and_statistics_equal_a_naive_loop(
    tmp_path: Path, tiny_model: Path, token_budget: int, kl_coef: float, estimator: str, entropy_coef: float
) -> None:
    """Temperature, clip, masks, both kinds of weights, KL and entropy all act, whatever the micro-batches."""
    algorithm = {
        "num_epochs": 2,
        "policy_loss": {"clip_low": 0.1, "clip_high": 0.3},
        "kl": {"coef": kl_coef, "estimator": estimator} if kl_coef else None,
        "entropy_coef": entropy_coef,
    }
    worker = make_worker(
        tiny_model,
        tmp_path,
        algorithm=algorithm,
        rollout={"temperature": 0.7},
        trainer={"micro_batch_tokens": token_budget},
    )
    try:
        samples = samples_off_policy()
        stats, _ = worker.forward_backward(samples, kl_coef, record=True)
    finally:
        telemetry.shutdown(0)

    model = models.load_model(tiny_model, torch.float32)
    policy_loss = kl_loss = entropy_loss = torch.zeros(())
    num_clipped = 0
    for sample in samples:
        new, entropy = naive_log_probs(model, sample, 0.7), naive_entropy(model, sample, 0.7)
        for t in range(sample.num_tokens):
            if not sample.loss_mask[t]:
                continue
            ratio = torch.exp(new[t] - float(sample.old_log_probs[t]))  # type: ignore[index]
            advantage = float(sample.advantages[t])  # type: ignore[index]
            cut = ratio.item() > 1.3 if advantage > 0 else ratio.item() < 0.9
            loss = torch.tensor(-advantage * (1.3 if advantage > 0 else 0.9)) if cut else -advantage * ratio
            num_clipped += cut
            d = new[t] - float(sample.ref_log_probs[t])  # type: ignore[index]
            kl = d**2 / 2 if estimator == "k2" else torch.exp(-d) + d - 1
            policy_loss = policy_loss + sample.token_weight * float(sample.weights[t]) * loss  # type: ignore[index]
            kl_loss = kl_loss + sample.token_weight * kl
            entropy_loss = entropy_loss + sample.token_weight * entropy[t]
    total = policy_loss + kl_coef * kl_loss - entropy_coef * entropy_loss
    total.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(worker.optimizer.gradient, expected, atol=2e-5, rtol=1e-3)
    assert stats.policy_loss == pytest.approx(policy_loss.item(), abs=1e-4)
    assert stats.entropy_loss == pytest.approx(entropy_loss.item(), abs=1e-4)
    assert stats.loss == pytest.approx(total.item(), abs=1e-4)
    assert stats.kl_loss == pytest.approx(kl_loss.item() if kl_coef else 0.0, abs=1e-4)
    assert stats.num_clipped == num_clipped > 0
    assert stats.num_tokens == sum(int(s.loss_mask.sum()) for s in samples)


CHOOSING = {"clip_cov": {"cov_ratio": 0.2, "cov_low": 0.0}, "kl_cov": {"cov_ratio": 0.2}}  # more than one token each


@pytest.mark.parametrize(("token_budget", "ranks"), [(10_000, 1), (20, 1), (20, 2)])
@pytest.mark.parametrize("name", registry.names("policy_loss"))
def test_every_policy_loss_gives_the_gradient_of_its_own_formula(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, token_budget: int, ranks: int
) -> None:
    """The packed, weighted gradient that the ranks add up is autograd's of the registered function over plain log-probs
    of all samples at once, whatever the micro-batches; so are the tokens recorded as clipped.
    """
    recorded: dict[str, np.ndarray] = {}
    monkeypatch.setattr(
        "core_trainer.workers.policy.record_trained",
        lambda sample, version, found, clipped: recorded.update({sample.rollout_id: clipped}),
    )
    options = CHOOSING.get(name, {})
    algorithm: dict[str, Any] = {"num_epochs": 2, "policy_loss": {"type": name, **options}}
    if name in ("gspo", "gmpo"):
        algorithm["aggregation"] = "seq-mean-token-mean"
    worker = make_worker(tiny_model, tmp_path, algorithm=algorithm, trainer={"micro_batch_tokens": token_budget})
    try:
        samples = samples_off_policy()
        parts = [samples] if ranks == 1 else ranks_of(samples)
        if registry.find("policy_loss", name).whole_mini_batch:
            set_losses(parts, [worker.current_log_probs(part) for part in parts], name, options)
        stats = TokenStats()
        for part in parts:  # one worker after the other: gradients of ranks are added
            stats = stats.merge(worker.forward_backward(part, 0.0, record=True)[0])
    finally:
        telemetry.shutdown(0)

    model = models.load_model(tiny_model, torch.float32)
    columns = {
        "log_probs": torch.cat([naive_log_probs(model, sample, 1.0) for sample in samples]),
        "old_log_probs": torch.cat([torch.from_numpy(sample.old_log_probs) for sample in samples]),
        "advantages": torch.cat([torch.from_numpy(sample.advantages) for sample in samples]),
        "mask": torch.cat([torch.from_numpy(sample.loss_mask) for sample in samples]),
        "sequences": torch.cat([torch.full((sample.num_tokens,), i) for i, sample in enumerate(samples)]),
    }
    weights = torch.cat([torch.from_numpy(sample.weights) * sample.token_weight for sample in samples])
    token = policy_losses.compute(name, columns, options)
    policy_loss = (token.loss * weights * columns["mask"]).sum()
    policy_loss.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(worker.optimizer.gradient, expected, atol=2e-5, rtol=1e-3)
    assert stats.policy_loss == pytest.approx(policy_loss.item(), abs=1e-4)
    assert stats.loss == stats.policy_loss  # to the bit, as there is no other term
    assert stats.ratio_max == pytest.approx(token.ratio[columns["mask"]].max().item(), rel=1e-4)
    clipped = np.concatenate([recorded[sample.rollout_id] for sample in samples])
    np.testing.assert_array_equal(clipped, token.clipped)
    assert stats.num_clipped == clipped.sum() >= (2 if options else 0)
