"""Shares of equal work: items to parts by weight. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of the items of each part, ascending, so that the parts' weights are nearly equal.

    Heaviest item first, each to the lightest part (Graham, SIAM J. Appl. Math. 17, 1969): the heaviest part is at most
    4/3 - 1/(3 parts) times the best possible one. Weights are positive, so no part stays empty while there are items
    for all. Ties go to the lower index, so equal input gives equal parts.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        total, part = lightest[0]
        shares[part].append(item)
        heapq.heapreplace(lightest, (total + weights[item], part))
    return [sorted(share) for share in shares]
