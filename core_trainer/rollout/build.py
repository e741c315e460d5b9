"""Which rollout engine a policy worker gets. An engine's own packages are imported only when it is chosen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import models
from core_trainer.exact import level
from core_trainer.exact.self_test import exact_engine
from core_trainer.rollout.engine import RolloutEngine
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams
from rlinsight.config import DataSection, RolloutSection

if TYPE_CHECKING:
    from core_trainer.rollout.vllm.servers import Address


def build_engine(
    rollout: RolloutSection,
    data: DataSection,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_dir: Path,
    merge_adapters: bool = True,
    replica: str = "policy/0",
    rank: int = 0,
    world_size: int = 1,
    servers: Sequence[Address] = (),
    run_id: str | None = None,
) -> RolloutEngine:
    """The engine ``rollout.engine`` names, over ``model``; serves its weights once ``sync_weights`` was called.

    ``model_dir`` is where the model came from. ``merge_adapters`` false makes the native engine compute adapters apart;
    others get merged weights always. ``replica`` is the name in telemetry of an engine in this process. Of servers,
    and of ``servers`` that the run has started, a worker gets its share by ``rank`` of ``world_size``. ``run_id`` names
    the folder in which it publishes weights, so that the run's next attempt finds what a killed one has left.
    """
    stop_token_ids = models.end_of_turn_ids(model.generation_config, tokenizer)
    length = data.max_prompt_tokens + rollout.max_new_tokens
    # Prompts that leave no room in the model's context were refused; a server need not have more.
    length = min(length, getattr(model.config, "max_position_embeddings", None) or length)
    if rollout.engine == "native":
        size, section = rollout.max_batch_size, rollout.native

        def native(kind: type[NativeEngine]) -> NativeEngine:
            return kind(model, tokenizer, stop_token_ids, size, merge_adapters, replica, section)

        if rollout.exact == "off":
            return native(NativeEngine)
        return exact_engine(level.candidates(rollout.exact), model, native, stop_token_ids, rollout.temperature, length)
    if rollout.engine == "openai":
        return _openai(rollout, model, tokenizer, stop_token_ids, length, rank, world_size, run_id)
    if rollout.engine == "vllm_server":
        return _vllm_servers(rollout, model, tokenizer, stop_token_ids, length, servers[rank::world_size])
    from core_trainer.rollout.vllm.engine import VllmEngine

    def vllm(kind: type[VllmEngine]) -> VllmEngine:
        size, section = rollout.max_batch_size, rollout.vllm
        return kind(model, tokenizer, model_dir, stop_token_ids, size, length, section, replica)

    if rollout.exact == "off":
        return vllm(VllmEngine)
    from core_trainer.rollout.vllm.exact import ENGINES

    levels = level.candidates(rollout.exact)
    return exact_engine(levels, model, vllm, stop_token_ids, rollout.temperature, length, ENGINES)


def _vllm_servers(
    rollout: RolloutSection,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
    length: int,
    servers: Sequence[Address],
) -> RolloutEngine:
    """A router over this worker's own servers."""
    from core_trainer.rollout.router import Router
    from core_trainer.rollout.vllm.client import SharedMemory, VllmServerEngine

    params = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
    memory, sleep_level = SharedMemory(model), rollout.vllm.sleep_level
    timeout_s = rollout.request_timeout_s
    engines = [
        VllmServerEngine(address, memory, model, tokenizer, stop_token_ids, length, params, sleep_level, timeout_s)
        for address in servers
    ]
    return Router(engines, come_back=False)


def _openai(
    rollout: RolloutSection,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
    length: int,
    rank: int,
    world_size: int,
    run_id: str | None,
) -> RolloutEngine:
    """A router over this worker's share of the servers; with fewer servers than workers they share one."""
    from core_trainer.rollout import weight_transport as transports
    from core_trainer.rollout.dialects import Completions, SglangGenerate
    from core_trainer.rollout.openai import OpenAIEngine
    from core_trainer.rollout.router import Router
    from core_trainer.rollout.server import Server

    section = rollout.openai
    key = os.environ.get(section.api_key_env) if section.api_key_env else None
    params = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
    dialect = SglangGenerate() if section.server == "sglang" else Completions(int(section.server == "other"))
    if section.weights == "none":
        transport = transports.KeepsItsOwn()
    else:
        folder = transports.WeightFolder(model, section.weights_dir, None if run_id is None else f"{run_id}-{rank}")
        transport = (transports.SglangFromDisk if section.server == "sglang" else transports.VllmFromDisk)(folder)
    engines = [
        OpenAIEngine(
            Server(url, key, section.timeout_s, rollout.max_batch_size),
            dialect,
            transport,
            model,
            tokenizer,
            stop_token_ids,
            length,
            params,
            section.model,
        )
        for url in section.urls[rank % len(section.urls) :: world_size]
    ]
    return Router(engines)
