"""The native engine's scheduler and cache: whoever shares, gives way or comes back finds the keys of its own tokens.

A toy stands in for the model: the key of a token is a fingerprint of all tokens up to it, and the next token follows
from it. So any block that was mixed up, freed too early or written by two shows as a wrong fingerprint.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native.kv_cache import BLOCK, KVCache, blocks_for, digest
from core_trainer.rollout.native.scheduler import Batch, Scheduler
from core_trainer.rollout.native.sequence import Sequence
from core_trainer.types import SamplingParams

CONFIG: Any = SimpleNamespace(
    num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=1, head_dim=1, hidden_size=1
)


def make_cache(blocks: int) -> KVCache:
    """A cache of that many blocks, of one number a token."""
    cache = KVCache(CONFIG, torch.float64, torch.device("cpu"), blocks * 2 * BLOCK * 8)
    assert cache.num_blocks == blocks
    return cache


def make_sequence(name: str, prompt: list[int], new: int) -> Sequence:
    """A waiting sequence."""
    request = GenerateRequest(name, tuple(prompt), SamplingParams(new))
    future: Any = None
    return Sequence(request, future, None, np.zeros(new), list(prompt), 0)


def fingerprints(tokens: list[int]) -> np.ndarray:
    """The toy's keys: of each token from all tokens up to it."""
    found, value = [], 1
    for token in tokens:
        value = zlib.crc32(bytes([token]), value)
        found.append(float(value))
    return np.array(found)


def continuation(prompt: list[int], new: int) -> list[int]:
    """What the toy samples after a prompt, by itself."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(fingerprints(tokens)[-1]) % 7)
    return tokens[len(prompt) :]


@dataclass
class Toy:
    """The toy model's engine: computes what the scheduler says and checks what it finds."""

    scheduler: Scheduler
    done: dict[str, list[int]] = field(default_factory=dict)
    passes: list[Batch] = field(default_factory=list)

    def step(self) -> bool:
        """One pass; whether there was one."""
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.scheduler.waiting
            assert not self.scheduler.running
            return False
        self.passes.append(batch)
        assert sum(batch.counts) <= max(self.scheduler.prefill_tokens, self.scheduler.max_batch_size)
        keys = self.scheduler.cache.keys[0].view(-1, BLOCK).numpy()
        last = {}
        for sequence, count in zip(batch.sequences, batch.counts, strict=True):
            expected = fingerprints(sequence.tokens)
            known, size = sequence.num_computed, sequence.num_computed + count
            found = np.concatenate([keys[block.index] for block in sequence.blocks])
            assert found[:known].tolist() == expected[:known].tolist()
            for i in range(known, size):
                keys[sequence.blocks[i // BLOCK].index, i % BLOCK] = expected[i]
            sequence.num_computed = size
            last[sequence] = expected[size - 1]
            hidden = torch.tensor([last[sequence]])
            assert sequence.hidden is None or sequence.hidden.equal(hidden)
            sequence.hidden = None
            self.scheduler.publish(sequence, count)
            if count and size == sequence.num_prompt:
                self.scheduler.publish_end(sequence, hidden)
        for sequence in batch.sequences:
            if sequence.remaining:
                continue
            sequence.append(int(last[sequence]) % 7, 0.0, [], 0, 0.0)
            if sequence.num_sampled == sequence.request.params.max_new_tokens:
                self.done[sequence.request.request_id] = sequence.tokens[sequence.num_prompt :]
                self.scheduler.remove(sequence)
        self.check_blocks()
        return True

    def check_blocks(self) -> None:
        """Each block is referred to by as many sequences as it says, and is free, kept or in use."""
        cache = self.scheduler.cache
        users: dict[int, int] = {}
        for sequence in self.scheduler.running:
            assert len({id(block) for block in sequence.blocks}) == len(sequence.blocks)
            for block in sequence.blocks:
                users[block.index] = users.get(block.index, 0) + 1
        assert users == {block.index: block.references for block in cache._blocks if block.references}
        assert [block.index for block in cache._blocks] == list(range(cache.num_blocks))
        assert len(users) + cache.available == cache.num_blocks
        assert len(set(cache._free) | users.keys() | {block.index for block in cache._kept}) == cache.num_blocks


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 12), st.integers(1, 6), st.sampled_from([1, 7, 64, 100, 1000]))
def test_everyone_samples_what_it_would_alone(seed: int, blocks: int, batch: int, chunk: int) -> None:
    """Groups, shared and repeated prefixes, random arrivals, aborts, new weights, moved blocks, little memory."""
    rng = random.Random(seed)
    toy = Toy(Scheduler(make_cache(blocks), batch, chunk))
    system = [rng.randrange(7) for _ in range(rng.choice([0, 30, 64, 100]))]
    longest = min(blocks, 4) * BLOCK
    waiting, expected, live = [], {}, {}
    for g in range(rng.randrange(1, 5)):
        own = [rng.randrange(7) for _ in range(rng.randrange(1, longest - len(system) - 70))]
        prompt = [*system, *own][: rng.choice([None, 64, 128])]
        for j in range(rng.randrange(1, 4)):
            waiting.append(make_sequence(f"{g}/{j}", prompt, rng.randrange(1, 70)))
    rng.shuffle(waiting)
    for sequence in waiting:
        name = sequence.request.request_id
        expected[name] = continuation(sequence.tokens, sequence.request.params.max_new_tokens)
        live[name] = sequence
    for _ in range(20_000):
        if waiting and rng.random() < 0.3:
            toy.scheduler.add(waiting.pop())
        event = rng.random()
        if event < 0.005:
            name = rng.choice(list(live))
            if live[name] not in waiting and name not in toy.done:
                toy.scheduler.remove(live.pop(name))
                del expected[name]
                if not live:
                    return
        elif event < 0.01:
            toy.scheduler.cache.forget()
        elif event < 0.02 and toy.scheduler.running:
            toy.scheduler.cache.compact(rng.choice(toy.scheduler.running).blocks)
        if not toy.step() and not waiting:
            break
    assert toy.done == expected


def test_a_group_computes_its_prompt_once() -> None:
    """Four samples of a 100-token prompt: one prefill of 100 tokens, then all four decode together."""
    toy = Toy(Scheduler(make_cache(20), 8, 64))
    prompt = [i % 5 for i in range(100)]
    group = [make_sequence(str(j), prompt, 3) for j in range(4)]
    for sequence in group:
        toy.scheduler.add(sequence)
    while toy.step():
        pass
    assert [(batch.prefill, sum(batch.counts)) for batch in toy.passes] == [
        (True, 64),
        (True, 36),
        (False, 0),  # the others take the prompt's blocks and last hidden state
        (False, 4),
        (False, 4),
    ]
    assert [sequence.num_cached_tokens for sequence in group] == [0, 100, 100, 100]
    assert (toy.scheduler.prefix_queries, toy.scheduler.prefix_hits) == (400, 300)


@pytest.mark.parametrize("then", ["no room", "nobody waits", "a failure"])
def test_deferred_are_those_of_the_last_pass(then: str) -> None:
    """Who waited for another's prefix waits for room in the next pass, or is gone: nobody stays counted."""
    toy = Toy(Scheduler(make_cache(20), 2, 1000))
    group = [make_sequence(str(j), [1] * 100, 3) for j in range(4)]
    for sequence in group:
        toy.scheduler.add(sequence)
    if then == "no room":
        toy.scheduler.add(make_sequence("other", [2] * 100, 3))
    toy.step()
    assert toy.scheduler.num_deferred == 3
    if then == "nobody waits":
        for sequence in group[1:]:
            toy.scheduler.remove(sequence)
    if then == "a failure":
        toy.scheduler.clear()
    else:
        toy.step()
    assert toy.scheduler.num_deferred == 0
    assert len(toy.scheduler.waiting) == (3 if then == "no room" else 0)


def test_a_next_turn_finds_the_last_one() -> None:
    """A prompt that goes on where an answered request ended computes only what is new, in whole blocks."""
    toy = Toy(Scheduler(make_cache(20), 8, 1000))
    first = make_sequence("first", [i % 5 for i in range(50)], 100)
    toy.scheduler.add(first)
    while toy.step():
        pass
    second = make_sequence("second", [*first.tokens, 1, 2, 3], 1)
    toy.scheduler.add(second)
    while toy.step():
        pass
    assert second.num_cached_tokens == 128  # of 149 whose keys were computed
    assert toy.passes[-1].counts == [25]


def test_prompts_and_decoding_take_turns() -> None:
    """A long prompt in chunks does not stop who is decoding, and the other way round."""
    toy = Toy(Scheduler(make_cache(20), 8, 50))
    toy.scheduler.add(make_sequence("short", [1, 2, 3], 6))
    toy.step()
    toy.scheduler.add(make_sequence("long", [4] * 190, 2))
    while toy.step():
        pass
    assert [batch.prefill for batch in toy.passes[:9]] == [True, False] * 4 + [True]
    assert [sum(batch.counts) for batch in toy.passes if batch.prefill] == [3, 50, 50, 50, 40]


def test_the_last_admitted_gives_way_and_comes_back() -> None:
    """Two that both outgrow the memory: the first goes on, the second begins anew and finds what is left of it."""
    toy = Toy(Scheduler(make_cache(3), 8, 1000))
    old, new = make_sequence("old", [1] * 60, 70), make_sequence("new", [2] * 60, 70)
    for sequence in (old, new):
        toy.scheduler.add(sequence)
    while toy.step():
        pass
    assert toy.done == {"old": continuation([1] * 60, 70), "new": continuation([2] * 60, 70)}
    assert (old.num_preemptions, new.num_preemptions, toy.scheduler.num_preemptions) == (0, 1, 1)


def test_new_weights_share_nothing_with_old_ones() -> None:
    """After ``forget`` an equal prompt is computed again, also while a request of the old weights is running."""
    toy = Toy(Scheduler(make_cache(20), 8, 1000))
    running = make_sequence("running", [3] * 60, 80)
    toy.scheduler.add(running)
    toy.step()
    toy.scheduler.cache.forget()
    again = make_sequence("again", [3] * 60, 1)
    toy.scheduler.add(again)
    while toy.step():
        pass
    assert again.num_cached_tokens == 0
    late = make_sequence("late", running.tokens, 1)  # its first block was filled by both old and new weights
    assert toy.scheduler.cache.find(late.digests[:1]) == []


def test_least_recently_used_content_goes_first() -> None:
    """With two free places for three contents, the one asked for last is still known."""
    cache = make_cache(3)
    keys = [digest(b"", [i] * BLOCK) for i in range(3)]
    for key in keys[:2]:
        block = cache.take()
        cache.publish(block, key)
        cache.drop([block])
    (used,) = cache.find(keys[:1])
    cache.refer(used)
    cache.drop([used])
    taken = [cache.take(), cache.take()]
    assert [len(cache.find([key])) for key in keys[:2]] == [1, 0]
    assert cache.available == 1
    cache.drop(taken)
    assert cache.usage == 0


def test_digests_tell_what_came_before() -> None:
    """Equal tokens after different ones differ, and a prompt's end is not a full block."""
    first, second = make_sequence("a", [1] * 64 + [2] * 64, 1), make_sequence("b", [3] * 64 + [2] * 64, 1)
    names = {*first.digests, *second.digests, first.end, second.end}
    assert len(names) == 6
    assert make_sequence("c", [1] * 64 + [2] * 64 + [5], 1).digests == first.digests
    assert blocks_for(64) == 1
    assert blocks_for(65) == 2


def test_the_pool_gives_memory_back() -> None:
    """Released memory is told in bytes, and is zero when it is taken again."""
    cache = make_cache(3)
    cache.keys[0].fill_(float("nan"))
    assert cache.release() == 3 * 2 * BLOCK * 8
    assert cache.release() == 0
    assert cache.allocate() == 3 * 2 * BLOCK * 8
    assert cache.keys[0].abs().sum() == 0
    assert cache.allocate() == 0


def test_damaged_blocks_are_cleaned() -> None:
    """What a failed request computed is neither known nor there any more."""
    cache = make_cache(3)
    block = cache.take()
    cache.keys[0][block.index] = float("nan")
    cache.publish(block, b"key")
    cache.publish_end(block, b"end", torch.zeros(1))
    cache.refer(block)
    cache.keys[0][block.index] = 1.0
    cache.clean([block])  # another sequence reads it still
    assert cache.keys[0][block.index].eq(1).all()
    cache.drop([block])
    cache.keys[0][block.index] = float("nan")
    cache.clean([block])
    assert cache.find([b"key"]) == []
    assert cache.find_end(b"end") is None
    assert cache.keys[0].isfinite().all()
