"""The native engine's attention over the blocks of its cache: of prompts in chunks, and of one token a sequence.

Decoding reads each block once and where it is. Blocks of one sequence are attended to apart, and the parts joined by
their log-sum-exp (flash-decoding); a block that several sequences share meets all of their queries in one product
(cascade attention), so a group's prompt is read once a step, not once a sample.

A layout is made for each pass from (sequence, start, end): tokens ``start`` to ``end`` of the sequence are computed,
their keys and values go to its blocks, those before are there.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
import torch.nn.functional as F
from torch import Tensor

from core_trainer.rollout.native.kv_cache import BLOCK, Block, KVCache, blocks_for
from core_trainer.rollout.native.sequence import Sequence

SPARSE = 1.25  # decoding's own blocks are moved together when they spread over more room than this
Span = tuple[Sequence, int, int]


class Paged:
    """What both layouts have: where a pass's keys and values go."""

    def __init__(self, cache: KVCache, spans: SequenceOf[Span]) -> None:
        self.cache, self.spans = cache, spans
        device = cache.device
        at = [(s.blocks[i // BLOCK].index, i % BLOCK) for s, start, end in spans for i in range(start, end)]
        self._blocks, self._offsets = torch.tensor(at, device=device).unbind(1)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put the pass's keys and values [Hkv, N, D] into the cache."""
        self.cache.keys[layer][self._blocks, :, self._offsets] = key.transpose(0, 1)
        self.cache.values[layer][self._blocks, :, self._offsets] = value.transpose(0, 1)


class PagedPrefill(Paged):
    """Chunks of prompts, sequence by sequence: nothing is padded."""

    def __init__(self, cache: KVCache, spans: SequenceOf[Span]) -> None:
        super().__init__(cache, spans)
        self._parts: list[tuple[slice, int, Tensor | None, Tensor | None]] = []
        row = 0
        for sequence, start, end in spans:
            rows = slice(row, row + end - start)
            row = rows.stop
            if start == 0:
                self._parts.append((rows, end, None, None))
                continue
            blocks = torch.tensor([block.index for block in sequence.blocks[: blocks_for(end)]], device=cache.device)
            future = torch.full((end - start, end), float("-inf"), dtype=cache.dtype, device=cache.device).triu(
                start + 1
            )
            self._parts.append((rows, end, blocks, future))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [Hq, N, D], key and value [Hkv, N, D] -> [N, Hq, D]: each token to all before it and itself."""
        self.write(layer, key, value)
        heads, tokens, dim = query.shape
        grouped = query.view(self.cache.kv_heads, -1, tokens, dim)  # [Hkv, Hq / Hkv, N, D]
        out = query.new_empty((tokens, heads, dim))
        for rows, end, blocks, future in self._parts:
            keys, values = key[:, rows], value[:, rows]
            if blocks is not None:
                keys = self.cache.keys[layer][blocks].transpose(0, 1).reshape(self.cache.kv_heads, -1, dim)[:, :end]
                values = self.cache.values[layer][blocks].transpose(0, 1).reshape(self.cache.kv_heads, -1, dim)[:, :end]
            shape = (-1, grouped.shape[1], -1, -1)
            part = F.scaled_dot_product_attention(
                grouped[:, :, rows],
                keys[:, None].expand(shape),
                values[:, None].expand(shape),
                attn_mask=future,
                is_causal=future is None,
                scale=scaling,
            )
            out[rows] = part.reshape(heads, -1, dim).transpose(0, 1)
        return out


class PagedDecode(Paged):
    """One token a sequence."""

    def __init__(self, cache: KVCache, spans: SequenceOf[Span]) -> None:
        users: dict[Block, list[int]] = {}
        for row, (sequence, _, end) in enumerate(spans):
            for block in sequence.blocks[: blocks_for(end)]:
                users.setdefault(block, []).append(row)
        own = [block for block, rows in users.items() if len(rows) == 1]
        shared = [block for block, rows in users.items() if len(rows) > 1]
        if max(block.index for block in own) >= len(own) * SPARSE:
            cache.compact(own)
        super().__init__(cache, spans)
        self._reach = 1 + max(block.index for block in own)
        owner, visible = [0] * self._reach, [BLOCK] * self._reach
        for block in own:
            owner[block.index] = users[block][0]
        for sequence, _, end in spans:
            visible[sequence.blocks[blocks_for(end) - 1].index] = (end - 1) % BLOCK + 1
        width = max((len(users[block]) for block in shared), default=0)
        # Where each sequence's parts are: the own blocks', then the shared blocks' by user, then one that is nothing.
        place = {(block, users[block][0]): block.index for block in own}
        for i, block in enumerate(shared):
            place |= {(block, row): self._reach + i * width + j for j, row in enumerate(users[block])}
        nothing = self._reach + len(shared) * width
        most = max(len(sequence.blocks) for sequence, _, _ in spans)
        table = [
            [place[block, row] for block in s.blocks[: blocks_for(end)]] + [nothing] * (most - blocks_for(end))
            for row, (s, _, end) in enumerate(spans)
        ]
        device = cache.device
        self._owner, self._table = torch.tensor(owner, device=device), torch.tensor(table, device=device)
        hidden = torch.arange(BLOCK, device=device) >= torch.tensor(visible, device=device)[:, None]
        self._mask = torch.zeros((self._reach, 1, 1, BLOCK), dtype=cache.dtype, device=device)
        self._mask.masked_fill_(hidden[:, None, None], float("-inf"))
        self._shared = torch.tensor([block.index for block in shared], device=device) if shared else None
        rows = [users[block] + [0] * (width - len(users[block])) for block in shared]
        self._sharers = torch.tensor(rows, device=device) if shared else None  # [shared, width]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [Hq, B, D], key and value [Hkv, B, D] -> [B, Hq, D]: each token to its sequence's past and itself."""
        self.write(layer, key, value)
        keys, values, kv_heads = self.cache.keys[layer], self.cache.values[layer], self.cache.kv_heads
        (heads, batch, dim), repeat = query.shape, query.shape[0] // kv_heads
        query = query.view(kv_heads, repeat, batch, dim).permute(2, 0, 1, 3)  # [B, Hkv, Hq / Hkv, D]
        reach = self._reach
        parts: list[tuple[Tensor, ...]] = [
            attend_block(query[self._owner], keys[:reach], values[:reach], self._mask, scaling)
        ]
        if self._shared is not None and self._sharers is not None:
            count, width = self._sharers.shape
            queries = query[self._sharers].transpose(1, 2).reshape(count, kv_heads, width * repeat, dim)
            shared = attend_block(queries, keys[self._shared], values[self._shared], None, scaling)
            parts.append(tuple(side.reshape(-1, repeat, *side.shape[2:]) for side in shared))
        nothing = parts[0][1].new_full((1, repeat, kv_heads), -torch.inf)
        parts.append((query.new_zeros((1, repeat, kv_heads, dim)), nothing, torch.zeros_like(nothing)))
        sums, tops, totals = (torch.cat(side) for side in zip(*parts, strict=True))
        tops = tops[self._table]  # [B, blocks, Hq / Hkv, Hkv]
        scale = torch.exp(tops - tops.amax(dim=1, keepdim=True))
        scale /= (scale * totals[self._table]).sum(dim=1, keepdim=True)
        joined = (sums[self._table] * scale[..., None].to(sums.dtype)).sum(dim=1)
        return joined.transpose(1, 2).reshape(batch, heads, dim)


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to a block alone, in parts that can be joined with others'.

    query [R, Hkv, Q, D], key and value [R, Hkv, BLOCK, D], mask [R, 1, 1, BLOCK] added -> values weighted by exp(score
    - top) and summed [R, Q, Hkv, D], the highest score [R, Q, Hkv] and the sum of weights [R, Q, Hkv], both float32.
    """
    scores = (query * scaling) @ key.transpose(-1, -2)
    if mask is not None:
        scores += mask
    scores = scores.float()
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2), top[..., 0].transpose(1, 2), total.transpose(1, 2)
