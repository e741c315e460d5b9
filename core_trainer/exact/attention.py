"""Attention whose result for a token depends on its own past alone.

Keys are walked in blocks of 64 from position 0 of the token's sequence, with the running maximum and sum of online
softmax (arXiv 1805.02867). A block that lies wholly after the token adds exactly 0, so neither the length of the cache
nor padding nor what else is in the batch can be seen in the result, as long as one product is computed alike for any
number of rows: at level ``mkl`` by MKL's strict mode from a few rows on, at level ``tile`` by cutting rows into tiles.

Computed in float32 whatever the model's dtype. The backward is plain matrix products: it has no twin to equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_trainer.attention import Pad, Unpad
from core_trainer.batching import SharedPrefixLayout
from core_trainer.exact.linear import MIN_ROWS

BLOCK = 64  # keys taken at once
TILE_ROWS = 8  # query rows of one product at level tile


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, first_tokens: Sequence[int], tiled: bool
) -> Tensor:
    """Causal attention of T tokens a sequence over S sequences; differentiable.

    query [S, T, Hq, D], already scaled; key and value [S, Hkv, L, D] from each sequence's position 0 on, L a multiple
    of BLOCK, finite behind a sequence's end; positions [S, T] int64, rising along T; first_tokens: for each block the
    first of the T tokens that any sequence has in it or after it -> [S, T, Hq, D] in query's dtype.
    """
    rows, of_row, first_rows = _rows(query, positions, first_tokens, key.shape[1], tiled)
    out: Tensor = _BlockAttention.apply(rows, key.float(), value.float(), of_row, first_rows, tiled)  # type: ignore[assignment]
    return _tokens(out, query.shape[1], query.shape[2]).to(query.dtype)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    first_tokens: Sequence[int],
    tiled: bool,
) -> Tensor:
    """The same over a cache of blocks, which holds the T tokens' own keys and values already; not differentiable.

    query [S, T, Hq, D], already scaled; keys and values [blocks, Hkv, BLOCK, D], finite throughout; table [S, B] int64,
    the blocks of each sequence from position 0 on, any valid index behind its end -> [S, T, Hq, D].
    """
    heads, kv_heads = query.shape[2], keys.shape[1]
    rows, of_row, first_rows = _rows(query, positions, first_tokens, kv_heads, tiled)

    def block(index: int) -> tuple[Tensor, Tensor]:
        return keys[table[:, index]].float(), values[table[:, index]].float()

    out, _ = _walk(rows, block, table.shape[1], of_row, first_rows, tiled)
    return _tokens(out, query.shape[1], heads).to(query.dtype)


def _rows(
    query: Tensor, positions: Tensor, first_tokens: Sequence[int], kv_heads: int, tiled: bool
) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens to rows, H / Hkv of them a token: query [S, Hkv, R, D], positions [S, R], first row of each block."""
    sequences, tokens, heads, dim = query.shape
    repeat = heads // kv_heads
    rows = query.reshape(sequences, tokens, kv_heads, repeat, dim).transpose(1, 2)
    rows = rows.reshape(sequences, kv_heads, tokens * repeat, dim).float()
    of_row = positions.repeat_interleave(repeat, dim=1)
    missing = 0 if tiled else max(0, MIN_ROWS - tokens * repeat)
    rows, of_row = F.pad(rows, (0, 0, 0, missing)), F.pad(of_row, (0, missing))
    return rows, of_row, [token * repeat for token in first_tokens]


def _tokens(rows: Tensor, tokens: int, heads: int) -> Tensor:
    """[S, Hkv, R, D] back to [S, T, H, D]."""
    sequences, kv_heads, _, dim = rows.shape
    repeat = heads // kv_heads
    rows = rows[:, :, : tokens * repeat].reshape(sequences, kv_heads, tokens, repeat, dim)
    return rows.transpose(1, 2).reshape(sequences, tokens, heads, dim)


def _walk(
    query: Tensor,
    block: Callable[[int], tuple[Tensor, Tensor]],
    num_blocks: int,
    positions: Tensor,
    first_rows: list[int],
    tiled: bool,
) -> tuple[Tensor, Tensor]:
    """Online softmax over the blocks: query [S, H, R, D], ``block`` gives keys and values [S, H, BLOCK, D], positions
    [S, R] -> attended values [S, H, R, D] and the log normaliser [S, H, R, 1].
    """
    num_rows = query.shape[2]
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    top = query.new_full((*query.shape[:3], 1), float("-inf"))
    total = torch.zeros_like(top)
    product = _tiled_product if tiled else torch.matmul
    for index in range(num_blocks):
        # Rows that end before the block are left out, since it would add 0 to them, as long as enough are left.
        rows = slice(max(0, min(first_rows[index], num_rows - MIN_ROWS)), None)
        reach = torch.arange(index * BLOCK, (index + 1) * BLOCK, device=query.device)
        key, value = block(index)
        scores = product(query[:, :, rows], key.transpose(-1, -2))
        scores.masked_fill_((reach > positions[:, rows, None])[:, None], float("-inf"))
        highest = torch.maximum(top[:, :, rows], scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(highest).exp_()
        shrink = torch.exp(top[:, :, rows] - highest)
        total[:, :, rows] = total[:, :, rows] * shrink + weights.sum(dim=-1, keepdim=True)
        out[:, :, rows] = out[:, :, rows] * shrink + product(weights, value)
        top[:, :, rows] = highest
    return out.div_(total), top + torch.log(total)


class _BlockAttention(torch.autograd.Function):
    """query [S, H, R, D], key and value [S, H, L, D], positions [S, R] -> [S, H, R, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, first_rows: list[int], tiled: bool
    ) -> Tensor:
        def block(index: int) -> tuple[Tensor, Tensor]:
            keys = slice(index * BLOCK, (index + 1) * BLOCK)
            return key[:, :, keys], value[:, :, keys]

        out, normaliser = _walk(query, block, key.shape[2] // BLOCK, positions, first_rows, tiled)
        ctx.save_for_backward(query, key, value, positions, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, positions, out, normaliser = ctx.saved_tensors
        grad = grads[0]
        later = torch.arange(key.shape[2], device=key.device) > positions[:, :, None]
        scores = (query @ key.transpose(-1, -2)).masked_fill_(later[:, None], float("-inf"))
        weights = scores.sub_(normaliser).exp_()
        grad_value = weights.transpose(-1, -2) @ grad
        centre = (grad * out).sum(dim=-1, keepdim=True)
        grad_scores = weights.mul_((grad @ value.transpose(-1, -2)).sub_(centre))
        return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, grad_value, None, None, None


def _tiled_product(a: Tensor, b: Tensor) -> Tensor:
    """a [S, H, R, K] @ b [S, H, K, N], in products of TILE_ROWS rows each."""
    sequences, heads, rows, inner = a.shape
    tiles = -(-rows // TILE_ROWS)
    a = F.pad(a, (0, 0, 0, tiles * TILE_ROWS - rows)).reshape(sequences * heads, tiles, TILE_ROWS, inner)
    b = b.reshape(sequences * heads, *b.shape[2:])
    out = a.new_empty(*a.shape[:3], b.shape[-1])
    if tiles <= len(a):
        for tile in range(tiles):
            out[:, tile] = torch.bmm(a[:, tile], b)
    else:
        for item in range(len(a)):
            out[item] = torch.bmm(a[item], b[item].expand(tiles, -1, -1))
    return out.view(sequences, heads, tiles * TILE_ROWS, -1)[:, :, :rows]


class ExactLayout:
    """The same packed tokens as a ``SharedPrefixLayout``, each response with its own copy of its group's prompt keys.

    A response's blocks have to start at its prompt's first token, so prompt and response cannot be two parts that are
    added up.
    """

    def __init__(self, shared: SharedPrefixLayout, tiled: bool) -> None:
        self.tiled, self.num_prompt_tokens = tiled, shared.num_prompt_tokens
        device = shared.prompt_rows.device
        groups, prompt = shared.prompt_rows.shape
        prompt_lengths = (~shared.prompt_pad).sum(dim=1)
        length = _up(prompt)
        self.prompts = _Part(
            rows=F.pad(shared.prompt_rows, (0, length - prompt)),
            query_rows=shared.prompt_rows,
            query_unpad=shared.prompt_unpad,
            positions=torch.arange(prompt, device=device).expand(groups, -1),
        )
        self.prompt_slots = shared.prompt_unpad // prompt * length + shared.prompt_unpad % prompt
        self.responses = None
        if shared.response_rows is None or shared.response_unpad is None:
            return
        _, size, response = shared.response_rows.shape
        length = _up(prompt + response)
        reach = torch.arange(length, device=device)
        starts = prompt_lengths[:, None, None]
        from_prompt = F.pad(shared.prompt_rows, (0, length - prompt))[:, None].expand(-1, size, -1)
        at = (reach - starts).clamp(0, response - 1).expand(-1, size, -1)
        own = shared.num_prompt_tokens + shared.response_rows.gather(2, at)
        rows = torch.where(reach < starts, from_prompt, own)
        self.responses = _Part(
            rows=rows.reshape(groups * size, length),
            query_rows=shared.response_rows.reshape(groups * size, response),
            query_unpad=shared.response_unpad,
            positions=(starts + torch.arange(response, device=device)).expand(-1, size, -1).reshape(-1, response),
        )
        sequence, token = shared.response_unpad // response, shared.response_unpad % response
        self.own_slots = sequence * length + prompt_lengths[sequence // size] + token
        group, token = shared.prompt_unpad // prompt, shared.prompt_unpad % prompt
        self.shared_slots = group * length + token
        self.group_size = size

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [Hq, N, D], key and value [Hkv, N, D], N packed tokens -> [N, Hq, D]."""
        q, k, v = (x.transpose(0, 1) for x in (query * scaling, key, value))
        n = self.num_prompt_tokens
        out = self._part(self.prompts, q[:n], *(self._prompt_keys(x[:n]) for x in (k, v)))
        if self.responses is None:
            return out
        return torch.cat([out, self._part(self.responses, q[n:], *(self._response_keys(x) for x in (k, v)))])

    def _part(self, part: _Part, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequences, tokens = part.query_rows.shape
        rows = Pad.apply(query, part.query_rows, part.query_unpad)
        rows = rows.view(sequences, tokens, *query.shape[1:])  # type: ignore[union-attr]
        out = block_attention(rows, key, value, part.positions, part.first_tokens, self.tiled)
        return Unpad.apply(out.flatten(0, 1), part.query_rows, part.query_unpad)  # type: ignore[return-value]

    def _prompt_keys(self, x: Tensor) -> Tensor:
        """[prompt tokens, H, D] -> [G, H, L, D]."""
        rows: Tensor = Pad.apply(x, self.prompts.rows, self.prompt_slots)  # type: ignore[assignment]
        return rows.view(*self.prompts.rows.shape, *x.shape[1:]).transpose(1, 2).contiguous()

    def _response_keys(self, x: Tensor) -> Tensor:
        """[N, H, D] -> [G n, H, L, D], each response after its prompt."""
        assert self.responses is not None
        rows: Tensor = _Repeat.apply(x, self.responses.rows, self)  # type: ignore[assignment]
        return rows.view(*self.responses.rows.shape, *x.shape[1:]).transpose(1, 2).contiguous()


class _Part:
    """S sequences of T query tokens each: which packed rows are their keys, their queries, and where those stand."""

    def __init__(self, rows: Tensor, query_rows: Tensor, query_unpad: Tensor, positions: Tensor) -> None:
        self.rows = rows  # [S, L] of all packed tokens (prompts: of the packed prompt tokens)
        self.query_rows, self.query_unpad = query_rows, query_unpad  # [S, T], [tokens], as in SharedPrefixLayout
        self.positions = positions  # [S, T]
        self.first_tokens = first_tokens(positions, rows.shape[1])


class _Repeat(torch.autograd.Function):
    """Packed rows [N, H, D] to [S L, H, D]: a prompt's rows once a response. Backward adds the copies' gradients up."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: Tensor, layout: ExactLayout) -> Tensor:
        ctx.layout, ctx.length = layout, rows.shape[1]
        return packed.index_select(0, rows.flatten())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, layout = grads[0], ctx.layout
        own = grad.index_select(0, layout.own_slots)
        # Sequences that pad a small group, and slots behind a sequence's end, have gradients of exactly 0.
        prompts = grad.view(-1, layout.group_size, ctx.length, *grad.shape[1:]).sum(dim=1).flatten(0, 1)
        return torch.cat([prompts.index_select(0, layout.shared_slots), own]), None, None


def first_tokens(positions: Tensor, length: int) -> list[int]:
    """positions [S, T] rising along T -> for each block of ``length`` keys the first token in it or after it, T if
    none.
    """
    highest = positions.amax(dim=0)
    starts = torch.arange(0, length, BLOCK, device=positions.device)
    return torch.searchsorted(highest, starts).tolist()


def _up(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
