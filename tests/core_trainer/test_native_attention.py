"""The native engine's attention over blocks equals plain causal attention over each sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native.attention import PagedDecode, PagedPrefill
from core_trainer.rollout.native.kv_cache import BLOCK, KVCache, blocks_for
from core_trainer.rollout.native.sequence import Sequence
from core_trainer.types import SamplingParams

DIM = 8


def make_cache(kv_heads: int, blocks: int, dtype: torch.dtype) -> KVCache:
    """A cache of one layer, filled with noise: nothing beyond a sequence's end may show."""
    config: Any = SimpleNamespace(
        num_hidden_layers=1, num_key_value_heads=kv_heads, num_attention_heads=kv_heads, head_dim=DIM
    )
    cache = KVCache(config, dtype, torch.device("cpu"), blocks * 2 * kv_heads * BLOCK * DIM * dtype.itemsize)
    cache.keys[0].normal_(std=3)
    cache.values[0].normal_(std=3)
    return cache


def make_sequence(cache: KVCache, tokens: int, shared: Sequence | None, num_shared: int) -> Sequence:
    """A sequence of so many tokens whose first blocks are those of another."""
    future: Any = None
    request = GenerateRequest("r", (1,) * tokens, SamplingParams(1))
    sequence = Sequence(request, future, None, np.zeros(1), [1] * tokens, 0)
    known = shared.blocks[:num_shared] if shared else []
    for block in known:
        cache.refer(block)
    sequence.blocks = [*known, *(cache.take() for _ in range(blocks_for(tokens) - len(known)))]
    return sequence


def plain(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """query [Hq, D] of the last token, keys and values [Hkv, T, D] -> [Hq, D], head by head."""
    repeat = len(query) // len(keys)
    rows = []
    for head, q in enumerate(query):
        weights = torch.softmax(keys[head // repeat].double() @ q.double() * scaling, dim=0)
        rows.append(weights @ values[head // repeat].double())
    return torch.stack(rows)


def history(cache: KVCache, side: list[Tensor], sequence: Sequence, end: int) -> Tensor:
    """What the cache holds of a sequence: [Hkv, end, D]."""
    return torch.cat([side[0][block.index] for block in sequence.blocks], dim=1)[:, :end]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 1), (2, 6), (3, 3)])
def test_decoding_equals_plain_attention(kv_heads: int, heads: int, dtype: torch.dtype) -> None:
    """Ragged sequences: alone, with one or two blocks shared by two or three, on scattered and on moved blocks."""
    torch.manual_seed(0)
    cache = make_cache(kv_heads, 40, dtype)
    scattered = [cache.take() for _ in range(12)]
    first = make_sequence(cache, 200, None, 0)
    cache.drop(scattered[::2])
    sequences = [first, make_sequence(cache, 130, first, 2), make_sequence(cache, 129, first, 1)]
    sequences += [make_sequence(cache, size, None, 0) for size in (1, 2, 64, 65)]
    fifth = make_sequence(cache, 100, None, 0)
    sequences += [fifth, make_sequence(cache, 70, fifth, 1)]
    query, key, value = (torch.randn(h, len(sequences), DIM).to(dtype) for h in (heads, kv_heads, kv_heads))
    layout = PagedDecode(cache, [(s, len(s.tokens) - 1, len(s.tokens)) for s in sequences])
    assert layout._reach == 12  # as many blocks as have one reader: they were moved together
    out = layout.attend(0, query, key, value, 0.3)
    assert out.shape == (len(sequences), heads, DIM)
    assert out.dtype == dtype
    for row, sequence in enumerate(sequences):
        keys, values = (history(cache, side, sequence, len(sequence.tokens)) for side in (cache.keys, cache.values))
        assert keys[:, -1].equal(key[:, row])
        assert values[:, -1].equal(value[:, row])
        tolerance = 1e-5 if dtype == torch.float32 else 0.15  # of values about 3
        torch.testing.assert_close(
            out[row].double(), plain(query[:, row], keys, values, 0.3), atol=tolerance, rtol=1e-5
        )


@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 1), (2, 6)])
def test_chunks_of_prompts_equal_plain_attention(kv_heads: int, heads: int) -> None:
    """A whole prompt, the middle of one and the end of one, in one pass: each token sees what is before it."""
    torch.manual_seed(0)
    cache = make_cache(kv_heads, 40, torch.float32)
    first = make_sequence(cache, 150, None, 0)
    spans = [
        (first, 0, 150),
        (make_sequence(cache, 200, first, 1), 70, 131),
        (make_sequence(cache, 90, None, 0), 88, 90),
    ]
    count = sum(end - start for _, start, end in spans)
    query, key, value = (torch.randn(h, count, DIM) for h in (heads, kv_heads, kv_heads))
    out = PagedPrefill(cache, spans).attend(0, query, key, value, 0.3)
    assert out.shape == (count, heads, DIM)
    row = 0
    for sequence, start, end in spans:
        for position in range(start, end):
            keys, values = (history(cache, side, sequence, position + 1) for side in (cache.keys, cache.values))
            assert keys[:, -1].equal(key[:, row])
            expected = plain(query[:, row], keys, values, 0.3).float()
            torch.testing.assert_close(out[row], expected, atol=1e-3, rtol=1e-3)
            row += 1
