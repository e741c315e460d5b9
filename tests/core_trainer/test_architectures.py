"""Which architectures train and sample as transformers computes them, and which are refused by name.

Tiny random models, two layers each; what docs/native-engine.md says is tested is what is listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from core_trainer import attention
from core_trainer.batching import pack
from core_trainer.forward import log_probs
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams
from rlinsight.config import NativeSection
from rlinsight.errors import ModelError
from tests.core_trainer.test_native_engine import generate
from tests.core_trainer.test_shared_prefix import naive_log_probs, ragged_samples
from tests.tiny import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # answers that differ, not one token over and over
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SCALED = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
FULL = ["full_attention"] * 2

TAKEN: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Qwen3Moe": {"head_dim": 16, **EXPERTS},
    "Olmo2": {},
    "GPTNeoX": {"num_key_value_heads": None},
    "Granite": {"logits_scaling": 1.0, **SCALED},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4},
    "Gemma": {"head_dim": 32},
    "Phi3": {"sliding_window": None},
    "SmolLM3": {},
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "latent attention": (
        "DeepseekV3",
        MLA,
        "deepseek_v3 models whose heads have a query of 24, a key of 24 and a value",
    ),
    "chunks": ("Llama4Text", {"head_dim": 16}, "llama4_text models with layers of chunked_attention"),
    "linear layers": ("Qwen3Next", {"head_dim": 16, **EXPERTS}, "qwen3_next models with layers of linear_attention"),
    "windows": ("Gemma3Text", {"head_dim": 16}, "gemma3_text models with sliding window attention"),
    "a window": ("Mistral", {"sliding_window": 4}, "mistral models with sliding window attention"),
    "soft caps": ("Gemma2", {"head_dim": 16}, r"gemma2 models with final_logit_softcapping=30\.0"),
    "sinks": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "use_sliding_window": False, "layer_types": FULL},
        "attention with s_aux, as GptOssAttention asks for",
    ),
    "scaled logits": ("Cohere", {}, r"cohere models with logit_scale=0\.0625"),
    "divided logits": ("Granite", {"logits_scaling": 8.0}, r"granite models with logits_scaling=8\.0"),
    "a biased output layer": ("Phi", {}, "phi models with a biased output layer"),
    "no attention interface": ("Bloom", {}, "bloom models"),
}


def make_model(name: str, options: Mapping[str, Any]) -> PreTrainedModel:
    """A random one in float32; the same for the same arguments."""
    sizes = SIZES | dict(options)
    if sizes["num_key_value_heads"] is None:  # the config has no such option
        del sizes["num_key_value_heads"]
    config: PreTrainedConfig = getattr(transformers, f"{name}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", TAKEN)
def test_log_probs_and_gradients_are_transformers(name: str) -> None:
    """Of packed groups with shared prompts, against its own attention over each sequence."""
    plain, ours = make_model(name, TAKEN[name]), make_model(name, TAKEN[name])
    attention.enable(ours)
    batch = pack(ragged_samples())
    expected = [naive_log_probs(plain, sample, 0.7) for sample in batch.samples]
    values, _ = log_probs(ours, batch, 0.7)
    for sample, mine, theirs in zip(batch.samples, batch.split(values.detach()), expected, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), atol=1e-4, err_msg=sample.rollout_id)
    torch.cat(expected).mean().backward()
    values.mean().backward()
    for (part, mine), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), part
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=part: f"{n}: {m}")


@pytest.mark.parametrize("name", TAKEN)
def test_greedy_answers_are_transformers(name: str) -> None:
    """Token for token, around the cache's blocks of 64 and in small chunks; the answers are not all alike."""
    model = make_model(name, TAKEN[name])
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=8, pad_token_id=0)  # nothing ends early
    rng = np.random.default_rng(0)
    asked, expected = [], []
    for length in (1, 5, 30, 60, 64, 65, 130):
        ids = torch.from_numpy(rng.integers(3, 500, (2, length)))
        out = model.generate(ids, attention_mask=torch.ones_like(ids))  # type: ignore[operator]
        asked += map(tuple, ids.tolist())
        expected += out[:, length:].tolist()
    attention.enable(model)
    section = NativeSection(kv_cache_gib=0.1, prefill_tokens=50)
    engine = NativeEngine(model, make_tokenizer(), (), 8, section=section)
    engine.sync_weights(0)
    turns = generate(engine, [GenerateRequest(str(i), p, SamplingParams(8, 0.0)) for i, p in enumerate(asked)])
    assert [turn.token_ids for turn in turns] == expected
    assert len(set(map(tuple, expected))) > 7


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_otherwise_is_refused_by_name(name: str) -> None:
    """Before anything is trained or sampled, in one sentence."""
    kind, options, message = REFUSED[name]
    with pytest.raises(ModelError, match=message) as refused:
        attention.enable(make_model(kind, options))
    assert "not supported yet" in str(refused.value)
