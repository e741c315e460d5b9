"""Chunked log-probs, entropy and squared probabilities equal plain ones, values and gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core_trainer import logprobs
from core_trainer.logprobs import TokenScores, softmax_parts, token_scores


class Case(NamedTuple):
    """Inputs of one output layer, in float64."""

    hidden: Tensor  # [M, d]
    weight: Tensor  # [V, d]
    targets: Tensor  # [M]
    upstream: Tensor  # [2, M] gradients of log-probs and entropies


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    """More rows than a chunk and than a block, neither dividing them; logits of spread 3."""
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 20)
    monkeypatch.setattr(logprobs, "BLOCK_ROWS", 8)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Case(normal(45, 6) * 1.2, normal(31, 6), torch.randint(31, (45,), generator=generator), normal(2, 45))


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The definitions, over the whole [M, V]."""
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


def mine(case: Case, hidden: Tensor, weight: Tensor, temperature: float) -> TokenScores:
    return token_scores(hidden, weight, case.targets, temperature, entropy_gradient=True, sum_pi_squared=True)


def leaves(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(x.to(dtype, copy=True).requires_grad_() for x in case[:2])  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("terms", [(1, 1), (1, 0), (0, 1)])
def test_values_and_gradients_equal_autograd_in_float64(case: Case, temperature: float, terms: tuple[int, int]) -> None:
    """Log-probs alone, entropy alone and both: gradients of hidden states and weights within float32 rounding."""
    hidden, weight = leaves(case, torch.float64)
    expected = plain(hidden, weight, case.targets, temperature)
    sum(t * (x * u).sum() for t, x, u in zip(terms, expected, case.upstream, strict=False)).backward()  # type: ignore[union-attr]
    ours, our_weight = leaves(case, torch.float32)
    found = mine(case, ours, our_weight, temperature)
    sum(t * (x * u).sum() for t, x, u in zip(terms, found, case.upstream.float(), strict=False)).backward()  # type: ignore[union-attr]
    for got, want in zip(found, expected, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)
    for got, want in ((ours.grad, hidden.grad), (our_weight.grad, weight.grad)):
        assert got is not None
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_entropy_gradient_equals_finite_differences(case: Case) -> None:
    """Along a random direction of the hidden states, the chunked backward equals the change of the float64 entropy."""
    direction = torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    step, temperature = 1e-5, 0.7

    def entropy(shift: float) -> float:
        return float((plain(case.hidden + shift * direction, *case[1:3], temperature)[1] * case.upstream[1]).sum())

    hidden, weight = leaves(case, torch.float32)
    (mine(case, hidden, weight, temperature).entropy * case.upstream[1].float()).sum().backward()
    assert hidden.grad is not None
    slope = (entropy(step) - entropy(-step)) / (2 * step)
    assert float((hidden.grad.double() * direction).sum()) == pytest.approx(slope, rel=1e-4)


def test_uniform_and_certain_rows_by_hand() -> None:
    """Equal logits over 4 words: entropy log 4, squares 1/4, no entropy gradient. One certain word: 0 and 1."""
    hidden = torch.tensor([[0.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[200.0], [0.0], [0.0], [0.0]])
    found = token_scores(hidden, weight, torch.tensor([1, 0]), 1.0, entropy_gradient=True, sum_pi_squared=True)
    torch.testing.assert_close(found.entropy, torch.tensor([4.0, 1.0]).log())
    torch.testing.assert_close(found.sum_pi_squared, torch.tensor([0.25, 1.0]))
    found.entropy.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [0.0, 0.0]


def test_a_word_that_cannot_be_adds_nothing_to_entropy_or_gradient(case: Case) -> None:
    """Logits of -inf, as an overflow makes them, give what a vocabulary without those words gives."""
    hidden, weight = leaves(case, torch.float32)
    with torch.no_grad():
        hidden[:, 0] = 1e20
        weight[:, 0] = 0
        weight[20:, 0] = -1e20
    case = case._replace(targets=case.targets % 20)
    found = mine(case, hidden, weight, 1.0)
    (found.log_probs + 5 * found.entropy).sum().backward()
    few, few_weight = hidden.detach().requires_grad_(), weight[:20].detach().requires_grad_()
    expected = mine(case, few, few_weight, 1.0)
    (expected.log_probs + 5 * expected.entropy).sum().backward()
    torch.testing.assert_close(found.entropy, expected.entropy)
    torch.testing.assert_close(hidden.grad, few.grad, atol=1e-4, rtol=1e-4)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:20, 1:], few_weight.grad[:, 1:], atol=1e-4, rtol=1e-4)  # type: ignore[index]


def test_a_lone_row_is_summed_as_among_others() -> None:
    """To the last bit, also when two threads would share its sum."""
    logits = torch.randn((5, 49152), generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = softmax_parts(logits, 1.0)[2]
        alone = torch.cat([softmax_parts(logits[i : i + 1], 1.0)[2] for i in range(5)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)


def test_nothing_is_computed_that_is_not_asked_for(case: Case) -> None:
    """Off, the entropy takes no gradient, squares are None, and log-probs and gradients are the same bits."""
    results = []
    for asked in (False, True):
        hidden, weight = leaves(case, torch.float32)
        found = token_scores(hidden, weight, case.targets, 0.7, entropy_gradient=asked, sum_pi_squared=asked)
        assert found.entropy.requires_grad is asked
        assert (found.sum_pi_squared is None) is not asked
        (found.log_probs * case.upstream[0].float()).sum().backward()
        results.append((found.log_probs.detach(), found.entropy.detach()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_frozen_output_layer_gets_no_gradient(case: Case) -> None:
    """Hidden states get the same gradient whether the weight is trained or not."""
    gradients = []
    for trained in (True, False):
        hidden, weight = leaves(case, torch.float32)
        weight.requires_grad_(trained)
        token_scores(hidden, weight, case.targets, 1.0).log_probs.sum().backward()
        assert (weight.grad is not None) is trained
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)


def test_no_tensor_of_the_whole_vocabulary_is_kept_in_float32(case: Case) -> None:
    """Between forward and backward nothing of size [M, V] lives, and float32 never holds more than a block of it."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float32 and out.dim() == 2 and out.shape[1] == 31:
                largest = max(largest, out.shape[0])
            return out

    hidden, weight = leaves(case, torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x), Watch():
        found = mine(case, hidden, weight, 1.0)
        (found.log_probs + found.entropy).sum().backward()
    assert (45, 31) not in kept
    assert largest == logprobs.BLOCK_ROWS
