"""vLLM in exact mode: its layers compute by the functions of ``core_trainer.exact``, and have the trainer's log-probs.

``ExactVllm`` starts vLLM with other classes in the places it builds a model from: plain products in place of prepacked
ones, block attention over vLLM's paged cache, whole vectors in the activation, and the sampler's log-softmax. The
instances stay what they are, also when weights are loaded anew; vLLM's classes are put back after the start, and other
engines of the process are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

# pyright: reportMissingImports=false
from vllm.config import get_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.v1.attention import selector
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from core_trainer.exact.activation import ExactActivation
from core_trainer.exact.attention import BLOCK, first_tokens, paged_attention
from core_trainer.exact.level import LINEAR, Level
from core_trainer.logprobs import softmax_parts
from core_trainer.rollout.vllm.engine import VllmEngine
from core_trainer.rollout.vllm.worker import WholeVocabularySampler

LEVEL = "rlinsight_exact"  # the level's key in vLLM's additional_config


class ExactVllm(VllmEngine):
    """The vLLM engine at a level of exact mode."""

    level: ClassVar[Level]

    def _start(self, arguments: dict[str, Any]) -> Any:
        with _exact_classes():
            engine = super()._start(
                arguments
                | {
                    "block_size": BLOCK,  # a block of the cache is one of attention
                    "compilation_config": {"custom_ops": ["none"]},  # torch's own functions, as training calls them
                    "additional_config": {LEVEL: self.level},
                }
            )
        engine.collective_rpc(_set_sampler)
        return engine


class StrictVllm(ExactVllm):
    """vLLM at level mkl."""

    level = "mkl"


class TiledVllm(ExactVllm):
    """vLLM at level tile."""

    level = "tile"


ENGINES: dict[Level, type[ExactVllm]] = {"mkl": StrictVllm, "tile": TiledVllm}


def _level() -> Level:
    """Of the engine that is being built."""
    return get_current_vllm_config().additional_config[LEVEL]


def _set_sampler(worker: Any) -> None:
    worker.model_runner.sampler = ExactSampler()


@contextmanager
def _exact_classes() -> Iterator[None]:
    """vLLM builds models of the classes below meanwhile."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ExactBackend.__name__}")
    selector._cached_get_attn_backend.cache_clear()
    try:
        with (
            patch.object(linear, "UnquantizedLinearMethod", ExactLinearMethod),
            patch.object(vocab_parallel_embedding, "UnquantizedEmbeddingMethod", ExactEmbeddingMethod),
            patch.dict(custom_op.op_registry_oot, {SiluAndMul.__name__: ExactSiluAndMul}),
        ):
            yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()


# Layers --------------------------------------------------------------------------------------------------------------


@linear.register_weight_loader_v2_supported_method
class ExactLinearMethod(linear.UnquantizedLinearMethod):
    """How a linear layer multiplies. Where vLLM fuses layers, each has its own product, as training's have."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **more: Any,
    ) -> None:
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **more)
        self.sizes, self.product = output_partition_sizes, LINEAR[_level()].product

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, K] -> [N, O]."""
        out = torch.cat([self.product(x, weight) for weight in layer.weight.split(self.sizes)], dim=-1)
        return out if bias is None else out + bias


class ExactEmbeddingMethod(vocab_parallel_embedding.UnquantizedEmbeddingMethod):
    """How the output layer multiplies."""

    def create_weights(self, *args: Any, **more: Any) -> None:
        super().create_weights(*args, **more)
        self.product = LINEAR[_level()].product

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, d] -> [N, V]."""
        out = self.product(x, layer.weight)
        return out if bias is None else out + bias


class ExactSiluAndMul(SiluAndMul):
    """SwiGLU in whole vectors."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.exact = ExactActivation(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 2 d] -> [N, d]."""
        gate, up = x.chunk(2, dim=-1)
        return self.exact(gate) * up


class ExactSampler(WholeVocabularySampler):
    """Log-probs by training's own function."""

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        """logits [R, V], at their temperature already -> [R, V]."""
        scaled, _, _, normaliser = softmax_parts(logits, 1.0)
        return scaled - normaliser[:, None]


# Attention -----------------------------------------------------------------------------------------------------------


class ExactBackend(CPUAttentionBackend):
    """Block attention over vLLM's cache."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """One."""
        return [BLOCK]

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """What a layer computes with."""
        return ExactAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """What says once a step which tokens are whose."""
        return ExactMetadataBuilder


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences side by side, the shorter ones padded; T tokens each."""

    rows: Tensor  # [S, T] of the step's tokens
    positions: Tensor  # [S, T]
    real: Tensor  # of the S T places those that are no padding
    table: Tensor  # [S, B]
    first_tokens: list[int]


class ExactMetadataBuilder(CPUAttentionMetadataBuilder):
    """A step's sequences in two parts: prompts, and those that decode, which need no padding."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> list[Part]:
        """For all layers of a step."""
        common = common_attn_metadata
        starts = common.query_start_loc[: common.num_reqs + 1].long()
        counts, lengths = starts.diff(), common.seq_lens[: common.num_reqs].long()
        parts = []
        for which in (counts > 1, counts == 1):
            if which.any():
                table = common.block_table_tensor[: common.num_reqs][which].long()
                parts.append(_part(starts[:-1][which], counts[which], lengths[which], table))
        return parts


def _part(starts: Tensor, counts: Tensor, lengths: Tensor, table: Tensor) -> Part:
    """Sequences whose last ``counts`` tokens are the step's, from ``starts`` on; table [S, any number of blocks]."""
    reach = torch.arange(int(counts.max()))
    real = reach < counts[:, None]
    positions = (lengths - counts)[:, None] + reach
    blocks = -(-int(lengths.max()) // BLOCK)
    return Part(
        rows=torch.where(real, starts[:, None] + reach, 0),
        positions=positions,
        real=torch.nonzero(real.flatten())[:, 0],
        table=table[:, :blocks],
        first_tokens=first_tokens(positions, blocks * BLOCK),
    )


class ExactAttention(CPUAttentionBackendImpl):
    """A layer's attention, over keys and values as they are."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.tiled = _level() == "tile"

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """key and value [N, Hkv, D] to their places."""
        keys, values = _halves(kv_cache)
        block, place = slot_mapping // BLOCK, slot_mapping % BLOCK
        keys[block, :, place], values[block, :, place] = key, value

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: list[Part] | None,
        output: Tensor,
        **unused: Any,  # scales of quantised outputs
    ) -> Tensor:
        """query [N, Hq, D] -> output [N, Hq, D]; nothing in a warm-up."""
        if attn_metadata is None:
            return output
        keys, values = _halves(kv_cache)
        query = query * self.scale
        for part in attn_metadata:
            out = paged_attention(
                query[part.rows], keys, values, part.table, part.positions, part.first_tokens, self.tiled
            )
            output[part.rows.flatten()[part.real]] = out.flatten(0, 1)[part.real]
        return output


def _halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, Hkv, BLOCK, D] of a layer's cache [blocks, Hkv, BLOCK, 2 D]."""
    blocks, heads = kv_cache.shape[:2]
    keys, values = kv_cache.view(blocks, heads, 2 * BLOCK, -1).chunk(2, dim=2)
    return keys, values
