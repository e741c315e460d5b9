"""What vLLM is started with, in this process or as a server. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinsight.config import VllmSection
from rlinsight.errors import EngineError

BLOCK_TOKENS = 32  # prefix cache granularity; smaller, or no multiple of 32, leaves vLLM's fast CPU attention
PREFILL_TOKENS = 4096  # prompt tokens computed in one step
MAX_TOP_LOG_PROBS = 64  # likeliest tokens a request may ask for

ENVIRONMENT = {  # read while vLLM is imported
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler can be replaced
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}

# Environment variables of a server: its key, which vLLM knows by this name, the process it ends with, its name in
# telemetry, and what telemetry.setup takes, as JSON.
API_KEY, OWNER = "VLLM_API_KEY", "RLINSIGHT_VLLM_OWNER"
REPLICA, TELEMETRY = "RLINSIGHT_VLLM_REPLICA", "RLINSIGHT_VLLM_TELEMETRY"
PLUGIN = "rlinsight"  # our stat logger's entry point
STOP_TIMEOUT_S = 10.0  # until what did not heed a signal is killed

IDENTITY_HEADER = "x-rlinsight-identity"  # of a request to a server of ours: JSON with its rollout's attributes


def engine_arguments(section: VllmSection, dtype: str, max_batch_size: int, max_length: int) -> dict[str, Any]:
    """Arguments of both, by the names of vLLM's EngineArgs. ``max_length`` is of prompt and response."""
    memory: dict[str, Any] = {"kv_cache_memory_bytes": int(section.kv_cache_gib * 2**30)}
    if section.gpu_memory_utilization is not None:  # untested, as are the two below
        memory = {"gpu_memory_utilization": section.gpu_memory_utilization}
    return memory | {
        "tensor_parallel_size": section.tensor_parallel_size,
        "enable_sleep_mode": section.sleep_level is not None,
        "dtype": dtype,
        "max_model_len": max_length,
        "max_num_seqs": max_batch_size,
        "max_num_batched_tokens": max(PREFILL_TOKENS, max_batch_size),
        "max_logprobs": MAX_TOP_LOG_PROBS,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "enforce_eager": True,  # compiled graphs would hold on to the weights they were compiled with
        "generation_config": "vllm",  # sampling is what the request says, not the model's defaults
        "worker_extension_cls": "core_trainer.rollout.vllm.worker.WorkerExtension",
    }


def check_platform(section: VllmSection) -> None:
    """Raise EngineError for options that have no effect without a GPU."""
    import torch

    given = {
        "gpu_memory_utilization": section.gpu_memory_utilization is not None,
        "sleep_level": section.sleep_level is not None,
        "tensor_parallel_size": section.tensor_parallel_size > 1,
    }
    for option, is_given in given.items():
        if is_given and not torch.cuda.is_available():
            raise EngineError(
                f"rollout.vllm.{option}={getattr(section, option)} needs a GPU, and there is none; remove it"
            )


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same for ``vllm serve``. A flag that is off is left out: all that are ours are off by default there."""
    words = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False:
            words += [option, str(value)]
    return words
