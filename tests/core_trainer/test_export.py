"""An exported checkpoint is a model directory like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_trainer import checkpoint, lora, models
from core_trainer.checkpoint import TrainerState
from core_trainer.export import export
from rlinsight.config import LoraSection, ModelSection, TrainerSection
from rlinsight.errors import CheckpointError, ConfigError

IDS = torch.tensor([[5, 9, 300, 41]])


def trained(model: Path, folder: Path, section: LoraSection | None) -> tuple[Path, torch.Tensor]:
    """A checkpoint after one update, and the logits of the model it holds."""
    settings = ModelSection(source=str(model), compute_dtype="float32", lora=section)
    policy, optimizer, _ = checkpoint.load_policy(settings, TrainerSection(learning_rate=1e-2), model, None, seed=1)
    policy(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.accumulate()
    optimizer.step(1)

    def save(directory: Path) -> None:
        checkpoint.save_policy(directory, policy, model, optimizer, 1)

    with torch.no_grad():
        return checkpoint.write(folder, TrainerState(1, {}), save, keep=1), policy(input_ids=IDS).logits


def no_words(text: str) -> None:
    """Nobody listens."""


def test_a_trained_model(tmp_path: Path, tiny_model: Path) -> None:
    """Stock transformers load it, with its tokenizer and in its precision; nothing of the training is left in it."""
    path, logits = trained(tiny_model, tmp_path / "c", None)
    said: list[str] = []
    export(path, tmp_path / "out", "float32", False, said.append)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(exported(input_ids=IDS).logits, logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {checkpoint.OPTIMIZER, checkpoint.STATE}
    assert any("weights in float32" in text for text in said)
    export(path, tmp_path / "half", "bfloat16", False, no_words)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    models.check_directory(tmp_path / "half")


def test_an_adapter_is_merged_or_stays_by_itself(tmp_path: Path, tiny_model: Path) -> None:
    """Merged it is a model of its own; alone, stock peft puts it over the model it names. Both compute the same."""
    path, logits = trained(tiny_model, tmp_path / "c", LoraSection(rank=4))
    export(path, tmp_path / "out", "float32", False, no_words)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=IDS).logits
    assert torch.allclose(merged, logits, atol=1e-5)
    assert not torch.allclose(AutoModelForCausalLM.from_pretrained(tiny_model)(input_ids=IDS).logits, logits, atol=1e-3)
    export(path, tmp_path / "adapter", "float32", True, no_words)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {lora.CONFIG, lora.WEIGHTS}
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    alone = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(input_ids=IDS).logits
    assert torch.allclose(alone, logits, atol=1e-5)


def test_what_cannot_be_exported_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """A folder in use, no adapter, no checkpoint, a damaged one: nothing is written over or left half done."""
    path, _ = trained(tiny_model, tmp_path / "c", None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is there already and not an empty folder"):
        export(path, out, "float32", False, no_words)
    (out / "mine").unlink()
    with pytest.raises(ConfigError, match="has no adapter"):
        export(path, out, "float32", True, no_words)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        export(tiny_model, out, "float32", False, no_words)
    weights = path / checkpoint.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the content of model\.safetensors has changed"):
        export(path, out, "float32", False, no_words)
    assert list(out.iterdir()) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "out"]
