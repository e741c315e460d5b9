"""Exact attention is plain causal attention, and a token's result shows nothing but its own past."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core_trainer.attention import shared_prefix_attention
from core_trainer.batching import pack
from core_trainer.exact.attention import BLOCK, ExactLayout, block_attention, first_tokens, paged_attention
from tests.core_trainer.test_shared_prefix import make_sample, ragged_samples

HEADS, KV_HEADS, DIM = 6, 2, 16


def drawn(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """query [Hq, N, D], key and value [Hkv, N, D]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(heads, tokens, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[return-value]


def naive(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """One sequence, one head and one token at a time, in float64: [Hq, N, D] -> [N, Hq, D]."""
    out = torch.zeros(query.shape[1], query.shape[0], query.shape[2], dtype=torch.float64)
    for head in range(len(query)):
        k, v = (x[head * len(key) // len(query)].double() for x in (key, value))
        for t in range(query.shape[1]):
            weights = torch.softmax(k[: t + 1] @ query[head, t].double() * scaling, dim=0)
            out[t, head] = weights @ v[: t + 1]
    return out


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_it_is_causal_attention(tiled: bool, length: int) -> None:
    """Against a loop over heads and tokens in float64, at lengths around the block."""
    query, key, value = drawn(length)
    room = -(-length // BLOCK) * BLOCK
    padded = [torch.nn.functional.pad(x, (0, 0, 0, room - length))[None] for x in (key, value)]
    positions = torch.arange(length)[None]
    rows = (query * 0.3).transpose(0, 1)[None]
    found = block_attention(rows, padded[0], padded[1], positions, first_tokens(positions, room), tiled)[0]
    torch.testing.assert_close(found.double(), naive(query, key, value, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiled", [False, True])
def test_packed_passes_equal_the_fast_attention_and_its_gradients(tiled: bool) -> None:
    """Ragged groups around and over one block: values within 1e-5, gradients of query, key and value within 1e-4."""
    rng = np.random.default_rng(0)
    groups = [(70, [3, 65, 1]), (64, [64, 2]), (1, [130]), (5, [1])]
    samples = ragged_samples() + [
        make_sample(rng, 10 + i, j, prompt, length)
        for i, (prompt, lengths) in enumerate((rng.integers(0, 500, p), lengths) for p, lengths in groups)
        for j, length in enumerate(lengths)
    ]
    shared = pack(samples).layout
    tokens = shared.num_prompt_tokens + sum(sample.num_tokens - 1 for sample in samples)
    found = []
    for exact in (False, True):
        leaves = [x.clone().requires_grad_() for x in drawn(tokens)]
        if exact:
            out = ExactLayout(shared, tiled).attend(0, leaves[0], leaves[1], leaves[2], 0.25)
        else:
            out = shared_prefix_attention(leaves[0], leaves[1], leaves[2], shared, 0.25)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * seed).sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    for fast, exact in zip(*found, strict=True):
        torch.testing.assert_close(exact, fast, atol=1e-4, rtol=1e-4)


def test_responses_alone_and_prompts_alone() -> None:
    """A batch whose responses have one token packs prompts only; gradients still reach every row."""
    rng = np.random.default_rng(0)
    shared = pack([make_sample(rng, g, 0, rng.integers(0, 9, 3 + g), 1) for g in range(3)]).layout
    leaves = [x.requires_grad_() for x in drawn(shared.num_prompt_tokens)]
    out = ExactLayout(shared, tiled=False).attend(0, leaves[0], leaves[1], leaves[2], 1.0)
    assert out.shape == (shared.num_prompt_tokens, HEADS, DIM)
    out.sum().backward()
    assert all(bool((x.grad.abs().sum(dim=(0, 2)) > 0).all()) for x in leaves[2:])  # type: ignore[union-attr]


def paged(rows: Tensor, key: Tensor, value: Tensor, order: list[int], position: int, extra: int, tiled: bool) -> Tensor:
    """One token [1, 1, Hq, D] over the keys [Hkv, N, D] in blocks put in ``order``, and ``extra`` blocks behind."""
    room = len(order) * BLOCK
    pages = [torch.nn.functional.pad(x, (0, 0, 0, room - x.shape[1]), value=3.0) for x in (key, value)]
    pages = [x.view(KV_HEADS, -1, BLOCK, DIM).transpose(0, 1).contiguous() for x in pages]
    table = torch.tensor(order)
    shuffled = [torch.zeros_like(x).index_copy_(0, table, x) for x in pages]
    table = torch.cat([table, table[:1].expand(extra)])[None]
    at, first = torch.tensor([[position]]), [0] * table.shape[1]
    return paged_attention(rows, shuffled[0], shuffled[1], table, at, first, tiled)


@pytest.mark.parametrize("tiled", [False, True])
def test_a_cache_of_blocks_holds_the_same_attention(tiled: bool) -> None:
    """Blocks anywhere in the cache, some behind the token; the same numbers as attention over the sequence."""
    query, key, value = drawn(150)
    for position in (0, 63, 64, 149):
        rows = (query[:, position] * 0.25)[None, None]
        found = paged(rows, key, value, [2, 0, 1], position, 2, tiled)
        expected = naive(query, key, value, 0.25)[position]
        torch.testing.assert_close(found[0, 0].double(), expected, atol=1e-5, rtol=1e-5)


def test_later_keys_and_neighbours_add_exactly_nothing_at_level_tile() -> None:
    """Bit for bit the same in a pass over the whole sequence, decoded over blocks, behind others, in a longer cache."""
    query, key, value = drawn(150)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 3 * BLOCK - 150))[None] for x in (key, value)]
    positions = torch.arange(150)[None]
    first, scaled = first_tokens(positions, 3 * BLOCK), (query * 0.25).transpose(0, 1)[None]
    whole = block_attention(scaled, padded[0], padded[1], positions, first, True)
    for position in (0, 40, 63, 64, 127, 128, 149):
        rows = (query[:, position] * 0.25)[None, None]
        for order, extra in (([0, 1, 2], 0), ([2, 0, 1], 3)):
            assert torch.equal(paged(rows, key, value, order, position, extra, True)[0, 0], whole[0, position])
        pair = torch.cat([rows, rows.flip(-1)])
        tables = torch.arange(3).expand(2, -1)
        pages = [x[0].view(KV_HEADS, -1, BLOCK, DIM).transpose(0, 1) for x in padded]
        at = torch.full((2, 1), position)
        both = paged_attention(pair, pages[0], pages[1], tables, at, [0, 0, 0], True)
        assert torch.equal(both[0, 0], whole[0, position])


def test_first_tokens_of_blocks_by_hand() -> None:
    """Sequences that start at 0 and at 100, 70 tokens each: block 1 begins with token 0 of the second."""
    positions = torch.stack([torch.arange(70), torch.arange(100, 170)])
    assert first_tokens(positions, 256) == [0, 0, 28, 70]
    assert first_tokens(positions[:1], 128) == [0, 64]
