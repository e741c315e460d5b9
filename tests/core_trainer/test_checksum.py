"""The checksum of weights: what changes it and what does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_trainer.rollout import checksum

SIZES = [1, 3, 2047, 2048, 4096, 5000]  # float32: rows are 2,048 of them


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{size}": torch.randn(size, generator=generator).to(dtype) for size in SIZES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layout_order_and_place_make_no_difference(dtype: torch.dtype) -> None:
    """Transposed memory, an offset that is no multiple of a word, and another order of names."""
    plain = {"a": torch.arange(5000.0).reshape(50, 100).to(dtype), "b": torch.arange(7.0).to(dtype)}
    offset = torch.zeros(8, dtype=dtype)[1:]
    offset.copy_(plain["b"])
    moved = {"b": offset, "a": plain["a"].T.contiguous().T}
    assert moved["a"].stride() != plain["a"].stride()
    assert checksum.of(moved.items()) == checksum.of(plain.items())


@given(st.sampled_from(SIZES), st.data())
@settings(max_examples=60, deadline=None)
def test_any_changed_bit_shows(size: int, data: st.DataObject) -> None:
    """The last bit of one float, anywhere, in a whole row, in the tail, or where there is only a tail."""
    named = weights()
    before = checksum.of(named.items())
    named[f"w{size}"].view(torch.int32)[data.draw(st.integers(0, size - 1))] ^= 1
    assert checksum.of(named.items()) != before


@given(st.integers(0, 4095), st.integers(0, 4095))
@settings(max_examples=60, deadline=None)
def test_two_words_that_changed_places_show(i: int, j: int) -> None:
    """Also a whole number of rows apart, where the sums of the columns stay the same."""
    tensor = torch.arange(4096, dtype=torch.int64)
    before = checksum.of([("w", tensor)])
    tensor[[i, j]] = tensor[[j, i]]
    assert (checksum.of([("w", tensor)]) != before) == (i != j)


def test_names_types_shapes_and_signs_of_zero_count() -> None:
    """The same bytes under another name, dtype or shape are other weights; so is -0.0."""
    tensor = torch.zeros(4, 6)
    variants = [
        [("a", tensor)],
        [("b", tensor)],
        [("a", tensor.view(torch.int32))],
        [("a", tensor.T)],
        [("a", -tensor)],
        [("a", tensor), ("b", tensor)],
        [],
    ]
    found = [checksum.of(variant) for variant in variants]
    assert len(set(found)) == len(found)
    assert all(len(value) == 16 for value in found)


def test_swapped_tensors_show() -> None:
    """Two tensors of one shape that took each other's place."""
    one, two = torch.randn(2048), torch.randn(2048)
    assert checksum.of([("a", one), ("b", two)]) != checksum.of([("a", two), ("b", one)])


def test_weights_at_rest_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is shared is; a copy, a view of other elements and a new tensor in freed memory are not."""
    reads: list[tuple[int, ...]] = []
    plain = checksum._digest
    monkeypatch.setattr(checksum, "_digest", lambda tensor: (reads.append(tuple(tensor.shape)), plain(tensor))[1])
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    with checksum.weights_at_rest():
        first = checksum.of([("w", parameter)])
        assert checksum.of([("w", parameter.detach())]) == first
        assert len(reads) == 1
        assert checksum.of([("w", parameter.detach().clone())]) == first
        assert len(reads) == 2
        assert checksum.of([("w", parameter.detach().T)]) != first
        found = {checksum.of([("t", torch.full((1000,), float(i)))]) for i in range(50)}  # all in the same memory
        assert len(found) == 50
    with torch.no_grad():
        parameter[0, 0] += 1
    assert checksum.of([("w", parameter)]) != first
