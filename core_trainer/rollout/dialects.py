"""What is said to a server and how its answers are read: OpenAI's completions, and SGLang's own.

Token ids go in and come out; texts are never tokenised again. Pure: bodies and answers are JSON values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.server import message
from core_trainer.types import FinishReason

_TOKEN_ID = "token_id:"
_NEVER = -9999.0  # vLLM writes this where JSON has no minus infinity
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class BadAnswer(Exception):
    """What is wrong with an answer, told of the server as "it"."""


class NotFinite(BadAnswer):
    """It has a log-prob that is no finite number."""


@dataclass(slots=True)
class Delta:
    """What one answer, or one event of a stream, adds. Counts are of the whole request and None where not told."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    num_cached_tokens: int | None = None


class Dialect(Protocol):
    """A server's way to be asked for tokens."""

    path: str
    streams: bool  # whether events carry new tokens alone, so that streaming costs no more than its tokens

    def body(self, request: GenerateRequest, model: str, stop_token_ids: Sequence[int], stream: bool) -> dict[str, Any]:
        """The JSON to post. Without stop tokens it asks for all of max_new_tokens."""
        ...

    def read(self, answer: Mapping[str, Any], num_read: int) -> Delta:
        """An answer, or an event after ``num_read`` tokens. Raises BadAnswer when it cannot be used."""
        ...


class Completions:
    """OpenAI's /v1/completions with vLLM's additions: sampling options beyond OpenAI's, and token ids in the answer.

    Other servers may write token ids as llama.cpp does, in ``logprobs.content`` (untested against one).
    """

    path = "/v1/completions"
    streams = True

    def __init__(self, fewest_log_probs: int = 0) -> None:
        """``fewest_log_probs`` 1 for servers that take 0 as none, instead of as the sampled token's alone."""
        self.fewest_log_probs = fewest_log_probs

    def body(self, request: GenerateRequest, model: str, stop_token_ids: Sequence[int], stream: bool) -> dict[str, Any]:
        params = request.params
        body = {
            "model": model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or 0,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "seed": params.seed,
            "stop": list(params.stop),
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,  # stop_token_ids holds every end-of-turn token
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": max(params.num_top_log_probs, self.fewest_log_probs),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": stream,
        }
        if params.logit_bias:
            body["logit_bias"] = _by_text(params.logit_bias)
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def read(self, answer: Mapping[str, Any], num_read: int) -> Delta:
        _raise_error(answer)
        delta = Delta()
        usage = answer.get("usage") or {}
        delta.num_prompt_tokens, delta.num_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        delta.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in answer.get("choices") or []:
            found = choice.get("logprobs") or {}
            content = found.get("content") or []
            delta.token_ids = _token_ids(choice, found, content)
            delta.log_probs = _numbers(
                found.get("token_logprobs") or [each["logprob"] for each in content], len(delta.token_ids)
            )
            delta.top_log_probs = [_top(top) for top in found.get("top_logprobs") or []]
            delta.top_log_probs += [
                _pairs((t["id"], t["logprob"]) for t in each.get("top_logprobs", [])) for each in content
            ]
            delta.finish_reason = _finish_reason(choice.get("finish_reason"))
        return delta


class SglangGenerate:
    """SGLang's /generate (untested against a server; written after its protocol).

    Seeds decide in servers started with --enable-deterministic-inference. Events repeat all tokens so far unless the
    server has --incremental-streaming-output, so whole answers are cheaper.
    """

    path = "/generate"
    streams = False

    def body(self, request: GenerateRequest, model: str, stop_token_ids: Sequence[int], stream: bool) -> dict[str, Any]:
        params = request.params
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "sampling_seed": params.seed,
            "stop": list(params.stop),
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.logit_bias:
            sampling["logit_bias"] = _by_text(params.logit_bias)
        return {
            "rid": request.request_id,
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": params.num_top_log_probs,
            "stream": stream,
        }

    def read(self, answer: Mapping[str, Any], num_read: int) -> Delta:
        _raise_error(answer)
        meta = answer.get("meta_info") or {}
        delta = Delta(num_prompt_tokens=meta.get("prompt_tokens"), num_tokens=meta.get("completion_tokens"))
        delta.num_cached_tokens = meta.get("cached_tokens")
        found = meta.get("output_token_logprobs")
        if found is None:
            raise BadAnswer("it returns no output_token_logprobs")
        # An event has all tokens so far, or only those since the last one.
        new = len(found) if delta.num_tokens is None else delta.num_tokens - num_read
        found = found[max(len(found) - new, 0) :]
        delta.token_ids = [int(token) for _, token, *_ in found]
        delta.log_probs = _numbers([log_prob for log_prob, *_ in found], len(found))
        top = meta.get("output_top_logprobs") or []
        delta.top_log_probs = [_pairs((t, x) for x, t, *_ in each or []) for each in top[max(len(top) - new, 0) :]]
        delta.finish_reason = _finish_reason((meta.get("finish_reason") or {}).get("type"))
        return delta


def _by_text(bias: Mapping[int, float]) -> dict[str, float]:
    return {str(token): value for token, value in bias.items()}


def _raise_error(answer: Mapping[str, Any]) -> None:
    """A stream tells in an event what a status code can no longer say."""
    if answer.get("error"):
        raise BadAnswer(f"it failed: {message(json.dumps(answer))}")


def _token_ids(choice: Mapping[str, Any], found: Mapping[str, Any], content: Sequence[Mapping[str, Any]]) -> list[int]:
    if choice.get("token_ids") is not None:
        return list(choice["token_ids"])
    tokens = found.get("tokens") or []
    if tokens and all(isinstance(token, str) and token.startswith(_TOKEN_ID) for token in tokens):
        return [int(token.removeprefix(_TOKEN_ID)) for token in tokens]
    if content and all("id" in each for each in content):
        return [each["id"] for each in content]
    if not tokens and not content and not choice.get("text"):
        return []
    raise BadAnswer("it returns no token ids; vLLM does since 0.10.2, for SGLang set rollout.openai.server: sglang")


def _numbers(values: Sequence[Any], expected: int) -> list[float]:
    """Log-probs as they must be: one a token, finite, and no probability of 0 or above 1."""
    if len(values) != expected:
        raise BadAnswer(f"it returned {len(values)} log-probs for {expected} tokens")
    for value in values:
        is_finite = isinstance(value, int | float) and math.isfinite(value) and value > _NEVER
        if not is_finite or value > 1e-3:
            kind = BadAnswer if is_finite else NotFinite
            raise kind(f"it returned {value} as the log-prob of a token it sampled")
    return [float(value) for value in values]


def _top(top: Mapping[str, float] | None) -> list[tuple[int, float]]:
    pairs = (top or {}).items()
    return _pairs((int(token.removeprefix(_TOKEN_ID)), x) for token, x in pairs if token.startswith(_TOKEN_ID))


def _pairs(pairs: Any) -> list[tuple[int, float]]:
    return sorted(((int(token), float(x)) for token, x in pairs), key=lambda pair: -pair[1])


def _finish_reason(told: str | None) -> FinishReason | None:
    if told is None:
        return None
    if told not in _FINISH:
        raise BadAnswer(f"it ended the request with {told!r}")
    return _FINISH[told]
