"""Linear layers as decoding wants them: weights in the processor's own block layout, adapters merged.

oneDNN reorders a bfloat16 weight on every call; at a few rows that costs more than the product. The copies are
refreshed at each weight sync. Off the CPU, in float32, or without AVX-512 there is nothing to pack and the model runs
as it is, but for merged adapters, whose sums are copies there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_trainer import lora

TYPICAL_ROWS = 64  # the layout is chosen for about this many rows


class PackedLinears:
    """Copies of the linear layers of a model.

    ``merge_adapters`` makes an adapted layer one product with W + scaling B A; otherwise W and the adapter are computed
    one after the other, as training computes them.
    """

    def __init__(self, model: nn.Module, merge_adapters: bool) -> None:
        merged = list(lora.adapted(model).values()) if merge_adapters else []
        inside = {id(part) for layer in merged for part in layer.modules()}
        linear = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside and _packable(m.weight)]
        self._layers: list[Any] = [*merged, *linear]
        self._forwards: dict[int, Any] = {}  # by index of the layer; missing before the first refresh

    def refresh(self) -> int:
        """Copy the current weights; returns the bytes rewritten. Weights that are not trained are copied once."""
        rewritten = 0
        with torch.no_grad():
            for index, layer in enumerate(self._layers):
                merged = not isinstance(layer, nn.Linear)
                if index in self._forwards and not (merged or layer.weight.requires_grad):
                    continue
                weight = lora.merged_weight(layer) if merged else layer.weight.detach()
                rewritten += weight.nbytes
                self._forwards[index] = _forward(weight, layer.base_layer.bias if merged else layer.bias)
        return rewritten

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers compute with their copies."""
        for index, layer in enumerate(self._layers):
            layer.forward = self._forwards[index]
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward


def _packable(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    # False without AVX-512 too, where the reorder itself raises.
    return on_cpu and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _forward(weight: Tensor, bias: Tensor | None) -> Any:
    if _packable(weight):
        return partial(_packed, torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS), bias)
    return partial(F.linear, weight=weight, bias=bias)


def _packed(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
