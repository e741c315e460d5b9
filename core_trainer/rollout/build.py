"""Which rollout engine a policy worker gets. An engine's own packages are imported only when it is chosen."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import models
from core_trainer.rollout.engine import RolloutEngine
from core_trainer.rollout.native.engine import NativeEngine
from rlinsight.config import DataSection, RolloutSection


def build_engine(
    rollout: RolloutSection,
    data: DataSection,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_dir: Path,
    merge_adapters: bool = True,
    replica: str = "policy/0",
) -> RolloutEngine:
    """The engine ``rollout.engine`` names, over ``model``; serves its weights once ``sync_weights`` was called.

    ``model_dir`` is where the model came from. ``merge_adapters`` false makes the native engine compute adapters apart;
    vLLM gets merged weights always. ``replica`` is the engine's name in telemetry.
    """
    stop_token_ids = models.end_of_turn_ids(model.generation_config, tokenizer)
    if rollout.engine == "native":
        return NativeEngine(model, tokenizer, stop_token_ids, rollout.max_batch_size, merge_adapters, replica)
    from core_trainer.rollout.vllm import VllmEngine

    return VllmEngine(
        model,
        tokenizer,
        model_dir,
        stop_token_ids,
        rollout.max_batch_size,
        data.max_prompt_tokens + rollout.max_new_tokens,
        rollout.vllm,
        replica,
    )
