"""`rollout.engine` picks the engine, and what an engine cannot do is refused before a run starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from core_trainer import attention, models
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.native.engine import NativeEngine
from rlinsight import config, preflight
from rlinsight.errors import ConfigError


def settings(**rollout: object) -> config.Config:
    """A config with these rollout options."""
    return config.parse(
        {
            "model": {"source": "some-owner/some-model"},
            "data": {"train": "reasoning_gym:chain_sum"},
            "reward": {"functions": [{"type": "numeric"}]},
            "rollout": rollout,
        }
    )


def test_native_is_what_a_config_gets(tiny_model: Path) -> None:
    """Without a word about engines, rollouts come from the native one, over the model that is trained."""
    parsed = settings(max_batch_size=9)
    model = models.load_model(tiny_model, torch.float32)
    attention.enable(model)
    engine = build_engine(parsed.rollout, parsed.data, model, models.load_tokenizer(tiny_model), tiny_model)
    assert isinstance(engine, NativeEngine)
    assert engine.model is model
    assert engine.scheduler.max_batch_size == 9


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vlm"}, "rollout.engine='vlm': input should be 'native', 'vllm'"),
        ({"vllm": {"kv_cache_gib": 2}}, "rollout: vllm has no effect with engine native"),
        (
            {"engine": "vllm", "vllm": {"kv_cache_gib": 0}},
            "rollout.vllm.kv_cache_gib=0: input should be greater than 0",
        ),
        (
            {"engine": "vllm", "vllm": {"kv_cache": 1}},
            "rollout.vllm.kv_cache: unknown key; did you mean 'kv_cache_gib'",
        ),
        ({"engine": "vllm", "temperature": 0.005}, "vLLM samples temperature=0.005 at 0.01; raise temperature"),
        ({"engine": "vllm_server", "temperature": 0.005}, "vLLM samples temperature=0.005 at 0.01; raise temperature"),
        ({"engine": "vllm", "vllm": {"replicas": 2}}, "vllm.replicas has no effect with engine vllm"),
        (
            {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}},
            "vllm.tensor_parallel_size has no effect with engine",
        ),
        (
            {"engine": "vllm", "vllm": {"kv_cache_gib": 2, "gpu_memory_utilization": 0.5}},
            "kv_cache_gib=2 has no effect with gpu_memory_utilization",
        ),
        ({"engine": "vllm", "vllm": {"sleep_level": 3}}, "rollout.vllm.sleep_level=3: input should be 1 or 2"),
    ],
)
def test_impossible_engine_options_are_refused(rollout: dict, message: str) -> None:
    """An option without effect, or a value an engine would quietly change, is an error."""
    with pytest.raises(ConfigError) as refusal:
        settings(**rollout)
    assert message in str(refusal.value)


def test_every_worker_has_a_server() -> None:
    """Fewer vLLM servers than policy workers are refused; as many, or more, are not."""
    tree = settings(engine="vllm_server", vllm={"replicas": 2}).model_dump(mode="json")
    for workers in (1, 2):
        config.parse(tree | {"trainer": {"num_workers": workers}})
    with pytest.raises(ConfigError, match=r"vllm.replicas=2 with trainer.num_workers=3 leaves a worker none"):
        config.parse(tree | {"trainer": {"num_workers": 3}})


def test_a_resolved_config_can_be_loaded_again() -> None:
    """Every engine's config survives being written out with every default."""
    servers = {"engine": "vllm_server", "vllm": {"replicas": 3}}
    for rollout in ({}, {"engine": "vllm"}, {"engine": "vllm", "vllm": {"kv_cache_gib": 2}}, servers):
        parsed = settings(**rollout)
        assert config.parse(parsed.model_dump(mode="json")).hash() == parsed.hash()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_told_before_the_run() -> None:
    """The refusal is one line with the command that installs it."""
    preflight.check(settings())
    with pytest.raises(ConfigError, match=r"rollout.engine=vllm: vLLM is not installed; run: make vllm") as refusal:
        preflight.check(settings(engine="vllm"))
    assert "\n" not in str(refusal.value)
