"""A request while the native engine works on it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from core_trainer.rollout.engine import Chunk, GenerateRequest
from core_trainer.rollout.native.kv_cache import BLOCK, Block, digest
from core_trainer.rollout.serving import Served
from core_trainer.types import Turn


@dataclass(slots=True, eq=False)
class Sequence:
    """Its tokens, what of them is in the cache, how it went. ``digests`` name its full blocks, ``end`` its prompt."""

    request: GenerateRequest
    future: asyncio.Future[Turn]
    chunks: asyncio.Queue[Chunk] | None  # where a streaming caller reads
    uniform: np.ndarray  # [max_new_tokens] float64, all its random numbers
    tokens: list[int]  # prompt, then what was sampled
    start_ns: int
    num_computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    end: bytes = b""
    cache_version: int = -1  # of the cache's content when its blocks were taken
    hidden: Tensor | None = None  # [d] of the last token, when the whole prompt was in the cache
    num_cached_tokens: int = 0
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # policy_version each token was sampled with
    num_preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.extend_digests()
        parent = self.digests[-1] if self.digests else b""
        # -1 is no token: a prompt's end is told from a full block of the same tokens.
        self.end = digest(parent, [*self.tokens[len(self.digests) * BLOCK :], -1])

    def extend_digests(self) -> None:
        """Name the blocks that its tokens fill by now."""
        for start in range(len(self.digests) * BLOCK, len(self.tokens) - BLOCK + 1, BLOCK):
            parent = self.digests[-1] if self.digests else b""
            self.digests.append(digest(parent, self.tokens[start : start + BLOCK]))

    def append(self, token: int, log_prob: float, top: list[tuple[int, float]], version: int, now: float) -> None:
        """A token was sampled."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.top_log_probs.append(top)
        self.versions.append(version)
        self.first_token = self.first_token or now
        self.last_token = now
        self.extend_digests()

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.log_probs)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    def served(self) -> Served:
        """How it went, in seconds."""

        def between(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else end - start

        return Served(
            queue_s=between(self.arrived, self.scheduled),
            prefill_s=between(self.scheduled, self.first_token),
            decode_s=between(self.first_token, self.last_token),
            ttft_s=between(self.arrived, self.first_token),
            e2e_s=between(self.arrived, self.last_token),
            num_preemptions=self.num_preemptions,
        )
