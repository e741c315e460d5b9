"""Values from packed passes equal plain ones; their loss and statistics equal naive ones; damaged files are refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from core_trainer import attention, models, value_model
from core_trainer.batching import TrainSample, pack
from core_trainer.forward import scores
from core_trainer.optimizer import MasterOptimizer
from core_trainer.value_model import HEAD, Moments, ValueHead, ValueModel, ValueStats, weighted_value_loss
from rlinsight.config import TrainerSection
from rlinsight.errors import CheckpointError, ModelError
from tests.core_trainer.test_shared_prefix import ragged_samples


def valued_samples(seed: int = 7) -> list[TrainSample]:
    """Ragged samples with values, returns and weights, and partly masked responses."""
    rng = np.random.default_rng(seed)
    samples = ragged_samples()
    for sample in samples:
        sample.values = rng.normal(0, 0.5, sample.num_tokens).astype(np.float32)
        sample.returns = rng.normal(1, 1, sample.num_tokens).astype(np.float32)
        sample.token_weight = float(rng.uniform(0.01, 0.1))
        sample.loss_mask = rng.random(sample.num_tokens) < 0.8
    return samples


def naive_values(model: ValueModel, sample: TrainSample) -> torch.Tensor:
    """One unpadded sequence through transformers' own attention; the state before each token, times the head."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]))[None]
    hidden = model.decoder(tokens).last_hidden_state[0, len(sample.prompt_token_ids) - 1 : -1]
    return hidden @ model.value_head.weight[0] + model.value_head.bias


def test_values_and_gradients_equal_plain_sequences(tiny_model: Path) -> None:
    """Values and every weight's gradient equal those of separate sequences within 1e-5 in float32."""
    plain, ours = value_model.load(tiny_model, 3), value_model.load(tiny_model, 3)
    attention.enable(ours.decoder)
    samples = ragged_samples()
    expected = [naive_values(plain, sample) for sample in samples]
    sum(
        (values * torch.from_numpy(sample.advantages)).sum() for values, sample in zip(expected, samples, strict=True)
    ).backward()  # type: ignore[union-attr]

    batch = pack(samples)
    values = value_model.values(ours.decoder, ours.value_head, batch)
    (values * batch.gather("advantages")).sum().backward()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=0)
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_a_head_on_the_policy_reads_the_same_states(tiny_model: Path, budget: int) -> None:
    """A causal model and its bare decoder give the same values, whatever the micro-batches, in the order asked for."""
    policy = models.load_model(tiny_model, torch.float32)
    critic = value_model.load(tiny_model, 3)
    samples = ragged_samples()
    expected = [naive_values(critic, sample).detach().numpy() for sample in samples]
    attention.enable(policy)
    for mine, theirs in zip(
        value_model.sample_values(policy, critic.value_head, samples, budget), expected, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_a_shared_backbone_gets_both_gradients(tiny_model: Path, entropy_coef: float) -> None:
    """One pass gives the policy's log-probs and the values, and the gradient of both losses, as two passes do."""
    samples = valued_samples()
    batch = pack(samples)
    gradients, outputs = [], []
    for shared in (True, False):
        policy, head = models.load_model(tiny_model, torch.float32), ValueHead(64, 5)
        attention.enable(policy)
        if shared:
            found, current = value_model.scores_and_values(policy, head, batch, 0.7, entropy_gradient=entropy_coef > 0)
        else:
            found = scores(policy, batch, 0.7, entropy_gradient=entropy_coef > 0)
            current = value_model.values(policy, head, batch)
        value_loss, _ = weighted_value_loss(current, batch, 0.2)
        policy_loss = (found.log_probs * batch.gather("advantages")).sum() - entropy_coef * found.entropy.sum()
        (policy_loss + 0.1 * value_loss).backward()
        both = torch.nn.ModuleDict({"model": policy, "value_head": head})
        gradients.append({name: p.grad for name, p in both.named_parameters()})
        outputs.append((found.log_probs.detach(), current.detach()))
        if shared:
            arrays = value_model.sample_scores_and_values(policy, head, samples, 0.7, 30)
            assert list(arrays) == ["log_probs", "values"]
            for mine, whole in zip(arrays.values(), outputs[0], strict=True):
                np.testing.assert_allclose(np.concatenate(mine), whole.numpy(), atol=1e-5)
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    for name, theirs in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], theirs, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_head_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    """A head's masters are read back bit for bit; names of another module are refused, and nothing is written."""
    head = ValueHead(64, 5)
    masters = MasterOptimizer(head, TrainerSection(), torch.float32).named_master(head)
    for wrong in ({}, {"weight": masters["weight"]}, {f"value_head.{name}": part for name, part in masters.items()}):
        with pytest.raises(CheckpointError, match="a value head is weight and bias"):
            value_model.save_head(tmp_path, wrong)
    assert list(tmp_path.iterdir()) == []
    value_model.save_head(tmp_path, masters)
    again = value_model.load_head(tmp_path, 64, None)
    assert torch.equal(again.weight, head.weight)
    assert torch.equal(again.bias, head.bias)


def test_a_new_head_is_drawn_from_its_seed() -> None:
    """Equal seeds give equal heads, others do not; first values are small; the global random state is left alone."""
    state = torch.get_rng_state()
    head, same, other = ValueHead(576, 1), ValueHead(576, 1), ValueHead(576, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(head.weight, same.weight)
    assert not torch.equal(head.weight, other.weight)
    assert float(head.weight.detach().std()) == pytest.approx(1 / 577, rel=0.2)
    assert float(head.bias.detach()) == 0.0
    with torch.no_grad():
        values = head(torch.randn((50, 576), generator=torch.Generator().manual_seed(0)).bfloat16())
    assert values.shape == (50,)
    assert values.dtype == torch.float32
    assert float(values.abs().max()) < 0.3


@settings(deadline=None)
@given(
    numbers=st.lists(st.floats(-100, 100), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    offset=st.sampled_from([0.0, 1e7]),
)
def test_moments_do_not_depend_on_the_split(numbers: list[float], cuts: list[int], offset: float) -> None:
    """However numbers are cut, merged moments are numpy's; far from 0 too, where sums of squares would fail."""
    array = np.array(numbers, dtype=np.float64) + offset
    merged = Moments()
    for part in np.split(array, sorted(min(cut, len(array)) for cut in cuts)):
        merged = merged.merge(Moments.of(torch.from_numpy(part)))
    assert merged.count == len(array)
    if len(array):
        assert merged.mean == pytest.approx(array.mean(), rel=1e-12, abs=1e-9)
        assert merged.deviation == pytest.approx(array.var() * len(array), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e-30, 12345.678])
def test_equal_returns_have_no_explained_variance(value: float) -> None:
    """Equal numbers deviate by exactly 0 after any merge, so that nothing is divided by rounding errors."""
    stats = ValueStats()
    for size in (1, 3, 7):
        same = torch.full((size,), value, dtype=torch.float32)
        stats = stats.merge(ValueStats(values=Moments.of(same), returns=Moments.of(same), errors=Moments.of(same)))
    assert stats.returns.deviation == 0.0
    assert stats.explained_variance is None
    assert all(metric is None for metric in ValueStats().metrics(1).values() if metric != 0.0)


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2, 4 and values 1, 2, 3: errors -1, 0, 1, so 1 - 2 / 8, in two parts as in one."""
    returns, values = torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    stats = ValueStats()
    for part in (slice(0, 1), slice(1, 3)):
        of = [Moments.of(x) for x in (values[part], returns[part], returns[part] - values[part])]
        stats = stats.merge(ValueStats(0.25, 1, *of))
    assert stats.explained_variance == pytest.approx(0.75)
    metrics = stats.metrics(2)
    assert metrics == pytest.approx(
        {
            "critic/value_loss": 0.25,
            "critic/explained_variance": 0.75,
            "critic/clip_fraction": 2 / 3,
            "critic/value_mean": 2.0,
            "critic/return_mean": 2.0,
        }
    )


@pytest.mark.parametrize("clip", [None, 0.2])
def test_loss_and_statistics_equal_a_naive_loop(clip: float | None) -> None:
    """Half the worse of plain and clipped squared error, weighted, over loss tokens; the gradient is cut where said."""
    samples = valued_samples()
    batch = pack(samples)
    generator = torch.Generator().manual_seed(1)
    current = torch.randn(batch.targets.shape, generator=generator, requires_grad=True)
    loss, stats = weighted_value_loss(current, batch, clip)
    loss.backward()

    total, cut, gradient, i = 0.0, 0, [], 0
    returns, errors = [], []
    for sample in batch.samples:
        for t in range(sample.num_tokens):
            v, old, target = float(current[i].detach()), float(sample.values[t]), float(sample.returns[t])  # type: ignore[index]
            i += 1
            if not sample.loss_mask[t]:
                gradient.append(0.0)
                continue
            plain, slope = 0.5 * (v - target) ** 2, v - target
            if clip is not None:
                near = min(max(v, old - clip), old + clip)
                if 0.5 * (near - target) ** 2 > plain:
                    plain, slope, cut = 0.5 * (near - target) ** 2, 0.0, cut + 1
            total += sample.token_weight * plain
            gradient.append(sample.token_weight * slope)
            returns.append(target)
            errors.append(target - old)
    assert float(loss.detach()) == stats.loss == pytest.approx(total, rel=1e-5)
    assert (stats.num_clipped, stats.num_tokens) == (cut, len(returns))
    assert (cut > 0) == (clip is not None)
    torch.testing.assert_close(current.grad, torch.tensor(gradient), atol=1e-6, rtol=1e-5)
    assert stats.explained_variance == pytest.approx(1 - np.var(errors) / np.var(returns), rel=1e-9)
    assert stats.returns.mean == pytest.approx(np.mean(returns), rel=1e-9)


def test_masked_tokens_enter_nothing() -> None:
    """NaN and infinity outside the mask change neither loss nor gradient nor statistics by a bit."""
    results = []
    for junk in (0.0, math.nan, math.inf):
        samples = valued_samples()
        for sample in samples:
            sample.values[~sample.loss_mask] = junk  # type: ignore[index]
            sample.returns[~sample.loss_mask] = junk  # type: ignore[index]
        batch = pack(samples)
        current = torch.linspace(-1, 1, len(batch.targets), requires_grad=True)
        loss, stats = weighted_value_loss(current, batch, 0.2)
        loss.backward()
        results.append((float(loss), current.grad.tolist(), stats))  # type: ignore[union-attr]
    assert results[0] == results[1] == results[2]
    assert math.isfinite(results[0][0])


def test_a_batch_without_loss_tokens_is_nothing(tiny_model: Path) -> None:
    """Its loss is 0, its gradient zeros, and its statistics merge as nothing."""
    model = value_model.load(tiny_model, 3)
    attention.enable(model.decoder)
    samples = valued_samples()
    for sample in samples:
        sample.loss_mask[:] = False
    batch = pack(samples)
    loss, stats = weighted_value_loss(value_model.values(model.decoder, model.value_head, batch), batch, 0.2)
    loss.backward()
    assert float(loss) == 0.0
    assert all(float(p.grad.abs().max()) == 0.0 for p in model.parameters() if p.grad is not None)
    some = ValueStats(1.0, 2, *(Moments.of(torch.tensor([1.0, 4.0])) for _ in range(3)))
    assert some.merge(stats) == stats.merge(some) == some


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tiny_model: Path, tmp_path: Path) -> Path:
    """A critic on disk, to damage."""
    model = value_model.load(tiny_model, 3)
    directory = tmp_path / "critic"
    directory.mkdir()
    value_model.save(directory, model, tiny_model, MasterOptimizer(model, TrainerSection(), torch.float32))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        value_model.load(directory, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_critic_comes_back_bit_for_bit(tiny_model: Path, saved: Path) -> None:
    """Decoder and head read back as they were, also as the start of another run, whose seed then draws nothing."""
    before = value_model.load(tiny_model, 3).state_dict()
    for seed in (None, 99):
        after = value_model.load(saved, seed).state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(value_model.load(tiny_model, 99).value_head.weight, before["value_head.weight"])


def test_the_folder_is_a_model_for_transformers(saved: Path) -> None:
    """Stock AutoModel reads the decoder, and the whole folder passes as a model source."""
    from transformers import AutoModel

    decoder = AutoModel.from_pretrained(saved)
    assert decoder.config.architectures == ["LlamaModel"]
    assert torch.equal(decoder.norm.weight, value_model.load(saved, None).decoder.norm.weight)  # type: ignore[union-attr]
    models.check_directory(saved)


@pytest.mark.parametrize("name", ["model.safetensors", HEAD])
def test_torn_files_are_refused(saved: Path, name: str) -> None:
    """A file cut off anywhere does not pass for a critic."""
    content = (saved / name).read_bytes()
    for size in (0, 5, len(content) - 1):
        (saved / name).write_bytes(content[:size])
        assert str(saved) in refusal(saved)


def test_what_a_saved_critic_lacks_is_named(saved: Path, tiny_model: Path) -> None:
    """No head where one was saved, a head of another width, a decoder without one of its weights."""
    head = load_file(saved / HEAD)
    save_file({**head, "weight": torch.zeros(1, 32)}, saved / HEAD)
    assert "'weight': (1, 32)" in refusal(saved)
    (saved / HEAD).unlink()
    assert f"has no {HEAD}" in refusal(saved)
    shutil.copy(tiny_model / "model.safetensors", saved / "model.safetensors")
    weights = load_file(saved / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights, such as layers.1.mlp.up_proj.weight" in refusal(saved)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tiny_model: Path, tmp_path: Path) -> None:
    """Not a traceback of the library that met it."""
    model = value_model.load(tiny_model, 3)
    optimizer = MasterOptimizer(model, TrainerSection(), torch.float32)
    with pytest.raises(CheckpointError, match="gone cannot be written"):
        value_model.save(tmp_path / "gone", model, tiny_model, optimizer)
    with pytest.raises(CheckpointError, match="gone cannot be written"):
        value_model.save_head(tmp_path / "gone", dict(model.value_head.named_parameters()))
