"""Linear layers as decoding wants them: weights in the processor's own block layout, adapters merged.

oneDNN reorders a bfloat16 weight on every call; at a few rows that costs more than the product. Layers that read the
same input (query, key and value; gate and up) are packed as one. In float32 only wide layers are worth a copy: a
refresh eats up what others gain. The copies are refreshed at each weight sync. Off the CPU, and in bfloat16 without
AVX-512, nothing is packed and the model runs as it is, but for merged adapters, whose sums are copies there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_trainer import lora

TYPICAL_ROWS = 64  # the layout is chosen for about this many rows
WIDE = 16384  # outputs from which a float32 layer is packed
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # read one input where they have one parent

Product = Callable[[Tensor], Tensor]


class PackedLinears:
    """Copies of the linear layers of a model.

    ``merge_adapters`` makes an adapted layer one product with W + scaling B A; otherwise W and the adapter are computed
    one after the other, as training computes them.
    """

    def __init__(self, model: nn.Module, merge_adapters: bool) -> None:
        self._model, self._merges = model, merge_adapters
        merged = list(lora.adapted(model).values()) if merge_adapters else []
        inside = {id(part) for layer in merged for part in layer.modules()}
        linear = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside and _packable(m.weight)]
        self._groups: list[list[Any]] = _group(model, [*merged, *linear])
        self._products: dict[int, _Together] = {}  # by index of the group; missing before the first refresh

    def refresh(self) -> int:
        """Copy the current weights; returns the bytes rewritten. Weights that are not trained are copied once."""
        rewritten = 0
        with torch.no_grad():
            for index, group in enumerate(self._groups):
                if index in self._products and not _changes(group[0]):
                    continue
                weights = [layer.weight.detach() if _plain(layer) else lora.merged_weight(layer) for layer in group]
                biases = [layer.bias if _plain(layer) else layer.base_layer.bias for layer in group]
                rewritten += sum(weight.nbytes for weight in weights)
                self._products[index] = _Together(weights, biases)
        return rewritten

    def served(self) -> Iterator[tuple[str, Tensor]]:
        """What the model computes with in here, as named by ``lora.merged_state``: copies are read back, weights that
        have none are the model's own. One layer's copy is read back at a time, but for adapters that stay apart.
        """
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        adapted = [] if self._merges else lora.adapted(self._model).values()
        apart = {id(part) for layer in adapted for part in lora.parts(layer)}
        parts, copied = {}, set()
        for index, group in enumerate(self._groups):
            for layer, weight, bias in zip(group, *self._products[index].held(), strict=True):
                linear = layer if _plain(layer) else layer.base_layer
                for parameter, copy in ((linear.weight, weight), (linear.bias, bias)):
                    if id(parameter) in apart:  # the layer computes with their sum
                        parts[id(parameter)] = copy
                    elif parameter is not None and copy is not None:
                        name = names[id(parameter)].replace(".base_layer.", ".")
                        copied.add(name)
                        yield name, copy
        for name, weight in lora.merged_state(self._model, parts).items():
            if name not in copied:
                yield name, weight

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers compute with their copies."""
        for index, group in enumerate(self._groups):
            for layer, forward in zip(group, self._products[index].forwards, strict=True):
                layer.__dict__["forward"] = forward  # past nn.Module's bookkeeping
        try:
            yield
        finally:
            for index, group in enumerate(self._groups):
                self._products[index].forget()
                for layer in group:
                    del layer.__dict__["forward"]


class _Together:
    """Layers of one input, computed as one product when the first of them is asked."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._sizes = [len(weight) for weight in weights]
        weight, bias = weights[0], biases[0]
        if len(weights) > 1:
            weight = torch.cat(list(weights))
            if any(bias is not None for bias in biases):
                bias = torch.cat(
                    [x.new_zeros(len(x)) if b is None else b for x, b in zip(weights, biases, strict=True)]
                )
        self._weight = _packed_weight(weight)
        self._bias = bias
        self._product = _product(self._weight, bias)
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()
        self.forwards: list[Product] = [self._product]
        if len(weights) > 1:
            self.forwards = [partial(self._part, i) for i in range(len(weights))]

    def held(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Weights and biases by layer, out of the copies."""
        weight = self._weight.to_dense() if self._weight.is_mkldnn else self._weight
        biases = [None] * len(self._sizes) if self._bias is None else self._bias.split(self._sizes)
        return weight.split(self._sizes), biases

    def forget(self) -> None:
        """Let go of the last input and its products."""
        self._input, self._parts = None, ()

    def _part(self, index: int, x: Tensor) -> Tensor:
        if x is not self._input:
            self._input, self._parts = x, self._product(x).split(self._sizes, dim=-1)
        return self._parts[index]


def _group(model: nn.Module, layers: Sequence[Any]) -> list[list[Any]]:
    """Packed layers that read one input and are refreshed alike together, all others alone."""
    left = {id(layer): layer for layer in layers}
    groups = []
    for parent in model.modules():
        for names in TOGETHER:
            found = [getattr(parent, name, None) for name in names]
            alike = {_changes(layer) for layer in found if id(layer) in left and _packable(_weight(layer))}
            inputs = {_weight(layer).shape[1] for layer in found if id(layer) in left}
            if all(id(layer) in left for layer in found) and len(alike) == len(inputs) == 1:
                groups.append([left.pop(id(layer)) for layer in found])
    return [*groups, *([layer] for layer in left.values())]


def _plain(layer: Any) -> bool:
    return isinstance(layer, nn.Linear)


def _weight(layer: Any) -> Tensor:
    return layer.weight if _plain(layer) else layer.base_layer.weight


def _changes(layer: Any) -> bool:
    return not _plain(layer) or layer.weight.requires_grad


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return len(weight) >= WIDE
    # False without AVX-512 too, where the reorder itself raises.
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _packed_weight(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS) if _packable(weight) else weight


def _product(weight: Tensor, bias: Tensor | None) -> Product:
    if weight.is_mkldnn:
        return partial(_packed, weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def _packed(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
