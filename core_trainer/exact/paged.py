"""Exact attention of the native engine's passes, over the blocks of its cache: the same for prefill and for decoding.

The cache's blocks are the attention's, so a prefix from the cache, a chunk of prefill and a decoded token walk the keys
exactly as training does.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import ClassVar

import torch
from torch import Tensor

from core_trainer.exact.attention import BLOCK, first_tokens, paged_attention
from core_trainer.exact.level import Level
from core_trainer.rollout.native.attention import Paged, Span
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.rollout.native.kv_cache import BLOCK as CACHE_BLOCK
from core_trainer.rollout.native.kv_cache import KVCache, blocks_for

assert CACHE_BLOCK == BLOCK, "a block of the cache has to be a block of exact attention"


class StrictPaged(Paged):
    """Sequences side by side, the shorter ones padded; products as at level mkl."""

    tiled: ClassVar[bool] = False

    def __init__(self, cache: KVCache, spans: SequenceOf[Span]) -> None:
        super().__init__(cache, spans)
        device = cache.device
        counts = torch.tensor([end - start for _, start, end in spans])
        tokens = int(counts.max())
        reach = torch.arange(tokens)
        real = reach < counts[:, None]
        rows = torch.where(real, (counts.cumsum(0) - counts)[:, None] + reach, 0)
        positions = torch.tensor([start for _, start, _ in spans])[:, None] + reach
        most = max(blocks_for(end) for _, _, end in spans)
        blocks = [[block.index for block in sequence.blocks[: blocks_for(end)]] for sequence, _, end in spans]
        self._table = torch.tensor([row + row[:1] * (most - len(row)) for row in blocks], device=device)
        self._first_tokens = first_tokens(positions, most * BLOCK)
        self._positions, self._rows = positions.to(device), rows.to(device)
        self._unpad = torch.nonzero(real.flatten())[:, 0].to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [Hq, N, D], key and value [Hkv, N, D] -> [N, Hq, D]: each token to its sequence's past and itself."""
        self.write(layer, key, value)
        rows = (query * scaling).transpose(0, 1)[self._rows]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out = paged_attention(rows, keys, values, self._table, self._positions, self._first_tokens, self.tiled)
        return out.flatten(0, 1)[self._unpad]


class TiledPaged(StrictPaged):
    """Products as at level tile."""

    tiled = True


class StrictEngine(NativeEngine):
    """The native engine at level mkl."""

    prefill_layout = decode_layout = StrictPaged


class TiledEngine(NativeEngine):
    """The native engine at level tile."""

    prefill_layout = decode_layout = TiledPaged


ENGINES: dict[Level, type[NativeEngine]] = {"mkl": StrictEngine, "tile": TiledEngine}
