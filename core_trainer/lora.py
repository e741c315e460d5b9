"""LoRA adapters in a model, through peft: put in, switched off, merged, saved and loaded.

Only the adapters are trained, W x + (alpha / rank) B A x for a frozen W (arXiv 2106.09685). The model stays the
transformers model it was: attention, the output layer and the rollout engine find what they look for. peft is imported
when a model gets adapters, not before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlinsight.config import LoraSection
from rlinsight.errors import CheckpointError, ModelError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # the names peft looks for
_ADAPTER = "default"  # peft's name of an adapter; ours is the only one
NO_COPIES: Mapping[int, Tensor] = {}


def wrap(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Put adapters into the target layers and freeze all else; the model computes what it did, since B starts at 0.

    A is random by ``seed``, equal on all ranks. Raises ModelError when a target is not there, or is not a linear layer.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=_targets(model, section),
        task_type=TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _ADAPTER)


def _targets(model: PreTrainedModel, section: LoraSection) -> list[str]:
    """Names that layers end with, as peft matches them; it would pass over one that matches nothing in silence."""
    output = model.get_output_embeddings()
    kinds = {name: type(m) is nn.Linear and m is not output for name, m in model.named_modules()}
    there = sorted({name.rpartition(".")[2] for name, fits in kinds.items() if fits})
    targets = there if section.targets == "all-linear" else section.targets
    for target in targets:
        matches = [fits for name, fits in kinds.items() if f".{name}".endswith(f".{target}")]
        if not matches or not all(matches):
            raise ModelError(
                f"model.lora.targets: {model.config.model_type} models have no linear layer {target!r} to adapt; "
                f"there are {', '.join(there) or 'none'}"
            )
    if not targets:
        raise ModelError(f"{model.config.model_type} models have no linear layers to adapt; remove model.lora")
    return list(targets)


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers that hold an adapter, by name; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that was given adapters, bit for bit: the reference of a KL term."""
    layers = adapted(model)
    assert layers, "a model without adapters is not its own reference"
    for layer in layers.values():
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def parts(layer: Any) -> list[Tensor]:
    """W, A and B of an adapted layer."""
    return [x.weight for x in (layer.base_layer, layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER])]


def merged_weight(layer: Any, copies: Mapping[int, Tensor] = NO_COPIES) -> Tensor:
    """W + scaling B A of an adapted layer, added in float32 and rounded once to the dtype of W.

    ``copies`` stand for parameters, by their ids.
    """
    weight, a, b = (copies.get(id(part), part).detach() for part in parts(layer))
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[_ADAPTER]).to(weight.dtype)


def merged_state(model: nn.Module, copies: Mapping[int, Tensor] = NO_COPIES) -> dict[str, Tensor]:
    """Parameters under the names they have without adapters, adapters added to the weights; tied ones once.

    A model without adapters gives its own parameters. ``copies`` stand for parts of adapted layers, by their ids.
    """
    weights = {f"{name}.base_layer.weight": layer for name, layer in adapted(model).items()}
    return {
        name.replace(".base_layer.", "."): merged_weight(weights[name], copies)
        if name in weights
        else parameter.detach()
        for name, parameter in model.named_parameters()
        if not _of_adapter(name)
    }


def save(directory: Path, model: PreTrainedModel, masters: Mapping[str, Tensor], source: str) -> None:
    """Write the adapters so that ``peft.PeftModel.from_pretrained`` loads them over the model ``source`` names.

    ``masters`` are their weights by parameter name. Raises OSError or SafetensorError.
    """
    config = _config(model)
    config.base_model_name_or_path = source
    config.target_modules = sorted(config.target_modules)  # a set, which would be written in any order
    config.inference_mode = True
    config.save_pretrained(str(directory))
    weights = {_saved_name(name): masters[name].contiguous() for name in _adapter_parameters(model)}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def load(model: PreTrainedModel, directory: Path) -> None:
    """Set the adapters of a wrapped model to saved ones.

    Raises CheckpointError when they are missing, unreadable, or were made for another model or another
    ``model.lora``.
    """
    from peft import LoraConfig

    try:
        theirs = LoraConfig.from_pretrained(str(directory), local_files_only=True)
        weights = load_file(directory / WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{directory} holds no adapter that can be read: {error}") from None
    ours = _config(model)
    for option, name in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets")):
        saved, wanted = getattr(theirs, option), getattr(ours, option)
        if option == "target_modules":
            saved, wanted = sorted(saved), sorted(wanted)
        if saved != wanted:
            raise CheckpointError(
                f"the adapter in {directory} has {name} {saved}, model.lora says {wanted}; "
                "resume with the settings the run was started with"
            )
    parameters = {_saved_name(name): parameter for name, parameter in _adapter_parameters(model).items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if shapes != expected:
        name = next(name for name in [*expected, *shapes] if shapes.get(name) != expected.get(name))
        raise CheckpointError(
            f"the adapter in {directory} has {name} as {shapes.get(name)}, this model needs {expected.get(name)}; "
            "resume with the model the run was started with"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _config(model: PreTrainedModel) -> Any:
    """A copy of the settings peft left with the model."""
    return copy.copy(model.peft_config[_ADAPTER])  # type: ignore[index]


def _of_adapter(parameter: str) -> bool:
    return ".lora_A." in parameter or ".lora_B." in parameter


def _adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if _of_adapter(name)}


def _saved_name(parameter: str) -> str:
    """A parameter's name as stock peft saves it: without the adapter's name, inside PeftModel's two wrappers."""
    return "base_model.model." + parameter.replace(f".{_ADAPTER}.", ".")
