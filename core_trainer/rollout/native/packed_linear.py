"""Linear layers with weights kept in the processor's own block layout, for decoding.

oneDNN reorders a bfloat16 weight on every call; at a few rows that costs more than the product. The copies are
refreshed at each weight sync. Off the CPU, or in float32, there is nothing to pack and the model runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

TYPICAL_ROWS = 64  # the layout is chosen for about this many rows


class PackedLinears:
    """Packed copies of every linear layer of a model."""

    def __init__(self, model: nn.Module) -> None:
        useful = torch.backends.mkldnn.is_available()
        self._layers = [
            module
            for module in model.modules()
            if useful
            and type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.bfloat16
        ]
        self._packed: list[Tensor] = []

    def refresh(self) -> int:
        """Pack the current weights; returns the bytes rewritten."""
        with torch.no_grad():
            self._packed = [
                torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TYPICAL_ROWS) for layer in self._layers
            ]
        return sum(layer.weight.numel() * layer.weight.element_size() for layer in self._layers)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers compute with their packed weights."""
        for layer, packed in zip(self._layers, self._packed, strict=True):
            layer.forward = partial(_forward, packed, layer.bias)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward


def _forward(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
