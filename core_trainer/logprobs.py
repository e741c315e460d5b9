"""Log-probs and entropy of given tokens from hidden states, in chunks, without keeping [tokens, vocabulary].

The forward keeps the log normaliser of each row; the backward recomputes a chunk's logits. Logits come out of the
matmul in the compute dtype and are normalised in float32 by ``softmax_parts``, for training and for the native rollout
engine alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 1024  # rows of one output matmul; its logits stay in the compute dtype, 100 MB at 49152 words in bfloat16
BLOCK_ROWS = 32  # rows normalised in float32 at once, small enough for the processor's cache


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` and the entropy of each row's distribution.

    hidden [M, d], weight [V, d], targets [M] int64 -> log_probs [M] float32 (differentiable), entropy [M] float32
    (not).
    """
    return _TokenLogProbs.apply(hidden, weight, targets, temperature)  # type: ignore[return-value]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        log_probs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for chunk in _slices(rows, CHUNK_ROWS):
            chunk_logits = torch.nn.functional.linear(hidden[chunk], weight)
            for block in _slices(len(chunk_logits), BLOCK_ROWS):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                log_probs[at], entropy[at], normaliser[at] = normalise(chunk_logits[block], targets[at], temperature)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _slices(hidden.shape[0], CHUNK_ROWS):
            logits = torch.nn.functional.linear(hidden[chunk], weight)
            for block in _slices(len(logits), BLOCK_ROWS):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                # d log p[target] / d logit = onehot - p, scaled by the temperature; written over the logits
                scale = (grads[0][at] / ctx.temperature)[:, None]
                grad = logits[block].float().div_(ctx.temperature).sub_(normaliser[at, None]).exp_().mul_(-scale)
                logits[block] = grad.scatter_add_(1, targets[at, None], scale)
            grad_hidden[chunk] = logits @ weight
            grad_weight += logits.T @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def normalise(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of targets, entropy and log normaliser of each row: [R, V] and [R] -> three [R] float32 tensors."""
    scaled, weights, total, log_normaliser = softmax_parts(logits, temperature)
    # H = log Z - E[logit]
    entropy = log_normaliser - torch.linalg.vecdot(weights, scaled) / total
    return scaled.gather(1, targets[:, None])[:, 0] - log_normaliser, entropy, log_normaliser


def softmax_parts(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax over the vocabulary, kept in parts.

    logits [R, V] in any dtype, temperature a number or [R, 1] -> scaled logits [R, V], weights exp(scaled - max) [R,
    V], their sum [R] and the log normaliser [R], all float32.
    """
    scaled = logits.float() / temperature
    top = scaled.amax(dim=-1, keepdim=True)
    weights = torch.exp(scaled - top)
    total = weights.sum(dim=-1)
    return scaled, weights, total, top[:, 0] + torch.log(total)


def _slices(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
