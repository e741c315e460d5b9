"""Adapters: what is trained, what the reference is, what the rollout engine serves, what stock peft reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from core_trainer import attention, lora, models
from core_trainer.batching import pack
from core_trainer.forward import checkpoint_layers, log_probs
from core_trainer.optimizer import MasterOptimizer
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native import packed_linear
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams
from rlinsight import config
from rlinsight.config import LoraSection, TrainerSection
from rlinsight.errors import CheckpointError, ConfigError, ModelError
from tests.core_trainer.test_native_engine import generate, prompts
from tests.core_trainer.test_shared_prefix import ragged_samples

SECTION = LoraSection(rank=4, alpha=6.0)
TOKENS = torch.arange(1, 40)[None]


def make_model(directory: Path, section: LoraSection = SECTION, seed: int = 0, trained: bool = True) -> PreTrainedModel:
    """A wrapped model in float32; ``trained`` gives B random values, as after updates."""
    model = models.load_model(directory, torch.float32)
    lora.wrap(model, section, seed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in lora.adapted(model).values() if trained else ():
            layer.lora_B["default"].weight.normal_(0, 0.1, generator=generator)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


def named_masters(model: PreTrainedModel) -> dict[str, Tensor]:
    return MasterOptimizer(model, TrainerSection(), torch.float32).named_master(model)


def merged_twin(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """A model without adapters that has the merged weights."""
    twin = models.load_model(directory, torch.float32)
    state = lora.merged_state(model)
    assert set(state) == {name for name, _ in twin.named_parameters()}
    twin.load_state_dict(state, strict=False)
    return twin


def test_new_adapters_change_nothing_and_alone_are_trained(tiny_model: Path) -> None:
    """B starts at 0; A follows the seed and leaves the global generator alone; every target has one of the rank."""
    plain = models.load_model(tiny_model, torch.float32)
    state = torch.get_rng_state()
    model, twin, other = (make_model(tiny_model, seed=seed, trained=False) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(model), logits(plain))
    assert len(lora.adapted(model)) == 2 * 7
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if ".lora_A.default." in n or ".lora_B.default." in n}
    first, same, different = (
        next(iter(lora.adapted(m).values())).lora_A["default"].weight for m in (model, twin, other)
    )
    assert first.shape[0] == 4
    assert torch.equal(first, same)
    assert not torch.equal(first, different)


def test_packed_log_probs_and_gradients_are_those_of_the_merged_weights(tiny_model: Path) -> None:
    """Log-probs equal a plain model with W + s B A; by the chain rule dB = s dW A^T and dA = s B^T dW."""
    model = make_model(tiny_model)
    twin = merged_twin(tiny_model, model)
    found = []
    for each in (model, twin):
        attention.enable(each)
        batch = pack(ragged_samples())
        values, _ = log_probs(each, batch, 0.7)
        (values * batch.gather("advantages")).sum().backward()
        found.append(values.detach())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    weights = dict(twin.named_parameters())
    for name, layer in lora.adapted(model).items():
        a, b, grad = layer.lora_A["default"].weight, layer.lora_B["default"].weight, weights[f"{name}.weight"].grad
        assert grad is not None
        torch.testing.assert_close(b.grad, 1.5 * grad @ a.detach().T, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(a.grad, 1.5 * b.detach().T @ grad, atol=1e-5, rtol=1e-3)
        assert layer.base_layer.weight.grad is None


def test_recomputed_layers_give_adapters_the_same_gradients(tiny_model: Path) -> None:
    """Gradient checkpointing works where the layer's input needs no gradient: the embedding is frozen."""
    gradients = []
    for recompute in (False, True):
        model = make_model(tiny_model)
        attention.enable(model)
        if recompute:
            checkpoint_layers(model)
        log_probs(model, pack(ragged_samples()), 1.0)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(*gradients, strict=True))


def test_disabled_is_the_base_model_bit_for_bit(tiny_model: Path) -> None:
    """Off inside, also when the inside fails; on and trainable again after it."""
    model = make_model(tiny_model)
    before = logits(model)
    plain = logits(models.load_model(tiny_model, torch.float32))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with lora.disabled(model):
        assert torch.equal(logits(model), plain)
    with pytest.raises(KeyError), lora.disabled(model):
        raise KeyError
    assert torch.equal(logits(model), before)
    assert not torch.equal(before, plain)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    with (
        pytest.raises(AssertionError, match="without adapters"),
        lora.disabled(models.load_model(tiny_model, torch.float32)),
    ):
        pass


def test_an_update_moves_adapters_alone(tiny_model: Path) -> None:
    """Masters hold the adapters only, the base keeps its bits, and the gradient norm is all the adapters'."""
    model = make_model(tiny_model)
    attention.enable(model)
    optimizer = MasterOptimizer(model, TrainerSection(learning_rate=1e-2), torch.float32)
    assert optimizer.master.numel() == sum(
        4 * sum(layer.base_layer.weight.shape) for layer in lora.adapted(model).values()
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    log_probs(model, pack(ragged_samples()), 1.0)[0].sum().backward()
    optimizer.accumulate()
    stats = optimizer.step(1)
    assert stats.grad_norms == {"lora": pytest.approx(stats.grad_norm)}
    assert stats.weights_changed > 0.9
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is (".lora_" not in name), name


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "self_attn.v_proj"]])
def test_stock_peft_loads_a_saved_adapter(tiny_model: Path, tmp_path: Path, targets: list[str]) -> None:
    """``PeftModel.from_pretrained`` over the base computes our logits; equal adapters are saved as equal bytes."""
    from peft import PeftModel

    model = make_model(tiny_model, LoraSection.model_validate({"rank": 4, "alpha": 6, "targets": targets}))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lora.save(tmp_path / name, model, named_masters(model), str(tiny_model))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    stock = PeftModel.from_pretrained(base, tmp_path / "one").eval()
    torch.testing.assert_close(logits(stock), logits(model), atol=1e-6, rtol=1e-6)
    assert not torch.equal(logits(stock), logits(models.load_model(tiny_model, torch.float32)))
    for name in (lora.CONFIG, lora.WEIGHTS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    settings = json.loads((tmp_path / "one" / lora.CONFIG).read_text())
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert settings["target_modules"] == (every if targets == "all-linear" else sorted(targets))
    assert settings["base_model_name_or_path"] == str(tiny_model)
    assert settings["task_type"] == "CAUSAL_LM"


def test_a_saved_adapter_comes_back_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever the adapters were before the load."""
    model = make_model(tiny_model)
    lora.save(tmp_path, model, named_masters(model), "base")
    twin = make_model(tiny_model, seed=5, trained=False)
    lora.load(twin, tmp_path)
    assert torch.equal(logits(twin), logits(model))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_adapters_of_other_settings_or_torn_files_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """The error says which setting differs, or which file cannot be read; nothing was loaded."""
    model = make_model(tiny_model)
    lora.save(tmp_path, model, named_masters(model), "base")
    for values, message in (
        ({"alpha": 8}, r"alpha 6\.0, model\.lora says 8\.0"),
        ({"rank": 2}, r"rank 4, model\.lora says 2"),
        ({"targets": ["q_proj"]}, r"targets \['down_proj'"),
    ):
        other = make_model(tiny_model, LoraSection.model_validate({"rank": 4, "alpha": 6, **values}))
        with pytest.raises(CheckpointError, match=message):
            lora.load(other, tmp_path)
    weights = load_file(tmp_path / lora.WEIGHTS)
    name = next(iter(weights))
    save_file({**weights, name: torch.zeros(1, 1)}, tmp_path / lora.WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{name} as \(1, 1\), this model needs"):
        lora.load(model, tmp_path)
    (tmp_path / lora.WEIGHTS).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="no adapter that can be read"):
        lora.load(model, tmp_path)
    with pytest.raises(CheckpointError, match="no adapter that can be read"):
        lora.load(model, tmp_path / "missing")


@pytest.mark.parametrize("target", ["q_projection", "lm_head", "embed_tokens", "proj"])
def test_targets_that_cannot_be_adapted_are_refused(tiny_model: Path, target: str) -> None:
    """Unknown names, the output layer and the embedding; the error lists what there is. One good name hides none."""
    model = models.load_model(tiny_model, torch.float32)
    with pytest.raises(
        ModelError, match=f"no linear layer '{target}' to adapt; there are down_proj, gate_proj, k_proj"
    ):
        lora.wrap(model, LoraSection(targets=["q_proj", target]), 0)
    assert lora.adapted(model) == {}


@pytest.mark.parametrize(
    ("targets", "message"), [("all-linear", "have no linear layers"), (["c_attn"], "there are none")]
)
def test_layers_that_are_no_plain_linear_are_refused(targets: str | list[str], message: str) -> None:
    """GPT-2's projections are transposed convolutions, which merging and packing would compute wrongly."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match=message):
        lora.wrap(model, LoraSection.model_validate({"targets": targets}), 0)


@pytest.fixture(params=["float32", "packed", "bfloat16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """``packed`` is float32 in the block layout, which every processor has, where bfloat16's needs AVX-512."""
    if request.param == "packed":
        monkeypatch.setattr(packed_linear, "_packable", lambda weight: True)
    return torch.bfloat16 if request.param == "bfloat16" else torch.float32


def make_engine(model: PreTrainedModel, directory: Path, dtype: torch.dtype, merge: bool) -> NativeEngine:
    for p in model.parameters():
        p.data = p.data.to(dtype)
    attention.enable(model)
    return NativeEngine(model, models.load_tokenizer(directory), (), 64, merge)


@pytest.mark.parametrize("merge", [True, False])
def test_the_native_engine_serves_base_and_adapter(tiny_model: Path, dtype: torch.dtype, merge: bool) -> None:
    """Merged or apart, it samples with the log-probs of a model that has the merged weights, and training still sees
    the adapters.
    """
    model = make_model(tiny_model)
    twin = make_engine(merged_twin(tiny_model, model), tiny_model, torch.float32, True)
    engine = make_engine(model, tiny_model, dtype, merge)
    requests = [GenerateRequest(str(i), p, SamplingParams(8, 1.0, seed=i)) for i, p in enumerate(prompts(6))]
    twin.sync_weights(0)
    engine.sync_weights(0)
    expected, found = generate(twin, requests), generate(engine, requests)
    for mine, theirs in zip(found, expected, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)) if a != b), 8)
        assert same == 8 or dtype == torch.bfloat16
        tolerance = 1e-4 if dtype == torch.float32 else 0.15
        np.testing.assert_allclose(mine.rollout_log_probs[:same], theirs.rollout_log_probs[:same], atol=tolerance)
    assert all(not hasattr(layer.forward, "func") for layer in lora.adapted(model).values())


@pytest.mark.parametrize("merge", [True, False])
def test_a_sync_rewrites_what_training_moved(tiny_model: Path, dtype: torch.dtype, merge: bool) -> None:
    """From the second sync on: the adapted layers where they are merged, the adapters alone where they are not; and
    the engine follows the adapters.
    """
    model = make_model(tiny_model)
    engine = make_engine(model, tiny_model, dtype, merge)
    engine.sync_weights(0)
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(6, 0.0))
    before = generate(engine, [request])[0]
    layers = lora.adapted(model).values()
    with torch.no_grad():
        for layer in layers:
            layer.lora_B["default"].weight.mul_(-20)
    (synced,) = engine.sync_weights(1)
    base = sum(layer.base_layer.weight.nbytes for layer in layers)
    adapters = sum(layer.lora_A["default"].weight.nbytes + layer.lora_B["default"].weight.nbytes for layer in layers)
    packed = adapters if packed_linear._packable(model.lm_head.weight) else 0
    assert (synced.moved, synced.refreshed) == (0, base if merge else packed)
    after = generate(engine, [request])[0]
    assert after.rollout_log_probs != before.rollout_log_probs
    twin = make_engine(merged_twin(tiny_model, model.float()), tiny_model, torch.float32, True)
    twin.sync_weights(1)
    first = generate(twin, [request])[0]
    np.testing.assert_allclose(
        after.rollout_log_probs[0], first.rollout_log_probs[0], atol=1e-4 if dtype == torch.float32 else 0.2
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sync": "adapter"}, "model.lora.sync=adapter works with rollout.engine: native only, not vllm"),
        ({"targets": []}, "targets is empty"),
        ({"rank": 0}, "model.lora.rank=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(section: dict, message: str) -> None:
    """vLLM gets merged weights only; adapters have a target and a rank."""
    tree = {
        "model": {"source": "m", "lora": section},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "rollout": {"engine": "vllm"},
    }
    with pytest.raises(ConfigError, match=message):
        config.parse(tree)
