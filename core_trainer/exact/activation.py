"""Activation functions whose result for a number does not depend on where it stands.

torch computes them a vector at a time, and what is left over at the end of a thread's share one number at a time, by
another exponential that differs in the last bit now and then. So no share may end within a vector.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIECE = 1 << 14  # numbers computed at once: below torch's grain of 32768, so by one thread
VECTOR = 64  # a multiple of what one turn of torch's vectorised loops takes: 16 floats with AVX2, 32 with AVX-512


class ExactActivation(nn.Module):
    """An elementwise function computed in whole vectors."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        flat, rest = x.reshape(-1), -x.numel() % VECTOR
        if rest:
            flat = F.pad(flat, (0, rest))
        return torch.cat([self.function(piece) for piece in flat.split(PIECE)])[: x.numel()].view(x.shape)
