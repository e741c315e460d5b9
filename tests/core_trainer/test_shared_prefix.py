"""Packed passes with shared prompts equal plain passes over each sequence, forward and backward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core_trainer import attention, models
from core_trainer.batching import TrainSample, micro_batches, pack, padded_tokens
from core_trainer.forward import checkpoint_layers, log_probs, sample_log_probs, sample_scores


def make_sample(rng: np.random.Generator, group: int, index: int, prompt: np.ndarray, length: int) -> TrainSample:
    """A sample with random tokens and advantages."""
    return TrainSample(
        rollout_id=f"g{group}-r{index}",
        group_id=f"g{group}",
        prompt_token_ids=prompt,
        token_ids=rng.integers(0, 500, length),
        loss_mask=np.ones(length, dtype=bool),
        rollout_log_probs=np.zeros(length, dtype=np.float32),
        policy_version=0,
        advantages=rng.normal(size=length).astype(np.float32),
    )


def ragged_samples(seed: int = 0) -> list[TrainSample]:
    """Groups of different sizes, prompts and responses of different lengths, single-token responses among them."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, (prompt, lengths) in enumerate([(5, [3, 1, 7]), (11, [4, 4]), (1, [9, 2, 1, 5]), (6, [1])]):
        tokens = rng.integers(0, 500, prompt)
        samples += [make_sample(rng, group, i, tokens, length) for i, length in enumerate(lengths)]
    return samples


@pytest.fixture(params=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tiny_model: Path) -> tuple:
    """The same fp32 weights twice: with transformers' attention and with ours."""
    plain = models.load_model(tiny_model, torch.float32)
    ours = models.load_model(tiny_model, torch.float32)
    if request.param == "untied":
        for model in (plain, ours):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    attention.enable(ours)
    return plain, ours


def naive_log_probs(model: torch.nn.Module, sample: TrainSample, temperature: float) -> torch.Tensor:
    """One unpadded sequence through the whole model."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]))[None]
    logits = model(tokens).logits[0, len(sample.prompt_token_ids) - 1 : -1] / temperature
    picked = torch.log_softmax(logits, dim=-1).gather(1, torch.from_numpy(sample.token_ids)[:, None])
    return picked[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_equal_plain_sequences(pair: tuple, temperature: float) -> None:
    """Log-probs, entropy and every weight's gradient equal those of separate sequences within 1e-5 in float32."""
    plain, ours = pair
    samples = ragged_samples()
    total = torch.zeros(())
    expected = []
    for sample in samples:
        values = naive_log_probs(plain, sample, temperature)
        expected.append(values.detach())
        total = total + (values * torch.from_numpy(sample.advantages)).sum()
    total.backward()

    batch = pack(samples)
    values, entropy = log_probs(ours, batch, temperature)
    (values * batch.gather("advantages")).sum().backward()
    for sample, mine, theirs in zip(batch.samples, batch.split(values.detach()), expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5, err_msg=sample.rollout_id)
    assert bool((entropy > 0).all())
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_entropy_equals_the_definition(pair: tuple) -> None:
    """Entropy is -sum p log p of the full distribution."""
    plain, ours = pair
    (sample, *_) = ragged_samples()
    tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]))[None]
    with torch.no_grad():
        distribution = torch.log_softmax(plain(tokens).logits[0, len(sample.prompt_token_ids) - 1 : -1], dim=-1)
        _, entropy = log_probs(ours, pack([sample]), 1.0)
    torch.testing.assert_close(entropy, -(distribution.exp() * distribution).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 13, 25, 10_000])
def test_micro_batches_change_nothing(pair: tuple, budget: int) -> None:
    """Whatever the token budget, each sample appears once, no part exceeds the budget, and results are the same."""
    _, ours = pair
    samples = ragged_samples()
    parts = list(micro_batches(samples, budget))
    assert sorted(s.rollout_id for part in parts for s in part) == sorted(s.rollout_id for s in samples)
    for part in parts:
        groups = {s.group_id: [t for t in part if t.group_id == s.group_id] for s in part}
        assert len(part) == 1 or padded_tokens(list(groups.values())) <= budget
        rows = pack(part).layout
        assert rows.prompt_rows.numel() + (0 if rows.response_rows is None else rows.response_rows.numel()) == (
            padded_tokens(list(groups.values()))
        )
    whole = sample_log_probs(ours, samples, 1.0, 10_000)
    for mine, theirs in zip(sample_log_probs(ours, samples, 1.0, budget), whole, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 40, 90, 300])
def test_micro_batches_are_filled_greedily(budget: int) -> None:
    """Running maxima give what counting each candidate anew gives: parts by length, one more while it fits."""
    rng = np.random.default_rng(budget)
    prompts = [rng.integers(0, 9, rng.integers(1, 20)) for _ in range(12)]
    samples = [
        make_sample(rng, g, i, prompts[g], int(rng.integers(1, 25))) for g in range(12) for i in range(g % 5 + 1)
    ]
    parts: list[list[TrainSample]] = []
    for g in range(12):
        group = [sample for sample in samples if sample.group_id == f"g{g}"]
        if padded_tokens([group]) <= budget:
            parts.append(group)
            continue
        parts.append([])
        for sample in sorted(group, key=lambda sample: sample.num_tokens):
            if parts[-1] and padded_tokens([[*parts[-1], sample]]) > budget:
                parts.append([])
            parts[-1].append(sample)
    parts.sort(key=lambda part: (max(sample.num_tokens for sample in part), len(part[0].prompt_token_ids)))
    expected: list[list[list[TrainSample]]] = []
    for part in parts:
        if not expected or padded_tokens([*expected[-1], part]) > budget:
            expected.append([])
        expected[-1].append(part)
    ids = [[sample.rollout_id for part in parts for sample in part] for parts in expected]
    assert [[sample.rollout_id for sample in part] for part in micro_batches(samples, budget)] == ids


def test_models_it_cannot_express_are_refused(tiny_model: Path) -> None:
    """Sliding windows and soft-capped logits are refused by name instead of being trained wrongly."""
    from rlinsight.errors import ModelError

    model = models.load_model(tiny_model, torch.float32)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match=r"final_logit_softcapping=30\.0"):
        attention.enable(model)
    model.config.final_logit_softcapping = None
    model.config.sliding_window = 128
    with pytest.raises(ModelError, match="sliding window"):
        attention.enable(model)


def test_recomputed_layers_give_the_same_gradients_and_keep_less(tiny_model: Path) -> None:
    """Gradient checkpointing: the same bits of log-probs and gradients, from a fraction of the saved activations."""
    found = []
    for recompute in (False, True):
        model = models.load_model(tiny_model, torch.float32)
        attention.enable(model)
        if recompute:
            checkpoint_layers(model)
        weights = {p.data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}  # bytes by address

        def keep(x: torch.Tensor, kept: dict[int, int] = kept, weights: set[int] = weights) -> torch.Tensor:
            if x.data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        batch = pack(ragged_samples())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            values, _ = log_probs(model, batch, 0.7)
        (values * batch.gather("advantages")).sum().backward()
        found.append((values.detach(), [p.grad for p in model.parameters()], sum(kept.values())))
    (plain, plain_grads, plain_bytes), (ours, grads, kept_bytes) = found
    assert torch.equal(ours, plain)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
    assert kept_bytes < 0.3 * plain_bytes


def test_a_model_without_marked_layers_is_refused_recomputation() -> None:
    """The error names the option to switch off."""
    from transformers import PretrainedConfig, PreTrainedModel

    from rlinsight.errors import ModelError

    with pytest.raises(ModelError, match=r"set trainer\.gradient_checkpointing: false"):
        checkpoint_layers(PreTrainedModel(PretrainedConfig()))


def test_scores_of_samples_come_by_name_and_in_order(pair: tuple) -> None:
    """Squares are there when asked for, in the samples' order whatever the micro-batches; no samples, no arrays."""
    _, ours = pair
    samples = ragged_samples()
    whole, parts = (sample_scores(ours, samples, 0.7, budget, sum_pi_squared=True) for budget in (10_000, 13))
    assert list(whole) == ["log_probs", "entropy", "sum_pi_squared"]
    for name, arrays in whole.items():
        for sample, mine, theirs in zip(samples, arrays, parts[name], strict=True):
            assert mine.shape == (sample.num_tokens,)
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert sample_scores(ours, [], 0.7, 13) == {"log_probs": [], "entropy": []}
