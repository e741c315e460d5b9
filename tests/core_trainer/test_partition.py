"""Balanced parts: every item once, near the best split, the same each time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from core_trainer.partition import balanced


def loads(weights: list[int], shares: list[list[int]]) -> list[int]:
    return [sum(weights[i] for i in share) for share in shares]


def test_by_hand() -> None:
    """8, 7, 6, 5, 4 on two: 8, then 7, 6 to the 7, 5 to the 8, 4 to either (both have 13): the first."""
    weights = [4, 5, 6, 7, 8]
    assert balanced(weights, 2) == [[0, 1, 4], [2, 3]]
    assert loads(weights, balanced(weights, 2)) == [17, 13]
    assert balanced([3, 3, 3], 1) == [[0, 1, 2]]
    assert balanced([5], 3) == [[0], [], []]
    assert balanced([], 2) == [[], []]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_every_item_once_in_order_and_no_rank_idle(weights: list[int], parts: int) -> None:
    """A partition whose parts ascend; with enough items no part is empty."""
    shares = balanced(weights, parts)
    assert sorted(itertools.chain(*shares)) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    assert sum(not share for share in shares) == max(0, parts - len(weights))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_heaviest_part_is_within_the_bound_of_the_best(weights: list[int], parts: int) -> None:
    """Against every possible split: at most 4/3 - 1/(3 parts) of the best one's heaviest part."""
    splits = itertools.product(range(parts), repeat=len(weights))
    best = min(
        max(sum(w for w, at in zip(weights, split, strict=True) if at == p) for p in range(parts)) for split in splits
    )
    assert max(loads(weights, balanced(weights, parts))) <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9
