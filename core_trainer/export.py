"""A checkpoint as a plain Hugging Face directory, for whoever serves or evaluates the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel

from core_trainer import checkpoint, lora, models
from rlinsight.errors import CheckpointError, ConfigError, ModelError


def export(
    directory: Path,
    output: Path,
    dtype: Literal["float32", "bfloat16", "float16"],
    adapter_only: bool,
    say: Callable[[str], object],
) -> None:
    """Write the model of checkpoint ``directory`` to ``output``, which appears whole or not at all.

    Adapters are merged into their model in float32, or with ``adapter_only`` written by themselves, for peft. Optimizer
    and other training state stay behind. Raises CheckpointError, ModelError, or ConfigError for an ``output`` in use.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not an empty folder; name another")
    say(f"checking {directory}")
    checkpoint.check_content(directory)
    has_adapter = (directory / lora.CONFIG).is_file()
    if adapter_only and not has_adapter:
        raise ConfigError(f"{directory} has no adapter: the whole model was trained; leave out --adapter-only")
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        if adapter_only:
            for name in (lora.CONFIG, lora.WEIGHTS):
                shutil.copy(directory / name, partial / name)
        else:
            say("loading the model")
            source = _base(directory) if has_adapter else directory
            model = _merged(source, directory, say) if has_adapter else models.load_model(source, torch.float32)
            say(f"writing {model.num_parameters():,} weights in {dtype}")
            model.to(getattr(torch, dtype)).save_pretrained(partial)
            models.load_tokenizer(source).save_pretrained(partial)
        partial.rename(output)
    except OSError as error:
        raise ModelError(f"{output} cannot be written ({error}); free some space or name another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _base(directory: Path) -> Path:
    """The model that the adapter of a checkpoint belongs to."""
    base = Path(str(PeftConfig.from_pretrained(str(directory)).base_model_name_or_path))
    if not base.is_dir():
        raise CheckpointError(f"{directory} holds an adapter of {base}, which is not there; bring that model back")
    return base


def _merged(base: Path, directory: Path, say: Callable[[str], object]) -> PreTrainedModel:
    model = models.load_model(base, torch.float32)
    say("merging the adapter")
    try:
        return PeftModel.from_pretrained(model, str(directory)).merge_and_unload()  # type: ignore[operator]
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {directory} does not fit {base}: {models.one_line(error)}") from None
