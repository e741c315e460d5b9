"""A checksum of weights: equal for equal bits under equal names, at the speed of memory.

A tensor's bits are read as a matrix of 64-bit words. Each row and each column of it is summed, wrapping around, so one
changed word shows in two sums, and several changes go unseen only when they cancel in every row and every column.
Names, dtypes, shapes and sums go through sha256. It tells weights that are stale, torn or misplaced, and is no
signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WORD_BYTES = 8
COLUMNS = 1024  # words: rows of 8 KiB

_seen: dict[object, bytes] | None = None  # digests of the memory read so far, inside ``weights_at_rest``


def of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Checksum of named weights, 16 hex digits. Strides, device, order and sharing of memory make no difference."""
    digests = sorted((name, _remembered(tensor)) for name, tensor in weights)
    whole = hashlib.sha256()
    for name, digest in digests:
        whole.update(name.encode() + b"\0" + digest)
    return whole.hexdigest()[:16]


@contextmanager
def weights_at_rest() -> Iterator[None]:
    """Inside, nobody changes weights, so memory that two checksums share is read once."""
    global _seen
    _seen = {}
    try:
        yield
    finally:
        _seen = None


def _remembered(tensor: Tensor) -> bytes:
    if _seen is None:
        return _digest(tensor)
    # The weak reference keeps the storage's identity from being given to another one, not the memory.
    storage = StorageWeakRef(tensor.untyped_storage())
    key = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if key not in _seen:
        _seen[key] = _digest(tensor)
    return _seen[key]


def _digest(tensor: Tensor) -> bytes:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:  # cannot be read as words where it is
        data = data.clone()
    whole = data.numel() // (WORD_BYTES * COLUMNS) * (WORD_BYTES * COLUMNS)
    words = data[:whole].view(torch.int64).view(-1, COLUMNS)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in (words.sum(dim=0), words.sum(dim=1), data[whole:]):
        digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
