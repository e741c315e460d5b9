"""A model's weights in memory that other processes of this machine read: a safetensors file that is on no disk.

The file is anonymous memory (memfd), so nothing is left behind when its owner is killed, and only the same user can
open it. Both sides map it once and the owner rewrites it in place: fresh pages, and fresh mappings of them, would cost
more than the copy. Linux only.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE


class SharedWeights:
    """Named tensors of fixed shapes and dtypes. Values are copied in by ``write``."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Takes names, shapes and dtypes from ``weights``. Raises KeyError for dtypes other than floats of 16 and 32
        bits.
        """
        ordered = sorted(weights.items(), key=lambda item: -item[1].element_size())  # so that each is aligned
        header, self.nbytes = {}, 0
        for name, tensor in ordered:
            span = [self.nbytes, self.nbytes + tensor.nbytes]
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            self.nbytes = span[1]
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)  # data begins on a cache line
        self._fd = os.memfd_create("rlinsight-weights")
        os.ftruncate(self._fd, 8 + len(text) + self.nbytes)
        with mmap.mmap(self._fd, 0, _FLAGS) as start:
            start[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
        self._tensors = _map(self._fd)

    @property
    def path(self) -> str:
        """Where processes of the same user on this machine open it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the values in; names, shapes and dtypes are those it was made with."""
        for name, shared in self._tensors.items():
            shared.copy_(weights[name].detach())

    def close(self) -> None:
        """Give the memory back once all readers have."""
        self._tensors.clear()
        os.close(self._fd)


def open_shared(path: str) -> dict[str, Tensor]:
    """The tensors of a ``SharedWeights`` in another process, by name. They are that memory itself, and change with it.

    Raises OSError when there is none.
    """
    fd = os.open(path, os.O_RDWR)  # tensors want writable memory
    try:
        return _map(fd)
    finally:
        os.close(fd)


def _map(fd: int) -> dict[str, Tensor]:
    """Views of the file's tensors. The mapping lives as long as they do."""
    memory = mmap.mmap(fd, 0, _FLAGS)
    start = 8 + int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8:start])
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        dtype = dtypes[entry["dtype"]]
        flat = torch.frombuffer(memory, dtype=dtype, count=(end - first) // dtype.itemsize, offset=start + first)
        tensors[name] = flat.view(entry["shape"])
    return tensors
