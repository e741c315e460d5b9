"""The vLLM engine: vLLM's scheduler and kernels in the policy worker's own process, on a copy of the policy's weights.

Owns vLLM's start-up, the loop that steps it on the caller's event loop, and its weight sync. vLLM's prefix cache
computes a group's prompt once. Whether vLLM is installed is checked before a run starts.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import lora, models
from core_trainer.rollout.engine import GenerateRequest, WeightSync
from core_trainer.types import FinishReason, Turn
from rlinsight import names, telemetry
from rlinsight.config import VllmSection
from rlinsight.errors import RlinsightError

os.environ |= {  # read while vLLM is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core in this process, stepped by us
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler can be replaced
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}

# pyright: reportMissingImports=false
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

BLOCK_TOKENS = 32  # prefix cache granularity; smaller, or no multiple of 32, leaves vLLM's fast CPU attention
PREFILL_TOKENS = 4096  # prompt tokens computed in one step


@dataclass(slots=True)
class Sequence:
    """A request while the engine works on it."""

    request: GenerateRequest
    future: asyncio.Future[Turn]
    start_ns: int
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


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
        """``max_length`` tokens of prompt and response are served, or the model's context if that is shorter.

        Raises RlinsightError when vLLM cannot start.
        """
        self.model, self.tokenizer, self.replica = model, tokenizer, replica
        self.stop_token_ids = list(stop_token_ids)
        self.max_length = min(max_length, getattr(model.config, "max_position_embeddings", max_length))
        self.policy_version = 0
        self._live: dict[str, Sequence] = {}  # by request id, until answered
        self._driver: asyncio.Task[None] | None = None
        arguments = {
            "model": str(model_dir),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": self.max_length,
            "max_num_seqs": max_batch_size,
            "max_num_batched_tokens": max(PREFILL_TOKENS, max_batch_size),
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": int(section.kv_cache_gib * 2**30),
            "enable_prefix_caching": True,
            "enforce_eager": True,  # compiled graphs would hold on to the weights they were compiled with
            "distributed_executor_backend": "uni",
            "generation_config": "vllm",  # sampling is what the request says, not the model's defaults
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        try:
            self._engine = _start(arguments)
        except Exception as error:  # vLLM raises whatever its parts raise; kept as the cause
            raise RlinsightError(
                f"vLLM cannot start on {model_dir} with rollout.vllm.kv_cache_gib={section.kv_cache_gib:g}: "
                f"{models.one_line(error)}"
            ) from error

    def sync_weights(self, policy_version: int) -> list[WeightSync]:
        """Copy the policy's weights, adapters merged, into vLLM and forget what the old ones computed.

        Raises RlinsightError if vLLM does not take them, or while requests are running.
        """
        if self._live:
            raise RlinsightError(f"weights cannot be synced while {len(self._live)} requests are being sampled")
        weights = list(lora.merged_state(self.model).items())
        try:
            self._engine.collective_rpc(_reload, args=(weights,))
        except Exception as error:  # likewise
            raise RlinsightError(
                f"vLLM does not take the weights of this {self.model.config.model_type} model: "
                f"{models.one_line(error)}; use rollout.engine: native"
            ) from error
        if not self._engine.reset_prefix_cache():
            raise RlinsightError("vLLM kept keys and values of the old weights; this is a bug of the engine's caller")
        self.policy_version = policy_version
        return [WeightSync(self.replica, sum(weight.nbytes for _, weight in weights), 0)]

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. Raises RlinsightError if it does not fit, or when vLLM refuses it or fails on it."""
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if prompt + new > self.max_length:
            raise RlinsightError(
                f"a prompt of {prompt} tokens and max_new_tokens={new} exceed its context of {self.max_length}; "
                "lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        start_ns = time.time_ns()
        try:
            self._engine.add_request(
                request.request_id, tokens_input(list(request.prompt_token_ids)), self._sampling_params(request)
            )
        except Exception as error:  # likewise
            raise RlinsightError(f"vLLM refused request {request.request_id}: {models.one_line(error)}") from error
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._live[request.request_id] = Sequence(request, future, start_ns)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await future

    def abort(self, request_id: str) -> None:
        """Finish a request with what it has."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._engine.abort_request([request_id])
            self._answer(sequence, "abort")

    def _sampling_params(self, request: GenerateRequest) -> Any:
        params = request.params
        return SamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or 0,
            seed=params.seed,
            stop=list(params.stop),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=True,  # stop_token_ids holds every end-of-turn token
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )

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

    def _step(self) -> int:
        """One step of vLLM: prompts and decodes as its scheduler mixes them; returns the tokens sampled."""
        sampled = 0
        for output in self._engine.step():
            sequence, completion = self._live[output.request_id], output.outputs[0]
            sampled += len(completion.token_ids)
            sequence.token_ids += completion.token_ids
            sequence.log_probs += completion.logprobs.logprobs
            sequence.num_cached_tokens = output.num_cached_tokens
            if output.finished:
                self._answer(sequence, completion.finish_reason)
        return sampled

    def _fail(self, error: BaseException) -> None:
        """Give every caller the error with its own request's name, and vLLM a clean start."""
        live, self._live = self._live, {}
        for request_id, sequence in live.items():
            if sequence.future.done():
                continue
            told = error
            if isinstance(error, Exception):
                told = RlinsightError(f"vLLM failed while sampling request {request_id}: {models.one_line(error)}")
                told.__cause__ = error
            sequence.future.set_exception(told)
        self._engine.abort_request(list(live))

    def _answer(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        request = sequence.request
        del self._live[request.request_id]
        if sequence.future.done():  # the caller went away
            return
        sequence.future.set_result(
            Turn(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                token_ids=sequence.token_ids,
                rollout_log_probs=sequence.log_probs,
                text=models.decode(self.tokenizer, sequence.token_ids),
                finish_reason=finish_reason,
                policy_version=self.policy_version,
                num_cached_tokens=sequence.num_cached_tokens,
                start_ns=sequence.start_ns,
                end_ns=time.time_ns(),
                replica=self.replica,
            )
        )


def _start(arguments: dict[str, Any]) -> Any:
    """A vLLM engine that leaves the process's threads to the trainer."""
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray sets 1, which vLLM would take as its share of the cores
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    finally:
        torch.set_num_threads = set_num_threads  # on CPU vLLM replaces it by a warning
        set_num_threads(threads)
    engine.collective_rpc(_replace_sampler)
    return engine


def _replace_sampler(worker: Any) -> None:
    worker.model_runner.sampler = WholeVocabularySampler()


def _reload(worker: Any, weights: list[tuple[str, Tensor]]) -> None:
    """Rewrite vLLM's weights in place, kernel copies included."""
    worker.reload_weights(weights_iterator=iter(weights))
    for module in worker.get_model().modules():
        # An output layer tied to the embedding has a packed copy on CPU, which the reload leaves as it was: no weight
        # of the checkpoint bears its name.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class WholeVocabularySampler(Sampler):
    """vLLM's sampler, with log-probs of the whole distribution at the request's temperature, as training has them.

    vLLM itself offers log-probs before the temperature, or after top-k and top-p renormalised what they left.
    """

    def __init__(self) -> None:
        super().__init__("processed_logprobs")  # those that sample() returns
        self.topk_topp_sampler = TopKTopPSampler("raw_logprobs")  # computes none

    def sample(self, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None) -> Any:
        """logits [R, V] float32 -> tokens [R], log-probs [R, V]; greedy rows at temperature 1."""
        scaled = logits
        if sampling_metadata.temperature is not None:  # None: all rows are greedy
            scaled = self.apply_temperature(logits.clone(), sampling_metadata.temperature, all_random=False)
        log_probs = self.compute_logprobs(scaled)  # before the parent writes over the logits
        tokens, _ = super().sample(logits, sampling_metadata, "raw_logprobs")
        return tokens, log_probs

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """The sampled tokens' alone: [R, 1] each. Their ranks, which vLLM compiles a kernel for, nobody reads."""
        index = token_ids[:, None]
        return LogprobsTensors(index.int(), logprobs.gather(1, index), torch.zeros_like(token_ids))
