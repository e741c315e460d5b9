"""The native engine: admit, run one decode step, finish. It shares the policy's own weights.

A step takes waiting requests into free slots (equal prompts are prefilled once), then samples one token for every
running request. When a request finishes, the last slot moves into its place, so the batch shrinks at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import models
from core_trainer.attention import PrefillLayout
from core_trainer.batching import prompt_layout
from core_trainer.rollout.engine import Chunk, GenerateRequest, WeightSync
from core_trainer.rollout.native.kv_cache import KVCache
from core_trainer.rollout.native.packed_linear import PackedLinears
from core_trainer.rollout.native.sampler import sample
from core_trainer.types import FinishReason, Turn
from rlinsight import names, telemetry
from rlinsight.errors import RlinsightError

PREFILL_TOKENS = 4096  # prompt tokens computed in one pass, counted as attention pads them
STOP_WINDOW = 16  # tokens looked at, besides the stop string's own length, when searching for it


@dataclass(slots=True)
class Sequence:
    """A request while the engine works on it."""

    request: GenerateRequest
    future: asyncio.Future[Turn]
    uniform: np.ndarray  # [max_new_tokens] float64, all its random numbers
    start_ns: int
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    chunks: asyncio.Queue[Chunk] | None = None  # where a streaming caller reads

    @property
    def position(self) -> int:
        """Where the next token's keys and values go: after the prompt and all but the last sampled token."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1


class NativeEngine:
    """Rollout engine over a model in this process. Not thread safe: one event loop drives it."""

    name = "native"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        max_batch_size: int,
        merge_adapters: bool = True,
        replica: str = "policy/0",
    ) -> None:
        """``merge_adapters``: see PackedLinears; without adapters in the model it changes nothing."""
        self.model, self.tokenizer, self.replica = model, tokenizer, replica
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_batch_size = max_batch_size
        self.max_length = getattr(model.config, "max_position_embeddings", None)
        self.policy_version = 0
        head = model.get_output_embeddings()
        assert head is not None, "a causal model has an output layer"
        self._head = head
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # running[i] owns cache slot i
        self._cache = KVCache(model.config, model.dtype, model.device)
        self._packed = PackedLinears(model, merge_adapters)
        self._live: dict[str, Sequence] = {}  # by request id, until answered
        self._driver: asyncio.Task[None] | None = None

    def sync_weights(self, policy_version: int) -> list[WeightSync]:
        """Serve the model's current weights: nothing moves, packed and merged copies are rewritten."""
        self.policy_version = policy_version
        return [WeightSync(self.replica, 0, self._packed.refresh())]

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. Raises RlinsightError if it cannot fit the model's context."""
        return await self._submit(request, None).future

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The same, token by token. Leaving the iteration early aborts the request."""
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        sequence = self._submit(request, chunks)
        sequence.future.add_done_callback(lambda _: chunks.put_nowait(Chunk([], [])))  # wakes the reader
        try:
            while not (sequence.future.done() and chunks.qsize() <= 1):
                yield await chunks.get()
            yield Chunk([], [], sequence.future.result())
        finally:
            self.abort(request.request_id)

    def sleep(self) -> int:
        """Nothing to give back: the cache is small beside training's activations, and the weights are the policy's."""
        return 0

    def wake(self) -> int:
        """Nothing was given back."""
        return 0

    def close(self) -> None:
        """The engine holds nothing outside its Python objects."""

    def _submit(self, request: GenerateRequest, chunks: asyncio.Queue[Chunk] | None) -> Sequence:
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if self.max_length is not None and prompt + new > self.max_length:
            raise RlinsightError(
                f"a prompt of {prompt} tokens and max_new_tokens={new} exceed its context of {self.max_length}; "
                "lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        uniform = np.random.Generator(np.random.Philox(request.params.seed)).random(request.params.max_new_tokens)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        sequence = self._live[request.request_id] = Sequence(request, future, uniform, time.time_ns())
        sequence.chunks = chunks
        self.waiting.append(sequence)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return sequence

    def abort(self, request_id: str) -> None:
        """Finish a request with what it has, at the next step."""
        if request_id in self._live:
            self._live[request_id].finish_reason = "abort"

    async def _drive(self) -> None:
        """Step until nothing is left; requests that arrive meanwhile join the batch."""
        await asyncio.sleep(0)  # let all requests of this turn of the event loop arrive before the first prefill
        try:
            with torch.inference_mode(), self._packed.active():
                while self.waiting or self.running:
                    self._admit()
                    with telemetry.span(names.DECODE, {names.BUCKET: "productive"}) as span:
                        span.set({names.NUM_TOKENS: await self._decode()})
        except BaseException as error:  # whoever waits for a request would wait for ever; they raise it
            for sequence in self._live.values():
                if not sequence.future.done():
                    sequence.future.set_exception(error)
            for collection in (self._live, self.waiting, self.running):
                collection.clear()
            if not isinstance(error, Exception):
                raise

    async def _decode(self) -> int:
        """Decode until a slot is free for a waiting request or nothing runs; returns the tokens sampled."""
        sampled = 0
        while self.running and not (self.waiting and len(self.running) < self.max_batch_size):
            sampled += len(self.running)
            self._step()
            self._finish()
            await asyncio.sleep(0)
        return sampled

    def _admit(self) -> None:
        """Move waiting requests into free slots; prompts that are equal are computed once."""
        admitted = []
        while self.waiting and len(self.running) + len(admitted) < self.max_batch_size:
            admitted.append(self.waiting.popleft())
        by_prompt: dict[tuple[int, ...], list[Sequence]] = {}
        for sequence in admitted:
            by_prompt.setdefault(sequence.request.prompt_token_ids, []).append(sequence)
        batch: list[tuple[int, ...]] = []
        for prompt in sorted(by_prompt, key=len):
            if batch and (len(batch) + 1) * max(len(prompt), *map(len, batch)) > PREFILL_TOKENS:
                self._prefill(batch, by_prompt)
                batch = []
            batch.append(prompt)
        if batch:
            self._prefill(batch, by_prompt)
        self._finish()

    def _prefill(self, prompts: list[tuple[int, ...]], by_prompt: dict[tuple[int, ...], list[Sequence]]) -> None:
        """Compute prompts, fill a slot for every request that has one, and sample each request's first token."""
        lengths = [len(prompt) for prompt in prompts]
        with telemetry.span(names.PREFILL, {names.NUM_TOKENS: sum(lengths), names.BUCKET: "productive"}):
            layout = PrefillLayout(prompt_layout(lengths, self.model.device))
            tokens = [token for prompt in prompts for token in prompt]
            positions = [position for length in lengths for position in range(length)]
            hidden = self._forward(tokens, positions, layout)
            ends = np.cumsum(lengths)
            joined: list[Sequence] = []
            for prompt, end in zip(prompts, ends, strict=True):
                sequences = by_prompt[prompt]
                first = len(self.running) + len(joined)
                longest = len(prompt) + max(s.request.params.max_new_tokens for s in sequences)
                self._cache.reserve(first + len(sequences), longest)
                part = slice(int(end) - len(prompt), int(end))
                self._cache.write_prompt(
                    list(range(first, first + len(sequences))),
                    [key[:, part] for key in layout.keys],
                    [value[:, part] for value in layout.values],
                )
                for sequence in sequences[1:]:
                    sequence.num_cached_tokens = len(prompt)
                joined += sequences
            repeats = torch.tensor([len(by_prompt[prompt]) for prompt in prompts])
            self._sample(joined, hidden[torch.repeat_interleave(torch.from_numpy(ends - 1), repeats)])
            self.running += joined

    def _step(self) -> None:
        """One token for every running request."""
        positions = [sequence.position for sequence in self.running]
        self._cache.begin_step(torch.tensor(positions, device=self.model.device))
        hidden = self._forward([sequence.token_ids[-1] for sequence in self.running], positions, self._cache)
        self._sample(self.running, hidden)

    def _forward(self, tokens: list[int], positions: list[int], layout: object) -> Tensor:
        """Hidden states [N, d] of packed tokens."""
        device = self.model.device
        return self.model.get_decoder()(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]

    def _sample(self, sequences: list[Sequence], hidden: Tensor) -> None:
        """Append one token to each sequence from its last hidden state, [len(sequences), d]."""
        logits = self._head(hidden)
        device, params = logits.device, [sequence.request.params for sequence in sequences]
        top_k = top_p = None
        if any(p.top_k for p in params):
            top_k = torch.tensor([p.top_k or logits.shape[1] for p in params], device=device)
        if any(p.top_p < 1 for p in params):
            top_p = torch.tensor([p.top_p for p in params], device=device)
        tokens, log_probs = sample(
            logits,
            torch.tensor([p.temperature for p in params], device=device),
            torch.tensor([s.uniform[len(s.token_ids)] for s in sequences], dtype=torch.float64, device=device),
            top_k,
            top_p,
        )
        for sequence, token, log_prob in zip(sequences, tokens.tolist(), log_probs.tolist(), strict=True):
            sequence.token_ids.append(token)
            sequence.log_probs.append(log_prob)
            if sequence.chunks is not None:
                sequence.chunks.put_nowait(Chunk([token], [log_prob]))
            sequence.finish_reason = sequence.finish_reason or self._finish_reason(sequence)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        if sequence.token_ids[-1] in self.stop_token_ids:
            return "stop"
        for stop in sequence.request.params.stop:
            if stop in self.tokenizer.decode(sequence.token_ids[-(len(stop) + STOP_WINDOW) :]):
                return "stop"
        return "length" if len(sequence.token_ids) == sequence.request.params.max_new_tokens else None

    def _finish(self) -> None:
        """Answer finished requests and close the gaps they leave in the batch."""
        for slot in reversed(range(len(self.running))):
            sequence = self.running[slot]
            if sequence.finish_reason is None:
                continue
            last = self.running.pop()
            if last is not sequence:
                self._cache.move(len(self.running), slot, last.position)
                self.running[slot] = last
            self._answer(sequence)

    def _answer(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id]
        if sequence.future.done():  # the caller went away
            return
        assert sequence.finish_reason is not None
        sequence.future.set_result(
            Turn(
                request_id=sequence.request.request_id,
                prompt_token_ids=sequence.request.prompt_token_ids,
                token_ids=sequence.token_ids,
                rollout_log_probs=sequence.log_probs,
                text=models.decode(self.tokenizer, sequence.token_ids),
                finish_reason=sequence.finish_reason,
                policy_version=self.policy_version,
                num_cached_tokens=sequence.num_cached_tokens,
                start_ns=sequence.start_ns,
                end_ns=time.time_ns(),
                replica=self.replica,
            )
        )
