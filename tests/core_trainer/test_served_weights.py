"""The native engine's checksum is of what it computes with: a copy that is not refreshed, or is damaged, shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from core_trainer import attention, lora, models
from core_trainer.rollout import checksum
from core_trainer.rollout.native import packed_linear
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.rollout.native.packed_linear import PackedLinears
from rlinsight.config import LoraSection
from tests.tiny import make_tiny_model


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer is packed, which float32 ones gain nothing from unless they are large."""
    monkeypatch.setattr(packed_linear, "_packable", lambda weight: True)


KINDS = ["plain", "untied", "merged adapters", "adapters apart", "biased"]


def load(kind: str, path: Path, tiny_model: Path) -> PreTrainedModel:
    if kind == "untied":
        tiny_model = make_tiny_model(path / "untied", tie_embeddings=False, seed=3)
    model = models.load_model(tiny_model, torch.float32)
    if kind == "biased":  # as Qwen2 has them: query, key and value, and no others
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                linear = getattr(layer.self_attn, name)
                linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))
    if "adapters" in kind:
        lora.wrap(model, LoraSection(rank=4), seed=1)
        with torch.no_grad():
            for layer in lora.adapted(model).values():
                layer.lora_B["default"].weight.normal_()
    attention.enable(model)
    return model


def trained(model: PreTrainedModel) -> str:
    return checksum.of(lora.merged_state(model).items())


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_the_policy_after_a_sync_and_of_older_weights_before(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:
    """Every trained parameter moves; then the copies are those before it, where there are copies."""
    model = load(kind, tmp_path, tiny_model)
    packed = PackedLinears(model, merge_adapters=kind != "adapters apart")
    packed.refresh()
    assert packed._products
    assert checksum.of(packed.served()) == trained(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.125)
    assert checksum.of(packed.served()) != trained(model)
    packed.refresh()
    assert checksum.of(packed.served()) == trained(model)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("kind", ["plain", "biased"])
def test_one_stale_copy_shows(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    """A group of layers keeps its copy when all others are refreshed."""
    model = load(kind, tmp_path, tiny_model)
    packed = PackedLinears(model, merge_adapters=True)
    packed.refresh()
    assert len(packed._products) > 1
    for index, kept in enumerate(list(packed._products.values())):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        packed.refresh()
        assert checksum.of(packed.served()) == trained(model)
        packed._products[index] = kept
        assert checksum.of(packed.served()) != trained(model)


def test_the_engine_says_so_with_every_sync(tiny_model: Path) -> None:
    """Whatever it has copies of on this processor."""
    model = models.load_model(tiny_model, torch.float32)
    attention.enable(model)
    engine = NativeEngine(model, models.load_tokenizer(tiny_model), (2,), 4)
    for version in range(2):
        (sync,) = engine.sync_weights(version)
        assert sync.checksum_served == trained(model)
        with torch.no_grad():
            next(model.parameters()).add_(1)
