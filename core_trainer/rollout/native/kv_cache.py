"""Keys and values in blocks of 64 positions, shared by whatever has the same prefix.

Owns the memory, who refers to which block, and which content is known: a full block is known by the digest of all
tokens up to its end, so equal digests mean equal keys and values. A block nobody refers to any more keeps its content
until its room is needed, least recently used first. New weights make all of it unknown (``forget``).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from core_trainer import attention

BLOCK = 64  # positions of a block


def blocks_for(tokens: int) -> int:
    """Blocks that hold ``tokens`` positions."""
    return -(-tokens // BLOCK)


def digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a block's content: its tokens and, through ``parent``, all tokens before them."""
    return hashlib.blake2b(np.array(tokens, dtype=np.int64).tobytes(), digest_size=16, key=parent).digest()


@dataclass(slots=True, eq=False)
class Block:
    """A block and what is known of it. ``index`` is where its data is; ``compact`` may change it."""

    index: int
    references: int = 0
    digest: bytes | None = None  # of its full content
    ends: list[bytes] = field(default_factory=list)  # digests of whole prompts that end in it


class KVCache:
    """The pool. Per layer [blocks, Hkv, BLOCK, D] keys and values."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        """``budget`` bytes, rounded down to blocks."""
        self.num_layers = config.num_hidden_layers
        self.kv_heads, self.head_dim = attention.kv_heads(config), attention.head_size(config)
        self.dtype, self.device = dtype, device
        self.block_bytes = 2 * self.num_layers * self.kv_heads * BLOCK * self.head_dim * dtype.itemsize
        self.num_blocks = budget // self.block_bytes
        self.version = 0  # of its content: how often everything was forgotten
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._blocks = [Block(index) for index in range(self.num_blocks)]  # by index
        self._free = list(range(self.num_blocks))  # a heap, so that what is in use stays close together
        self._kept: OrderedDict[Block, None] = OrderedDict()  # known and not referred to, least recently used first
        self._known: dict[bytes, Block] = {}
        self._ends: dict[
            bytes, tuple[Block, Tensor]
        ] = {}  # by digest of a whole prompt: its last block and hidden state
        self.allocate()

    def allocate(self) -> int:
        """Have the memory; returns the bytes taken. The system gives pages of it as they are written."""
        if self.keys:
            return 0
        shape = (self.num_blocks, self.kv_heads, BLOCK, self.head_dim)
        for side in (self.keys, self.values):
            side.extend(_zeros(shape, self.dtype, self.device) for _ in range(self.num_layers))
        return self.num_blocks * self.block_bytes

    def release(self) -> int:
        """Give the memory back, with all content; returns the bytes freed. Nobody may refer to a block."""
        if not self.keys:
            return 0
        self.forget()
        self.keys.clear()
        self.values.clear()
        return self.num_blocks * self.block_bytes

    @property
    def available(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free) + len(self._kept)

    @property
    def usage(self) -> float:
        """Share of blocks that are referred to."""
        return 1 - self.available / self.num_blocks

    def take(self) -> Block:
        """An empty block for one owner; forgets the least recently used content when none is free."""
        if self._free:
            block = self._blocks[heapq.heappop(self._free)]
        else:
            block, _ = self._kept.popitem(last=False)
            self._make_unknown(block)
        block.references = 1
        return block

    def refer(self, block: Block) -> None:
        """One more owner."""
        self._kept.pop(block, None)
        block.references += 1

    def drop(self, blocks: Sequence[Block]) -> None:
        """One owner less for each. Of one sequence the last block goes first: its content is the least likely asked."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references:
                continue
            if block.digest is not None or block.ends:
                self._kept[block] = None
            else:
                heapq.heappush(self._free, block.index)

    def find(self, digests: Sequence[bytes]) -> list[Block]:
        """Known blocks of a prefix, up to the first that is not known."""
        found = []
        for key in digests:
            if key not in self._known:
                break
            found.append(self._known[key])
        return found

    def find_end(self, end: bytes) -> tuple[Block, Tensor] | None:
        """The block a known prompt ends in and its last hidden state [d]."""
        return self._ends.get(end)

    def publish(self, block: Block, key: bytes) -> None:
        """The block's whole content is written; whoever needs it may have it."""
        if key not in self._known:
            self._known[key], block.digest = block, key

    def publish_end(self, block: Block, end: bytes, hidden: Tensor) -> None:
        """A whole prompt is written, ``block`` holds its end and ``hidden`` [d] predicts what follows."""
        if end not in self._ends:
            self._ends[end] = (block, hidden.clone())
            block.ends.append(end)

    def forget(self) -> None:
        """All content becomes unknown, as new weights would compute it anew; owners keep theirs."""
        self.version += 1
        for block in self._blocks:
            block.digest = None
            block.ends.clear()
        for block in self._kept:
            heapq.heappush(self._free, block.index)
        for collection in (self._kept, self._known, self._ends):
            collection.clear()

    def reset(self) -> None:
        """Nothing is known and nobody refers to anything."""
        self.forget()
        for block in self._blocks:
            block.references = 0
        self._free = list(range(self.num_blocks))

    def clean(self, blocks: Sequence[Block]) -> None:
        """Make an owner's damaged blocks unknown, and zero those that nobody else reads: a masked NaN would still
        spoil the sequence that gets the block next.
        """
        for block in blocks:
            self._make_unknown(block)
        own = [block.index for block in blocks if block.references == 1]
        index = torch.tensor(own, dtype=torch.int64, device=self.device)
        for cache in (*self.keys, *self.values):
            cache[index] = 0

    def copy(self, sources: Sequence[Block], targets: Sequence[Block]) -> None:
        """Copy blocks' contents, all read before any is written."""
        indices = [[block.index for block in blocks] for blocks in (sources, targets)]
        source, target = torch.tensor(indices, dtype=torch.int64, device=self.device)
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]

    def compact(self, blocks: Sequence[Block]) -> None:
        """Move blocks to the front of the pool, in exchange for what is there."""
        size = len(blocks)
        here = {block.index for block in blocks}
        movers = [block for block in blocks if block.index >= size]
        others = [self._blocks[index] for index in range(size) if index not in here]
        old = [block.index for block in (*movers, *others)]
        new = [block.index for block in (*others, *movers)]
        source, target = torch.tensor([old, new], dtype=torch.int64, device=self.device)
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]
        for block, index in zip((*movers, *others), new, strict=True):
            block.index, self._blocks[index] = index, block
        moved = dict(zip(old, new, strict=True))
        self._free = [moved.get(index, index) for index in self._free]
        heapq.heapify(self._free)

    def _make_unknown(self, block: Block) -> None:
        if block.digest is not None:
            del self._known[block.digest]
            block.digest = None
        for end in block.ends:
            del self._ends[end]
        block.ends.clear()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not whatever was there: masked positions are multiplied by 0, and 0 x NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages the system has not given yet; torch would write them all. On a cache line's border.
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
