"""Exact layers are the plain ones, with rows and numbers that know nothing of each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core_trainer.exact.activation import PIECE, ExactActivation
from core_trainer.exact.linear import TILE_ROWS, ExactLinear, StrictLinear, TiledLinear


@pytest.mark.parametrize("kind", [StrictLinear, TiledLinear])
@pytest.mark.parametrize("rows", [1, 2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS + 5])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_linear(kind: type[ExactLinear], rows: int, bias: bool) -> None:
    """Output and gradients of input, weight and bias, for any number of rows and leading dimensions."""
    torch.manual_seed(0)
    plain = nn.Linear(40, 24, bias=bias)
    exact = nn.Linear(40, 24, bias=bias)
    exact.load_state_dict(plain.state_dict())
    exact.__class__ = kind
    inputs = [torch.randn(1, rows, 40, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outs = [layer(x) for layer, x in zip((plain, exact), inputs, strict=True)]
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(exact.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiled_row_is_the_same_wherever_it_stands(dtype: torch.dtype) -> None:
    """Alone, in another place of its tile, in another tile, with or without gradients: equal in every bit."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 192, generator=generator).to(dtype) for rows in (2 * TILE_ROWS + 3, 576))
    whole = TiledLinear.product(x, weight)
    order = torch.randperm(len(x), generator=generator)
    assert torch.equal(TiledLinear.product(x[order], weight), whole[order])
    assert torch.equal(TiledLinear.product(x[5:6], weight), whole[5:6])
    assert torch.equal(TiledLinear.product(x, weight.requires_grad_()).detach(), whole)


@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(approximate="tanh")])
def test_an_activation_is_the_same_wherever_the_number_stands(function: nn.Module) -> None:
    """At any offset, in any length, at one thread and two; values and gradients are torch's."""
    exact = ExactActivation(function)
    x = torch.randn(7 * PIECE + 13, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = exact(x)
        torch.testing.assert_close(whole, function(x), atol=1e-6, rtol=1e-6)
        for count, offset, size in ((1, 3, 65), (2, 5, 7), (2, 11, 3 * PIECE + 1), (2, 0, len(x))):
            torch.set_num_threads(count)
            assert torch.equal(exact(x[offset : offset + size]), whole[offset : offset + size])
    finally:
        torch.set_num_threads(threads)
    leaves = [x[:100].view(4, 25).clone().requires_grad_() for _ in range(2)]
    for f, leaf in zip((function, exact), leaves, strict=True):
        f(leaf).square().sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
