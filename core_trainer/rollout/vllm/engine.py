"""The vLLM engine: vLLM's scheduler and kernels in the policy worker's own process, on a copy of the policy's weights.

Owns vLLM's start-up, the loop that steps it on the caller's event loop, and its weight sync. vLLM's prefix cache
computes a group's prompt once. Whether vLLM is installed is checked before a run starts.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import lora, models
from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode, WeightSync
from core_trainer.rollout.serving import Served, record_request
from core_trainer.rollout.vllm.options import ENVIRONMENT, check_platform, engine_arguments
from core_trainer.rollout.vllm.stats import Iterations
from core_trainer.types import FinishReason, Turn
from rlinsight import names, telemetry
from rlinsight.config import VllmSection
from rlinsight.errors import EngineError, NonFiniteLogProbs, RequestRefused

os.environ |= ENVIRONMENT | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core in this process, stepped by us
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}

# pyright: reportMissingImports=false
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(slots=True)
class Sequence:
    """A request while the engine works on it."""

    request: GenerateRequest
    streamed: bool
    start_ns: int
    chunks: asyncio.Queue[Chunk | EngineError] = field(
        default_factory=asyncio.Queue
    )  # to the caller; the last is whole
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the tokens sampled before the last sync it went through


class VllmEngine:
    """Rollout engine over vLLM's LLMEngine. Not thread safe: one event loop drives it."""

    name = "vllm"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        model_dir: Path,
        stop_token_ids: tuple[int, ...],
        max_batch_size: int,
        max_length: int,
        section: VllmSection,
        replica: str = "policy/0",
    ) -> None:
        """``max_length`` tokens of prompt and response are served, which the model's context must hold.

        Raises EngineError when vLLM cannot start, or for options this machine has no use for.
        """
        check_platform(section)
        self.model, self.tokenizer, self.replica = model, tokenizer, replica
        self.stop_token_ids = list(stop_token_ids)
        self.max_length = max_length
        self.sleep_level = section.sleep_level
        self.policy_version = 0
        self._weights_lost = False  # sleep level 2 drops them; true until the next sync
        self._live: dict[str, Sequence] = {}  # by request id, until answered
        self._driver: asyncio.Task[None] | None = None
        arguments = {
            "model": str(model_dir),
            **engine_arguments(section, str(model.dtype).removeprefix("torch."), max_batch_size, max_length),
            "distributed_executor_backend": "uni",
            "use_tqdm_on_load": False,
        }
        try:
            self._engine = self._start(arguments)
        except Exception as error:  # vLLM raises whatever its parts raise; kept as the cause
            raise EngineError(
                f"vLLM cannot start on {model_dir} with rollout.vllm.kv_cache_gib={section.kv_cache_gib:g}: "
                f"{models.one_line(error)}"
            ) from error
        self._engine.logger_manager = Iterations(self.name, replica)  # in place of a log line and Prometheus

    def sync_weights(self, policy_version: int, pause_mode: PauseMode = "wait") -> list[WeightSync]:
        """Copy the policy's weights, adapters merged, into vLLM and forget what the old ones computed.

        ``pause_mode`` says what becomes of requests in flight: ``wait`` samples them to their end first, ``abort`` ends
        them, ``keep`` keeps their tokens and goes on under the new weights, from keys and values computed anew; their
        turns tell each token's version. Raises EngineError if vLLM does not take the weights.
        """
        in_flight = list(self._live.values())
        if pause_mode == "wait":
            self._finish_all()
        elif pause_mode == "abort":
            for sequence in in_flight:
                self.abort(sequence.request.request_id)
        for sequence in self._live.values():
            sequence.versions = self._versions(sequence)
        weights = lora.merged_state(self.model)
        try:
            if self._weights_lost:
                self._engine.wake_up(["weights"])  # untested
            (served,) = self._engine.collective_rpc("rlinsight_load", args=(weights,))
        except Exception as error:  # likewise
            raise EngineError(
                f"vLLM does not take the weights of this {self.model.config.model_type} model: "
                f"{models.one_line(error)}; use rollout.engine: native"
            ) from error
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept keys and values of the old weights; this is a bug of the engine's caller")
        self.policy_version, self._weights_lost = policy_version, False
        moved = sum(weight.nbytes for weight in weights.values())
        aborted = len(in_flight) if pause_mode == "abort" else 0
        return [WeightSync(self.replica, moved, 0, pause_mode, len(in_flight), aborted, served)]

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. Raises EngineError, RequestRefused when it does not fit or vLLM does not take it."""
        sequence = self._add(request, streamed=False)
        try:
            turn = (await _next(sequence)).turn
        finally:
            self._abandon(sequence)
        assert turn is not None, "nothing but the last chunk comes of a request that is not streamed"
        return turn

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The same, as tokens come. Leaving the iteration early aborts the request."""
        sequence = self._add(request, streamed=True)
        try:
            while True:
                chunk = await _next(sequence)
                yield chunk
                if chunk.turn is not None:
                    return
        finally:
            self._abandon(sequence)

    def abort(self, request_id: str) -> None:
        """Finish a request with what it has."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._engine.abort_request([request_id])
            self._answer(sequence, "abort", Served(e2e_s=(time.time_ns() - sequence.start_ns) / 1e9))

    def forget(self) -> None:
        """Drop the prefixes of earlier requests. Raises EngineError while requests are running."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept keys and values of earlier requests: some are running")

    def sleep(self) -> int:
        """Give device memory back, as ``rollout.vllm.sleep_level`` says: bytes freed. Untested: vLLM has it on GPUs."""
        if self.sleep_level is None:
            return 0
        free = torch.cuda.mem_get_info()[0]
        self._engine.sleep(self.sleep_level)
        self._weights_lost = self.sleep_level == 2
        return torch.cuda.mem_get_info()[0] - free

    def wake(self) -> int:
        """Take it again: bytes taken. Untested, likewise. After level 2 weights are missing until the next sync."""
        if self.sleep_level is None:
            return 0
        free = torch.cuda.mem_get_info()[0]
        self._engine.wake_up()
        return free - torch.cuda.mem_get_info()[0]

    def close(self) -> None:
        """End vLLM in this process and give its memory back; other engines of the process end with it."""
        self._engine.engine_core.shutdown()

    def _start(self, arguments: dict[str, Any]) -> Any:
        """A vLLM engine that leaves the process's threads to the trainer."""
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray sets 1, which vLLM would take as its share of the cores
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        finally:
            torch.set_num_threads = set_num_threads  # on CPU vLLM replaces it by a warning
            set_num_threads(threads)
        engine.collective_rpc("rlinsight_start")
        return engine

    def _abandon(self, sequence: Sequence) -> None:
        """Stop what nobody waits for any more; nothing when it was answered. Who went away records it."""
        request_id = sequence.request.request_id
        if self._live.get(request_id) is sequence:
            del self._live[request_id]
            self._engine.abort_request([request_id])

    def _add(self, request: GenerateRequest, streamed: bool) -> Sequence:
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if prompt + new > self.max_length:
            raise RequestRefused(
                f"a prompt of {prompt} tokens and max_new_tokens={new} exceed its context of {self.max_length}; "
                "lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        if self._weights_lost:
            raise EngineError("vLLM's weights were dropped by sleep_level 2 and not synced since")
        sequence = Sequence(request, streamed, time.time_ns())
        try:
            self._engine.add_request(
                request.request_id,
                tokens_input(list(request.prompt_token_ids)),
                sampling_params(request, self.stop_token_ids),
            )
        except Exception as error:  # likewise
            raise RequestRefused(f"vLLM refused request {request.request_id}: {models.one_line(error)}") from error
        self._live[request.request_id] = sequence
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return sequence

    async def _drive(self) -> None:
        """Step until nothing is left; requests that arrive meanwhile join the batch."""
        await asyncio.sleep(0)  # let all requests of this turn of the event loop arrive before the first step
        try:
            with telemetry.span(names.DECODE, {names.BUCKET: "productive"}) as span:
                sampled = 0
                while self._live:
                    sampled += self._step()
                    await asyncio.sleep(0)
                span.set({names.NUM_TOKENS: sampled})
        except BaseException as error:  # whoever waits for a request would wait for ever; they raise it
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _finish_all(self) -> None:
        try:
            while self._live:
                self._step()
        except Exception as error:  # likewise
            self._fail(error)
            raise EngineError(f"vLLM failed on requests it should finish: {models.one_line(error)}") from error

    def _step(self) -> int:
        """One step of vLLM: prompts and decodes as its scheduler mixes them; returns the tokens sampled."""
        sampled = 0
        for output in self._engine.step():
            sequence, completion = self._live[output.request_id], output.outputs[0]
            tokens = completion.token_ids
            log_probs = _take(sequence, completion.logprobs)
            sampled += len(tokens)
            sequence.token_ids += tokens
            sequence.log_probs += log_probs
            sequence.num_cached_tokens = output.num_cached_tokens
            if not all(map(math.isfinite, log_probs)):
                self._fail_damaged(sequence)
            elif output.finished:
                self._answer(sequence, completion.finish_reason, _served(output.metrics), tokens, log_probs)
            elif sequence.streamed:
                sequence.chunks.put_nowait(Chunk(tokens, log_probs))
        return sampled

    def _fail(self, error: BaseException) -> None:
        """Give every caller the error with its own request's name, and vLLM a clean start."""
        live, self._live = self._live, {}
        for request_id, sequence in live.items():
            told = EngineError(f"vLLM failed while sampling request {request_id}: {models.one_line(error)}")
            told.__cause__ = error
            sequence.chunks.put_nowait(told)
        self._engine.abort_request(list(live))

    def _fail_damaged(self, sequence: Sequence) -> None:
        """Fail a request whose log-probs are not finite. Its caller records it."""
        self._abandon(sequence)
        dtype = str(self.model.dtype).removeprefix("torch.")
        sequence.chunks.put_nowait(
            NonFiniteLogProbs(
                f"request {sequence.request.request_id}: of {len(sequence.token_ids)} sampled tokens not all log-probs "
                f"are finite at policy_version {self.policy_version}; the weights are damaged, or overflow in {dtype}: "
                "resume from an older checkpoint"
            )
        )

    def _versions(self, sequence: Sequence) -> list[int]:
        """The weights that sampled each token so far."""
        return sequence.versions + [self.policy_version] * (len(sequence.token_ids) - len(sequence.versions))

    def _answer(
        self,
        sequence: Sequence,
        finish_reason: FinishReason,
        served: Served,
        token_ids: list[int] | None = None,
        log_probs: list[float] | None = None,
    ) -> None:
        """Give the caller its turn, with the tokens of the last step, and record how it went."""
        request = sequence.request
        del self._live[request.request_id]
        versions = self._versions(sequence) if sequence.versions else None
        turn = Turn(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=sequence.token_ids,
            rollout_log_probs=sequence.log_probs,
            text=models.decode(self.tokenizer, sequence.token_ids),
            finish_reason=finish_reason,
            policy_version=versions[0] if versions else self.policy_version,
            num_cached_tokens=sequence.num_cached_tokens,
            start_ns=sequence.start_ns,
            end_ns=time.time_ns(),
            replica=self.replica,
            token_policy_versions=versions,
            top_log_probs=sequence.top_log_probs if request.params.num_top_log_probs else None,
        )
        record_request(request, turn, served, self.name)
        sequence.chunks.put_nowait(Chunk(token_ids or [], log_probs or [], turn))


def sampling_params(request: GenerateRequest, stop_token_ids: list[int]) -> Any:
    """A request's parameters in vLLM's words."""
    params = request.params
    return SamplingParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or 0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        seed=params.seed,
        stop=list(params.stop),
        stop_token_ids=stop_token_ids,
        ignore_eos=True,  # stop_token_ids holds every end-of-turn token
        detokenize=bool(params.stop),
        skip_special_tokens=False,
        logprobs=params.num_top_log_probs,  # beside the sampled token's
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


async def _next(sequence: Sequence) -> Chunk:
    found = await sequence.chunks.get()
    if isinstance(found, EngineError):
        raise found
    return found


def _take(sequence: Sequence, values: Any) -> list[float]:
    """Log-probs of the sampled tokens out of vLLM's flat ones, where the likeliest tokens follow each; those go to the
    sequence.
    """
    count = sequence.request.params.num_top_log_probs
    if count:
        pairs = list(zip(values.token_ids, values.logprobs, strict=True))
        sequence.top_log_probs += [pairs[start + 1 : start + 1 + count] for start in values.start_indices]
    return [values.logprobs[start] for start in values.start_indices]


def _served(stats: Any) -> Served:
    """vLLM's RequestStateStats: times of its core's clock, but for the arrival, which is of the wall's."""
    return Served(
        queue_s=stats.scheduled_ts - stats.queued_ts,
        prefill_s=stats.first_token_ts - stats.scheduled_ts,
        decode_s=stats.last_token_ts - stats.first_token_ts,
        ttft_s=stats.first_token_latency,
        e2e_s=stats.first_token_latency + stats.last_token_ts - stats.first_token_ts,
        num_preemptions=stats.num_preemptions,
    )
