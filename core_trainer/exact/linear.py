"""Linear layers whose output rows do not depend on how many rows come with them.

Two levels. ``mkl`` leaves products to MKL, which under ``MKL_CBWR=...,STRICT`` sums each row alike from a few rows on.
``tile`` cuts the rows of every product into tiles of one size, so that the library sees one shape a layer, and
with it one kernel and one split among threads, for decoding, prefill and training.

Forward only: a gradient has no twin in the engine that it would have to equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS = 4  # fewer take another kernel, in strict mode too: 1 to 3 on an EPYC
TILE_ROWS = 48  # a multiple of the row blocks of usual kernels (4, 6, 8, 12, 16, 24), also when two threads halve it


class ExactLinear(nn.Linear):
    """An ``nn.Linear`` that computes by ``product``; existing layers are made one by setting their class."""

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K], weight [O, K] -> [N, O]."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        out = self.product(rows, self.weight)
        if self.bias is not None:  # added after the product: fused, its rounding would depend on the kernel
            out = out + self.bias
        return out.view(*input.shape[:-1], -1)


class StrictLinear(ExactLinear):
    """Level mkl: one product for all rows, which are at least MIN_ROWS."""

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K], weight [O, K] -> [N, O]."""
        if len(x) < MIN_ROWS:
            return F.linear(F.pad(x, (0, 0, 0, MIN_ROWS - len(x))), weight)[: len(x)]
        return F.linear(x, weight)


class TiledLinear(ExactLinear):
    """Level tile: a product for each tile of rows, the last one padded with zeros."""

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K], weight [O, K] -> [N, O]."""
        return _Tiled.apply(x, weight)  # type: ignore[return-value]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        padded = F.pad(x, (0, 0, 0, -len(x) % TILE_ROWS)).contiguous()
        out = x.new_empty(len(padded), len(weight))
        for tile, result in zip(padded.split(TILE_ROWS), out.split(TILE_ROWS), strict=True):
            torch.mm(tile, weight.t(), out=result)
        return out[: len(x)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            grads[0] @ weight if ctx.needs_input_grad[0] else None,
            grads[0].t() @ x if ctx.needs_input_grad[1] else None,
        )
