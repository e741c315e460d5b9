"""Keys and values of the running requests: one slot each, always slots 0..B-1, so a decode step reads views, not
copies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

ROUND = 64  # slot length grows in this many positions


class KVCache:
    """Per layer [slots, Hkv, S, D] keys and values. A decode step's attention is ``attend``."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = 0
        self.num_layers = config.num_hidden_layers
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype, self.device = dtype, device
        self.length = 0  # positions a slot has room for
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows = torch.arange(0, device=device)
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)
        self._mask = torch.empty(0)

    def reserve(self, slots: int, length: int) -> None:
        """Have at least ``slots`` slots of at least ``length`` positions, keeping what they hold."""
        if slots <= self.slots and length <= self.length:
            return
        slots, length = max(slots, self.slots), max(-(-length // ROUND) * ROUND, self.length)
        shape = (slots, self.kv_heads, length, self.head_dim)
        for side in (self.keys, self.values):
            for layer in range(self.num_layers):  # one at a time: old and new never stand side by side as a whole
                # zeros, not empty: masked positions are multiplied by 0, and 0 x nan is nan
                new = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if self.slots:
                    new[: self.slots, :, : self.length] = side[layer]
                    side[layer] = new
                else:
                    side.append(new)
        self.slots, self.length = slots, length
        self._rows = torch.arange(slots, device=self.device)

    def write_prompt(self, slots: list[int], keys: list[Tensor], values: list[Tensor]) -> None:
        """Put one prompt's keys and values, per layer [Hkv, P, D], into several slots."""
        size = keys[0].shape[1]
        for layer in range(self.num_layers):
            self.keys[layer][slots, :, :size] = keys[layer]
            self.values[layer][slots, :, :size] = values[layer]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first ``length`` positions over another slot."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def begin_step(self, positions: Tensor) -> None:
        """Say where the next token of each running slot goes: [B] int64 on the cache's device."""
        self._positions = positions
        reach = torch.arange(int(positions.max()) + 1, device=self.device)
        self._mask = torch.zeros((len(positions), 1, 1, len(reach)), dtype=self.dtype, device=self.device)
        self._mask.masked_fill_((reach > positions[:, None])[:, None, None, :], float("-inf"))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the step's keys and values and attend to each slot's past.

        query [Hq, B, D], key and value [Hkv, B, D] -> [B, Hq, D].
        """
        heads, batch, dim = query.shape
        rows, reach = self._rows[:batch], self._mask.shape[-1]
        self.keys[layer][rows, :, self._positions] = key.transpose(0, 1)
        self.values[layer][rows, :, self._positions] = value.transpose(0, 1)
        keys, values = self.keys[layer][:batch, :, :reach], self.values[layer][:batch, :, :reach]
        grouped = query.transpose(0, 1).reshape(batch, self.kv_heads, heads // self.kv_heads, dim) * scaling
        scores = grouped @ keys.transpose(-1, -2) + self._mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(self.dtype)
        return (weights @ values).reshape(batch, heads, dim)
