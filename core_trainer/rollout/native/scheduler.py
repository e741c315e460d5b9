"""What the native engine computes next: who is admitted, who computes how many tokens, who gives way.

A sequence computes its prompt in chunks, then one token a step. Sequences that need the same blocks wait for the first
of them to compute these, then share them. When memory runs out the last admitted gives its blocks up and waits in
front; what it computes later is what it would have computed.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from core_trainer.rollout.native.kv_cache import BLOCK, Block, KVCache, blocks_for
from core_trainer.rollout.native.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass of the model: the next ``counts[i]`` tokens of ``sequences[i]``; 0 where its prompt was in the cache."""

    sequences: list[Sequence]
    counts: list[int]
    prefill: bool


class Scheduler:
    """Waiting and running sequences, each in the order of admission."""

    def __init__(self, cache: KVCache, max_batch_size: int, prefill_tokens: int) -> None:
        self.cache, self.max_batch_size, self.prefill_tokens = cache, max_batch_size, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_deferred = 0  # waiting for another's prefix
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the cache
        self.prefix_hits = 0  # of those, found
        self._prefilled = False  # whether the last pass was a prefill

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the cache when it is alone."""
        self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """The next pass; None when nothing is left. Prefill and decoding take turns, so that neither waits for long."""
        self._admit()
        ready = [s for s in self.running if s.hidden is not None]
        if ready:
            return Batch(ready, [0] * len(ready), False)
        prefill = [s for s in self.running if s.remaining > 1]
        if prefill and not (self._prefilled and len(prefill) < len(self.running)):
            self._prefilled = True
            return self._chunks(prefill)
        self._prefilled = False
        batch = self._decode()
        if batch is None and (self.waiting or self.running):  # all that decoded gave way
            return self.schedule()
        return batch

    def publish(self, sequence: Sequence, count: int) -> None:
        """Let others have the blocks that the last ``count`` computed tokens filled.

        What new weights did not compute from the start stays with its owner.
        """
        if sequence.cache_version == self.cache.version:
            size = sequence.num_computed
            for i in range((size - count) // BLOCK, size // BLOCK):
                self.cache.publish(sequence.blocks[i], sequence.digests[i])

    def publish_end(self, sequence: Sequence, hidden: Tensor) -> None:
        """Its whole prompt is computed and nothing else: who has the same one goes on from ``hidden`` [d]."""
        if sequence.cache_version == self.cache.version:
            self.cache.publish_end(sequence.blocks[(sequence.num_prompt - 1) // BLOCK], sequence.end, hidden)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence.blocks:
            self.running.remove(sequence)
            self.cache.drop(sequence.blocks)
            sequence.blocks = []
        else:
            self.waiting.remove(sequence)

    def clear(self) -> None:
        """Forget every sequence and what was computed, in whatever state a failure left them."""
        self.waiting.clear()
        self.running.clear()
        self.num_deferred = 0
        self.cache.reset()

    def _admit(self) -> None:
        """Move waiting sequences to the running ones while there is room."""
        self.num_deferred = 0
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return
        computing = {key for s in self.running for key in self._to_publish(s)}
        deferred = []
        copies: list[tuple[Block, Block]] = []
        while self.waiting and len(self.running) < self.max_batch_size:
            sequence = self.waiting.popleft()
            if self._is_computing(sequence, computing):
                deferred.append(sequence)
            elif self._take_blocks(sequence, copies):
                sequence.scheduled = sequence.scheduled or time.perf_counter()
                self.running.append(sequence)
                computing.update(self._to_publish(sequence))
            else:
                self.waiting.appendleft(sequence)
                break
        self.num_deferred = len(deferred)
        self.waiting.extendleft(reversed(deferred))
        if copies:
            sources, targets = zip(*copies, strict=True)
            self.cache.copy(sources, targets)

    def _is_computing(self, sequence: Sequence, computing: set[bytes]) -> bool:
        """Whether a running sequence is about to publish what this one needs first."""
        wanted = [*sequence.digests[: _num_shareable(sequence)], sequence.end]
        missing = len(self.cache.find(wanted[:-1]))
        return wanted[missing] in computing

    def _to_publish(self, sequence: Sequence) -> list[bytes]:
        """What a sequence will publish on its way to its next token."""
        if sequence.cache_version != self.cache.version:
            return []
        keys = sequence.digests[sequence.num_computed // BLOCK :]
        return [*keys, sequence.end] if sequence.num_computed < sequence.num_prompt else keys

    def _take_blocks(self, sequence: Sequence, copies: list[tuple[Block, Block]]) -> bool:
        """Refer to the known blocks of its prefix and take the others; False, and nothing done, without room.

        What has to be copied from a block to another is added to ``copies``.
        Every running sequence must be able to grow by a block after it, or it would soon be driven out again.
        """
        cache, size = self.cache, len(sequence.tokens)
        known = cache.find(sequence.digests[: _num_shareable(sequence)])
        end = cache.find_end(sequence.end) if size == sequence.num_prompt else None
        whole = end is not None and len(known) == _num_shareable(sequence)
        if end is not None and whole and self._has_room([*known, end[0]], 1 if size % BLOCK else 0):
            sequence.num_computed, sequence.hidden = size, end[1]
            known.append(end[0])
        elif self._has_room(known, blocks_for(size) - len(known)):
            sequence.num_computed = len(known) * BLOCK
        else:
            return False
        for block in known:
            cache.refer(block)
        if sequence.hidden is not None and size % BLOCK:  # its last block is about to be written: it gets its own
            sequence.blocks = [*known[:-1], cache.take()]
            copies.append((known[-1], sequence.blocks[-1]))
            cache.drop(known[-1:])  # may be taken by the next one: copies read before anything is written
        else:
            sequence.blocks = known + [cache.take() for _ in range(blocks_for(size) - len(known))]
        sequence.cache_version = cache.version
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed
            self.prefix_queries += size
            self.prefix_hits += sequence.num_computed
        return True

    def _has_room(self, known: list[Block], taken: int) -> bool:
        """Whether that many blocks can be had beside ``known``, all of which will be referred to."""
        kept = sum(block.references == 0 for block in known)
        return self.cache.available - kept - taken >= len(self.running)

    def _chunks(self, sequences: list[Sequence]) -> Batch:
        """Prompts in order of admission, as far as the budget of a step reaches."""
        chosen, counts, left = [], [], self.prefill_tokens
        for sequence in sequences:
            if left == 0:
                break
            chosen.append(sequence)
            counts.append(min(sequence.remaining, left))
            left -= counts[-1]
        return Batch(chosen, counts, True)

    def _decode(self) -> Batch | None:
        """One token of everyone who has sampled; the last admitted gives way where a block is missing."""
        chosen: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.remaining != 1 or not sequence.blocks:  # still computing its prompt, or driven out just now
                continue
            while sequence.blocks and len(sequence.blocks) < blocks_for(len(sequence.tokens)):
                if self.cache.available:
                    sequence.blocks.append(self.cache.take())
                else:
                    self._preempt(self.running[-1])
            if sequence.blocks:
                chosen.append(sequence)
        return Batch(chosen, [1] * len(chosen), False) if chosen else None

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it computes again what is not found in the cache when it is back."""
        self.remove(sequence)
        sequence.num_computed, sequence.hidden = 0, None
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)


def _num_shareable(sequence: Sequence) -> int:
    """Full blocks that another may have computed: not the last token's, whose hidden state is wanted."""
    return (len(sequence.tokens) - 1) // BLOCK
