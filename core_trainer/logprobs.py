"""Log-probs and entropy of given tokens from hidden states, in chunks, without keeping [tokens, vocabulary].

The forward keeps the log normaliser of each row; the backward recomputes a chunk's logits. Logits come out of the
matmul in the compute dtype and are normalised in float32 by ``softmax_parts``, for training and for the native rollout
engine alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 1024  # rows of one output matmul; its logits stay in the compute dtype, 100 MB at 49152 words in bfloat16
BLOCK_ROWS = 32  # rows normalised in float32 at once, small enough for the processor's cache
FLOOR = -1e30  # for -inf, so that a word of probability 0 adds 0 to the entropy: p log p is 0 times this, not NaN


class TokenScores(NamedTuple):
    """What the output layer says of M tokens, each [M] float32."""

    log_probs: Tensor  # differentiable
    entropy: Tensor  # of the row's distribution; differentiable when asked for
    sum_pi_squared: Tensor | None  # sum of squared probabilities of the row's distribution; None unless asked for


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> TokenScores:
    """Log-probs of ``targets`` and what else is asked of each row's distribution.

    hidden [M, d], weight [V, d], targets [M] int64. ``entropy_gradient`` makes the entropy differentiable, as an
    entropy bonus needs it: dH / dlogit = -p (log p + H) / temperature. ``product`` of hidden states and weight gives
    the logits; an exact level has its own.
    """
    log_probs, entropy, squares = _TokenScores.apply(  # type: ignore[misc]
        hidden, weight, targets, temperature, entropy_gradient, sum_pi_squared, product
    )
    return TokenScores(log_probs, entropy, squares)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        sum_pi_squared: bool,
        product: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = hidden.shape[0]
        log_probs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
        squares = torch.empty_like(log_probs) if sum_pi_squared else None
        for chunk in _slices(rows, CHUNK_ROWS):
            chunk_logits = product(hidden[chunk], weight)
            for block in _slices(len(chunk_logits), BLOCK_ROWS):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                scaled, weights, total, normaliser[at] = softmax_parts(chunk_logits[block], temperature)
                log_probs[at] = scaled.gather(1, targets[at, None])[:, 0] - normaliser[at]
                scaled.clamp_(min=FLOOR)
                entropy[at] = normaliser[at] - torch.linalg.vecdot(weights, scaled) / total  # log Z - E[logit]
                if squares is not None:
                    squares[at] = torch.linalg.vecdot(weights, weights) / total.square()
        ctx.save_for_backward(hidden, weight, targets, normaliser, *([entropy] if entropy_gradient else []))
        ctx.temperature = temperature
        constant = [squares] if squares is not None else []
        ctx.mark_non_differentiable(*constant, *([] if entropy_gradient else [entropy]))
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, *entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # a frozen output layer, as under LoRA, saves a third of the matmuls
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _slices(hidden.shape[0], CHUNK_ROWS):
            logits = F.linear(hidden[chunk], weight)
            for block in _slices(len(logits), BLOCK_ROWS):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                # d log p[target] / d logit = onehot - p, scaled by the temperature; written over the logits
                scale = (grads[0][at] / ctx.temperature)[:, None]
                grad = logits[block].float().div_(ctx.temperature).sub_(normaliser[at, None])  # log p
                if entropy:
                    bonus = (grads[1][at] / ctx.temperature)[:, None]
                    grad.clamp_(min=FLOOR)
                    factor = (grad + entropy[0][at, None]).mul_(bonus).add_(scale)
                    grad = grad.exp_().mul_(factor.neg_())
                else:
                    grad = grad.exp_().mul_(-scale)
                logits[block] = grad.scatter_add_(1, targets[at, None], scale)
            grad_hidden[chunk] = logits @ weight
            if grad_weight is not None:
                grad_weight += logits.T @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def softmax_parts(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax over the vocabulary, kept in parts.

    logits [R, V] in any dtype, temperature a number or [R, 1] -> scaled logits [R, V], weights exp(scaled - max) [R,
    V], their sum [R] and the log normaliser [R], all float32.
    """
    scaled = logits.float() / temperature
    top = scaled.amax(dim=-1, keepdim=True)
    weights = torch.exp(scaled - top)
    # A lone row would be summed in parts, one a thread, and differ in the last bit from the same row among others.
    total = (weights if len(weights) > 1 else weights.expand(2, -1)).sum(dim=-1)[: len(weights)]
    return scaled, weights, total, top[:, 0] + torch.log(total)


def _slices(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
