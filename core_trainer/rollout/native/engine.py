"""The native engine: continuous batching in this process, on the model's own weights.

A pass computes what the scheduler says (prompts in chunks, or one token for everyone who runs) and samples for each
sequence that has all of its tokens computed. ``n`` answers to a prompt are n requests: the prompt is computed once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import models
from core_trainer.rollout import checksum, serving
from core_trainer.rollout.engine import Chunk, GenerateRequest, WeightSync
from core_trainer.rollout.native.attention import PagedDecode, PagedPrefill
from core_trainer.rollout.native.kv_cache import KVCache, blocks_for
from core_trainer.rollout.native.packed_linear import PackedLinears
from core_trainer.rollout.native.sampler import Options, sample
from core_trainer.rollout.native.scheduler import Batch, Scheduler
from core_trainer.rollout.native.sequence import Sequence
from core_trainer.rollout.serving import SAMPLE_INTERVAL_S, EngineState
from core_trainer.types import FinishReason, Turn
from rlinsight import names, telemetry
from rlinsight.config import NativeSection
from rlinsight.errors import EngineError, NonFiniteLogProbs, RequestRefused

STOP_WINDOW = 16  # tokens looked at, besides the stop string's own length, when searching for it


class NativeEngine:
    """Rollout engine over a model in this process. Not thread safe: one event loop drives it.

    ``prefill_layout`` and ``decode_layout`` are the attention of its passes, over the blocks of ``cache``.
    """

    name = "native"
    prefill_layout = PagedPrefill
    decode_layout = PagedDecode

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        max_batch_size: int,
        merge_adapters: bool = True,
        replica: str = "policy/0",
        section: NativeSection | None = None,
    ) -> None:
        """``merge_adapters``: see PackedLinears; without adapters in the model it changes nothing."""
        section = section or NativeSection()
        self.model, self.tokenizer, self.replica = model, tokenizer, replica
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_length = getattr(model.config, "max_position_embeddings", None)
        self.policy_version = 0
        head = model.get_output_embeddings()
        assert head is not None, "a causal model has an output layer"
        self._head = head
        self.cache = KVCache(model.config, model.dtype, model.device, int(section.kv_cache_gib * 2**30))
        self.scheduler = Scheduler(self.cache, max_batch_size, section.prefill_tokens)
        self._packed = PackedLinears(model, merge_adapters)
        self._live: dict[str, Sequence] = {}  # by request id, until answered
        self._driver: asyncio.Task[None] | None = None
        self._awake = True
        self._sampled_at = 0.0  # when the state was recorded last
        self._prompt_tokens = self._generation_tokens = 0

    def sync_weights(self, policy_version: int) -> list[WeightSync]:
        """Serve the model's current weights: nothing moves, packed and merged copies are rewritten.

        Nothing computed before is reused. Requests in flight go on, on the keys and values they have (arXiv
        2509.19128), and say which weights sampled each token.
        """
        self.policy_version = policy_version
        self.forget()
        in_flight = len(self._live)
        refreshed = self._packed.refresh()
        mode = "keep" if in_flight else "wait"
        served = checksum.of(self._packed.served())
        return [WeightSync(self.replica, 0, refreshed, mode, in_flight, checksum_served=served)]

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. Raises EngineError if it cannot fit, or fails while it is sampled."""
        sequence = self._submit(request, None)
        try:
            return await sequence.future
        finally:
            self._abandon(sequence)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The same, token by token. Leaving the iteration early aborts the request."""
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        sequence = self._submit(request, chunks)
        sequence.future.add_done_callback(lambda _: chunks.put_nowait(Chunk([], [])))
        try:
            while (chunk := await chunks.get()).token_ids:
                yield chunk
            yield Chunk([], [], sequence.future.result())
        finally:
            self._abandon(sequence)

    def abort(self, request_id: str) -> None:
        """Answer a request with what it has."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    def forget(self) -> None:
        """Drop the prefixes of earlier requests; those that are running keep theirs."""
        self.cache.forget()

    def sleep(self) -> int:
        """Give the cache's memory back; returns bytes freed. On a CPU it stays, as the system gave only what was used.

        Raises EngineError while requests are running.
        """
        if self._live:
            raise EngineError(f"the engine cannot sleep while {len(self._live)} requests are being sampled")
        self._awake = self.model.device.type == "cpu"
        return 0 if self._awake else self.cache.release()

    def wake(self) -> int:
        """Take it again; returns bytes taken."""
        self._awake = True
        return self.cache.allocate()

    def close(self) -> None:
        """Abort what is running and give the cache back."""
        for request_id in list(self._live):
            self.abort(request_id)
        self.cache.release()
        self._awake = False

    def _abandon(self, sequence: Sequence) -> None:
        """Stop what nobody waits for any more; nothing when it was answered. Who went away records it."""
        if self._live.get(sequence.request.request_id) is sequence:
            self._remove(sequence)

    def _submit(self, request: GenerateRequest, chunks: asyncio.Queue[Chunk] | None) -> Sequence:
        """Queue a request. Raises EngineError naming it when it cannot be served, RequestRefused if it is at fault."""
        self._check(request)
        uniform = np.random.Generator(np.random.Philox(request.params.seed)).random(request.params.max_new_tokens)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        sequence = Sequence(request, future, chunks, uniform, list(request.prompt_token_ids), time.time_ns())
        self._live[request.request_id] = sequence
        self.scheduler.add(sequence)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return sequence

    def _check(self, request: GenerateRequest) -> None:
        name, prompt, new = request.request_id, len(request.prompt_token_ids), request.params.max_new_tokens
        if not self._awake:
            raise EngineError(f"request {name} came while the engine was asleep; wake it first")
        if name in self._live:
            raise EngineError(f"request {name} is being sampled already; give each request an id of its own")
        if prompt == 0 or new < 1:
            raise RequestRefused(f"request {name} has {prompt} prompt tokens and max_new_tokens={new}; 1 is the least")
        if self.max_length is not None and prompt + new > self.max_length:
            raise RequestRefused(
                f"request {name}: a prompt of {prompt} tokens and max_new_tokens={new} exceed the model's context of "
                f"{self.max_length}; lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        needed = blocks_for(prompt + new)
        if needed > self.cache.num_blocks:
            raise RequestRefused(
                f"request {name}: a prompt of {prompt} tokens and max_new_tokens={new} need "
                f"{needed * self.cache.block_bytes / 2**30:.3g} GiB of KV cache, more than all of it; raise "
                "rollout.native.kv_cache_gib or lower rollout.max_new_tokens"
            )
        words = self._head.weight.shape[0]  # type: ignore[union-attr]
        beyond = [token for token in (*request.prompt_token_ids, *request.params.logit_bias) if not 0 <= token < words]
        if beyond:
            raise RequestRefused(f"request {name} has token id {beyond[0]}; the model has {words} words")

    async def _drive(self) -> None:
        """Compute until nothing is left; requests that arrive meanwhile join the batch."""
        await asyncio.sleep(0)  # let all requests of this turn of the event loop arrive before the first pass
        try:
            self._record_state()
            batch = self.scheduler.schedule()
            while batch is not None:
                prefill, num_tokens = batch.prefill, 0
                name = names.PREFILL if prefill else names.DECODE
                with telemetry.span(name, {names.BUCKET: "productive"}) as span:
                    while batch is not None and batch.prefill is prefill:
                        num_tokens += sum(batch.counts)
                        self._compute(batch)
                        if time.perf_counter() - self._sampled_at > SAMPLE_INTERVAL_S:
                            self._record_state()
                        await asyncio.sleep(0)
                        batch = self.scheduler.schedule()
                    span.set({names.NUM_TOKENS: num_tokens})
            self._record_state()
        except BaseException as error:  # whoever waits for a request would wait for ever
            sequences, self._live = list(self._live.values()), {}
            self.scheduler.clear()
            for sequence in sequences:
                self._tell(sequence, error)
            if not isinstance(error, Exception):
                raise

    def _compute(self, batch: Batch) -> None:
        """One pass over a batch; sequences whose tokens are all computed get their next one."""
        with torch.inference_mode(), self._packed.active():
            if any(batch.counts):
                hidden, rows = self._forward(batch), (np.cumsum(batch.counts) - 1).tolist()
            else:
                hidden, rows = torch.stack([s.hidden for s in batch.sequences if s.hidden is not None]), None
            done = list[int]()
            for i, (sequence, count) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
                row = rows[i] if rows else i
                sequence.num_computed += count
                sequence.hidden = None
                self.scheduler.publish(sequence, count)
                if count and sequence.num_computed == sequence.num_prompt:
                    self.scheduler.publish_end(sequence, hidden[row])
                if sequence.remaining == 0:
                    done.append(i)
            if batch.prefill:
                self._prompt_tokens += sum(batch.counts)
            if done:
                last = hidden[[rows[i] for i in done]] if rows else hidden
                self._sample([batch.sequences[i] for i in done], last)

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states [N, d] of the batch's next tokens, one sequence after the other."""
        columns = zip(batch.sequences, batch.counts, strict=True)
        spans = [(s, s.num_computed, s.num_computed + count) for s, count in columns]
        tokens = [token for s, start, end in spans for token in s.tokens[start:end]]
        positions = [position for _, start, end in spans for position in range(start, end)]
        layout = (self.prefill_layout if batch.prefill else self.decode_layout)(self.cache, spans)
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
        params = [s.request.params for s in sequences]
        uniform = torch.tensor([s.uniform[s.num_sampled] for s in sequences], dtype=torch.float64, device=logits.device)
        options = Options.of(params, [s.tokens for s in sequences], logits.device)
        sampled = sample(logits, uniform, options, [p.num_top_log_probs for p in params])
        finite = torch.isfinite(sampled.log_probs).tolist()
        now = time.perf_counter()
        columns = zip(sequences, sampled.tokens.tolist(), sampled.log_probs.tolist(), sampled.top, finite, strict=True)
        for sequence, token, log_prob, top, good in columns:
            if not good:
                self._fail_damaged(sequence)
                continue
            sequence.append(token, log_prob, top, self.policy_version, now)
            self._generation_tokens += 1
            if sequence.chunks is not None:
                sequence.chunks.put_nowait(Chunk([token], [log_prob]))
            reason = self._finish_reason(sequence)
            if reason is not None:
                self._finish(sequence, reason)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        params = sequence.request.params
        if sequence.tokens[-1] in self.stop_token_ids:
            return "stop"
        if params.stop:
            window = min(sequence.num_sampled, max(map(len, params.stop)) + STOP_WINDOW)
            text = self.tokenizer.decode(sequence.tokens[-window:])
            if any(stop in text for stop in params.stop):
                return "stop"
        return "length" if sequence.num_sampled == params.max_new_tokens else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Answer a request, unless its caller went away."""
        self._remove(sequence)
        if not sequence.future.done():
            turn = self._turn(sequence, reason)
            serving.record_request(sequence.request, turn, sequence.served(), self.name)
            sequence.future.set_result(turn)

    def _tell(self, sequence: Sequence, error: BaseException) -> None:
        """Give a request's caller an error that names the request; it is the caller who records it."""
        if sequence.future.done():
            return
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            told = EngineError(f"request {sequence.request.request_id} failed: {models.one_line(error)}")
            told.__cause__ = error
            error = told
        sequence.future.set_exception(error)

    def _fail_damaged(self, sequence: Sequence) -> None:
        """Fail a request whose logits are not finite, and let nobody have what it computed."""
        self.cache.clean(sequence.blocks)
        self._remove(sequence)
        dtype = str(self.model.dtype).removeprefix("torch.")
        self._tell(
            sequence,
            NonFiniteLogProbs(
                f"request {sequence.request.request_id}: the logits after {sequence.num_sampled} sampled tokens are "
                f"not finite at policy_version {self.policy_version}; the weights are damaged, or overflow in {dtype}: "
                "resume from an older checkpoint"
            ),
        )

    def _remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine."""
        del self._live[sequence.request.request_id]
        self.scheduler.remove(sequence)

    def _turn(self, sequence: Sequence, reason: FinishReason) -> Turn:
        """What a sequence has."""
        versions = sequence.versions
        return Turn(
            request_id=sequence.request.request_id,
            prompt_token_ids=sequence.request.prompt_token_ids,
            token_ids=sequence.tokens[sequence.num_prompt :],
            rollout_log_probs=sequence.log_probs,
            text=models.decode(self.tokenizer, sequence.tokens[sequence.num_prompt :]),
            finish_reason=reason,
            policy_version=versions[0] if versions else self.policy_version,
            num_cached_tokens=sequence.num_cached_tokens,
            start_ns=sequence.start_ns,
            end_ns=time.time_ns(),
            replica=self.replica,
            token_policy_versions=versions if len(set(versions)) > 1 else None,
            top_log_probs=sequence.top_log_probs if sequence.request.params.num_top_log_probs else None,
        )

    def _record_state(self) -> None:
        """A sample of what the engine is doing."""
        self._sampled_at = time.perf_counter()
        scheduler = self.scheduler
        state = EngineState(
            running=len(scheduler.running),
            waiting_capacity=len(scheduler.waiting) - scheduler.num_deferred,
            waiting_deferred=scheduler.num_deferred,
            kv_usage=self.cache.usage,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=scheduler.num_preemptions,
            awake=self._awake,
        )
        serving.record_state(self.name, self.replica, state)
