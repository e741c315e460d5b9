"""The engine over HTTP: one server that somebody else runs, asked for token ids and log-probs.

Owns what is checked before its answers are trusted: that it serves the policy's model, that its log-probs are those
training computes, that every answer is whole. Does not own the protocol (dialects.py), the connection (server.py), how
the server gets weights (weight_transport.py) or which server a request goes to (router.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import models
from core_trainer.batching import token_sample
from core_trainer.forward import sample_log_probs
from core_trainer.rollout.dialects import BadAnswer, Delta, Dialect, NotFinite
from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode, WeightSync
from core_trainer.rollout.server import Server, events
from core_trainer.rollout.serving import SAMPLE_INTERVAL_S, EngineState, Served, record_request, record_state
from core_trainer.rollout.weight_transport import WeightTransport
from core_trainer.types import FinishReason, SamplingParams, Turn
from rlinsight.errors import EngineError, NonFiniteLogProbs, RequestRefused

PROBE = "The answer to the question is simple: first count the apples, then"
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 0.5  # far from 1, where log-probs before and after the temperature are the same
LARGEST_GAP = (
    0.1  # nats a token between the trainer's log-probs and a server's in bfloat16; other weights differ by more
)
GAP_NOISE = 1e-3  # what a gap may grow to whatever it usually is
LEAST_GAP = 1e-6  # rounding of a log-prob in float32


@dataclass(eq=False, slots=True)
class Answer:
    """A request while its answer comes in."""

    policy_version: int  # of the tokens to come
    start_ns: int = field(default_factory=time.time_ns)
    first_ns: int | None = None  # of its first token
    last_ns: int | None = None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the tokens sampled before the last sync it went through
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    aborted: bool = False
    confused: bool = False  # a sync failed that should have kept it: nobody knows which weights it has
    waiting: asyncio.Timeout | None = None  # while its next token is waited for

    def add(self, delta: Delta) -> None:
        """Take in what came."""
        if delta.token_ids:
            self.last_ns = time.time_ns()
            self.first_ns = self.first_ns or self.last_ns
        self.token_ids += delta.token_ids
        self.log_probs += delta.log_probs
        self.top_log_probs += delta.top_log_probs
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens

    @property
    def policy_versions(self) -> list[int]:
        """The weights that sampled each token so far."""
        return self.versions + [self.policy_version] * (len(self.token_ids) - len(self.versions))

    def abort(self) -> None:
        """End it now if its next token is waited for, or before that happens again."""
        self.aborted = True
        if self.waiting is not None:
            self.waiting.reschedule(asyncio.get_running_loop().time())

    async def next(self, deltas: AsyncIterator[Delta]) -> Delta | None:
        """What comes next; None at the end or when aborted."""
        if self.aborted:
            return None
        try:
            async with asyncio.timeout(None) as self.waiting:
                return await anext(deltas, None)
        except TimeoutError:
            if not self.aborted:
                raise
            return None
        finally:
            self.waiting = None


class OpenAIEngine:
    """Rollout engine over one server. ``model`` is the trainer's, which judges what the server answers."""

    def __init__(
        self,
        server: Server,
        dialect: Dialect,
        transport: WeightTransport,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        length: int,
        params: SamplingParams,
        served_model: str | None = None,
        name: str = "openai",
        replica: str | None = None,
    ) -> None:
        """``length`` tokens of prompt and response must fit; ``params`` is how the run samples. ``served_model`` may be
        left out where one is served; ``replica`` is the server's address unless it has another name.

        Raises EngineError when the server cannot be reached, does not serve the model, or only a shorter context.
        """
        self.server, self.dialect, self.transport = server, dialect, transport
        self.model, self.tokenizer, self.stop_token_ids = model, tokenizer, stop_token_ids
        self.name, self.replica, self.params = name, replica or server.name, params
        self.policy_version = 0
        self.served_model, self.max_length = _identify(server, served_model, length)
        self._answers: dict[str, Answer] = {}  # by request id, until answered
        self._usual_gap: float | None = None
        self._last_probe: tuple[list[int], list[np.ndarray]]  # tokens, and the trainer's log-probs, once there is a gap
        self._first_answer: Answer | None = None  # of a server that keeps its weights
        self._sampled_at = 0.0

    def sync_weights(self, policy_version: int, pause_mode: PauseMode = "wait") -> list[WeightSync]:
        """Have the server load the policy's weights, and see that its log-probs are theirs. Raises EngineError.

        ``pause_mode`` says what becomes of requests in flight: the server samples them to their end first (``wait``),
        ends them (``abort``), or goes on under the new weights (``keep``), where turns tell each token's version by
        what had arrived: with requests in flight, call it in another thread than theirs, which goes on reading.

        One that keeps its own weights is checked against them once, and then against what it answered at the time; its
        turns are of that version.
        """
        in_flight = list(self._answers.values())

        def changed() -> None:
            for answer in list(self._answers.values()):
                if pause_mode == "keep" or answer not in in_flight:  # asked while it was paused
                    answer.versions, answer.policy_version = answer.policy_versions, policy_version
            self.policy_version = policy_version

        try:
            pushed = self.transport.push(self.server, policy_version, pause_mode, changed)
            if pushed.moved or self._usual_gap is None:
                self._check_log_probs(policy_version)
            if not pushed.moved:
                self._check_same()
        except EngineError:
            for answer in in_flight:
                answer.confused = pause_mode == "keep"
            raise
        self.policy_version = pushed.policy_version
        aborted = len(in_flight) if pause_mode == "abort" else 0
        return [WeightSync(self.replica, pushed.moved, 0, pause_mode, len(in_flight), aborted, pushed.checksum)]

    async def generate(self, request: GenerateRequest) -> Turn:
        """Sample one request. Raises EngineError, RequestRefused when the request itself is at fault."""
        turn = None
        async with aclosing(self._chunks(request, self.dialect.streams)) as chunks:
            async for chunk in chunks:
                turn = chunk.turn
        assert turn is not None, "the last chunk has the turn"
        return turn

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The same, as tokens arrive. Leaving the iteration early closes the connection, which aborts the request."""
        return self._chunks(request, stream=True)

    def abort(self, request_id: str) -> None:
        """Close the request's connection and finish it with what has arrived."""
        if request_id in self._answers:
            self._answers[request_id].abort()

    def forget(self) -> None:
        """The server's cache is its own."""

    def sleep(self) -> int:
        """The server's memory is its own."""
        return 0

    def wake(self) -> int:
        """Likewise."""
        return 0

    def close(self) -> None:
        """Let go of server and published weights; both may be shared, and closed more than once."""
        self.server.close()
        self.transport.close()

    async def _chunks(self, request: GenerateRequest, stream: bool) -> AsyncGenerator[Chunk, None]:
        self._check_length(request)
        answer = self._answers[request.request_id] = Answer(self.policy_version)
        self._record_state()
        try:
            async with aclosing(self._deltas(request, answer, stream)) as deltas:
                while (delta := await answer.next(deltas)) is not None:
                    answer.add(delta)
                    yield Chunk(delta.token_ids, delta.log_probs)
            turn = self._turn(request, answer)
        except BadAnswer as error:
            kind = NonFiniteLogProbs if isinstance(error, NotFinite) else EngineError
            raise kind(f"{self.server.url}, request {request.request_id}: {error}") from error
        finally:
            self._answers.pop(request.request_id, None)
            self._record_state()
        self._record_request(request, turn, answer)
        yield Chunk([], [], turn)

    async def _deltas(self, request: GenerateRequest, answer: Answer, stream: bool) -> AsyncGenerator[Delta, None]:
        body = self.dialect.body(request, self.served_model, self.stop_token_ids, stream)
        async with self.server.send(self.dialect.path, body, self._headers(request)) as response:
            if not stream:
                yield self._read(request, answer, (await response.aread()).decode())
                return
            async with aclosing(events(response)) as told:
                async for event in told:
                    if event == "[DONE]":
                        return
                    yield self._read(request, answer, event)

    def _read(self, request: GenerateRequest, answer: Answer, text: str) -> Delta:
        """An answer, or an event of one. Raises BadAnswer when it does not fit what was asked and read so far."""
        try:
            delta = self.dialect.read(json.loads(text), len(answer.token_ids))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(f"it answered {text[:100]!r}, which is of another form ({error!r})") from error
        vocabulary = self.model.config.vocab_size
        foreign = [token for token in delta.token_ids if not 0 <= token < vocabulary]
        if foreign:
            raise BadAnswer(f"it returned token {foreign[0]}, but the model has {vocabulary}; it serves another model")
        told_tokens, read = delta.num_tokens, len(answer.token_ids) + len(delta.token_ids)
        if told_tokens is not None and told_tokens != read:
            raise BadAnswer(f"it counts {told_tokens} tokens and returned {read}")
        if read > request.params.max_new_tokens:
            raise BadAnswer(f"it returned {read} tokens for max_new_tokens={request.params.max_new_tokens}")
        if delta.num_prompt_tokens not in (None, len(request.prompt_token_ids)):
            raise BadAnswer(
                f"it counts {delta.num_prompt_tokens} prompt tokens of {len(request.prompt_token_ids)}; it must take "
                "token ids as they are"
            )
        return delta

    def _turn(self, request: GenerateRequest, answer: Answer) -> Turn:
        if answer.confused:
            raise BadAnswer("it was to be kept through a weight sync, which failed")
        ended = answer.aborted or answer.finish_reason == "abort"
        if not ended and (answer.finish_reason is None or not answer.token_ids):
            raise BadAnswer(f"it ended the answer early, after {len(answer.token_ids)} tokens")
        asked = request.params.num_top_log_probs
        versions = answer.policy_versions if answer.versions else None
        return Turn(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=answer.token_ids,
            rollout_log_probs=answer.log_probs,
            text=models.decode(self.tokenizer, answer.token_ids),
            finish_reason=answer.finish_reason or "abort",
            policy_version=versions[0] if versions else answer.policy_version,
            num_cached_tokens=answer.num_cached_tokens,
            start_ns=answer.start_ns,
            end_ns=time.time_ns(),
            replica=self.replica,
            token_policy_versions=versions,
            top_log_probs=[top[:asked] for top in answer.top_log_probs] if asked else None,
        )

    def _check_length(self, request: GenerateRequest) -> None:
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if self.max_length is not None and prompt + new > self.max_length:
            raise RequestRefused(
                f"a prompt of {prompt} tokens and max_new_tokens={new} exceed the context of {self.max_length} of "
                f"{self.server.url}; lower rollout.max_new_tokens or data.max_prompt_tokens"
            )

    def _headers(self, request: GenerateRequest) -> dict[str, str]:
        return {**request.carrier, "x-request-id": request.request_id}

    def _record_request(self, request: GenerateRequest, turn: Turn, answer: Answer) -> None:
        record_request(request, turn, _served(answer), self.name)

    def _record_state(self) -> None:
        """When work begins or ends, and now and then between."""
        now = time.monotonic()
        if len(self._answers) in (0, 1) or now - self._sampled_at >= SAMPLE_INTERVAL_S:
            self._sampled_at = now
            record_state(self.name, self.replica, EngineState(running=len(self._answers)))

    # What its log-probs are -------------------------------------------------------------------------------------------

    def _check_log_probs(self, policy_version: int) -> None:
        """Compare a few tokens' log-probs with a forward pass of the trainer's model. Raises EngineError.

        The first time they must be those after the temperature (or before it, where the run samples at 1) of the whole
        vocabulary. Later a gap well above the usual one means that the server did not take the weights; a small one
        does where its words are those of the last time and their log-probs much nearer the trainer's of then.
        """
        tokens, told, trained = self._probe(SamplingParams(PROBE_TOKENS, PROBE_TEMPERATURE))
        gaps = _gaps(told, trained)
        gap = min(gaps)
        if self._usual_gap is not None:
            last_tokens, last_trained = self._last_probe
            is_old = tokens == last_tokens and min(_gaps(told, last_trained)) < gap / 4
            noise = LEAST_GAP if is_old else GAP_NOISE
            if gap > min(max(10 * self._usual_gap, noise), LARGEST_GAP):
                raise EngineError(
                    f"{self.server.url} did not take the weights of policy_version={policy_version}: log-probs "
                    f"differ from the trainer's by {gap:.2g} nats a token, usually by {self._usual_gap:.2g}"
                )
            self._last_probe = tokens, trained
            return
        if gap > LARGEST_GAP:
            raise EngineError(
                f"{self.server.url} serves other weights than the policy's: log-probs differ from the trainer's by "
                f"{gap:.2g} nats a token; start it with the model that model.source names"
            )
        if gaps[1] < gaps[0] / 2 and self.params.temperature != 1:
            raise EngineError(
                f"{self.server.url} reports log-probs before the temperature, and this run samples at "
                f"{self.params.temperature:g}; start vLLM with --logprobs-mode processed_logprobs, SGLang without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB, or set rollout.temperature: 1"
            )
        self._check_truncation()
        self._check_stop()
        self._usual_gap, self._last_probe = gap, (tokens, trained)

    def _check_same(self) -> None:
        """See that a server which keeps its weights has those it had at first. Raises EngineError."""
        answer = self._ask(SamplingParams(PROBE_TOKENS, 0.0))
        first = self._first_answer = self._first_answer or answer
        pairs = list(zip(answer.token_ids, first.token_ids, strict=False))
        # Up to the first token that differs, likeliest words of equal weights are about equally likely.
        same = next((i for i, (now, then) in enumerate(pairs) if now != then), len(pairs) - 1) + 1
        gap = float(np.abs(np.subtract(answer.log_probs[:same], first.log_probs[:same])).mean())
        if gap > LARGEST_GAP:
            raise EngineError(
                f"{self.server.url} serves other weights than at first: log-probs differ by {gap:.2g} nats a token; "
                "start it with those"
            )

    def _check_truncation(self) -> None:
        """Where the run leaves unlikely words out, see that log-probs are still those of the whole vocabulary."""
        params = self.params
        if params.top_p == 1 and params.top_k is None and params.min_p == 0:
            return
        _, told, (tempered, _) = self._probe(SamplingParams(PROBE_TOKENS, PROBE_TEMPERATURE, top_k=1))
        if np.abs(told).mean() < np.abs(tempered).mean() / 10:  # of the one word that was left, all are 0
            raise EngineError(
                f"{self.server.url} reports log-probs of what top-k and top-p left, not of the whole vocabulary; "
                "remove rollout.top_p and rollout.top_k, or set rollout.engine: vllm_server"
            )

    def _check_stop(self) -> None:
        """See that an answer ends with a stop token: a server that knows none would never end one."""
        greedy = SamplingParams(2, 0.0)
        first = self._ask(greedy).token_ids[0]
        stopped = self._ask(greedy, (first,))
        if stopped.token_ids != [first] or stopped.finish_reason != "stop":
            raise EngineError(
                f"{self.server.url} does not end an answer after a token of stop_token_ids, so none would end with its "
                "turn; it cannot serve rollouts"
            )

    def _probe(self, params: SamplingParams) -> tuple[list[int], np.ndarray, list[np.ndarray]]:
        """A short answer and its log-probs: the server's, and the trainer's after and before the temperature."""
        answer, prompt = self._ask(params), self._probe_tokens()
        sample = token_sample("probe", "probe", prompt, answer.token_ids, answer.log_probs)
        found = [
            sample_log_probs(self.model, [sample], temperature, len(prompt) + sample.num_tokens)[0]
            for temperature in (params.temperature, 1.0)
        ]
        return answer.token_ids, sample.rollout_log_probs, found

    def _ask(self, params: SamplingParams, stop_token_ids: tuple[int, ...] = ()) -> Answer:
        """A short answer, waited for."""
        request = GenerateRequest(f"probe-{time.time_ns()}", self._probe_tokens(), params)
        body = self.dialect.body(request, self.served_model, stop_token_ids, stream=False)
        told, answer = self.server.call("POST", self.dialect.path, body), Answer(self.policy_version)
        try:
            answer.add(self._read(request, answer, json.dumps(told)))
            self._turn(request, answer)
        except BadAnswer as error:
            raise EngineError(f"{self.server.url} cannot be sampled from: {error}") from error
        return answer

    def _probe_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def _gaps(told: np.ndarray, trained: list[np.ndarray]) -> list[float]:
    """Mean distances of a server's log-probs from each of the trainer's."""
    return [float(np.abs(told - each).mean()) for each in trained]


def _identify(server: Server, wanted: str | None, length: int) -> tuple[str, int | None]:
    """The served model's name and its context, None where the server does not tell."""
    told = server.call("GET", "/v1/models")
    listed = {str(each["id"]): each for each in told.get("data") or []}
    if not listed:
        raise EngineError(f"{server.url} lists no model at /v1/models; is it a server of the OpenAI protocol?")
    name = wanted if wanted is not None or len(listed) > 1 else next(iter(listed))
    if name not in listed:
        problem = "several models" if name is None else f"no model {name!r}"
        raise EngineError(f"{server.url} serves {problem}; {server.hints.model}: {', '.join(listed)}")
    longest = listed[name].get("max_model_len")
    if longest is not None and longest < length:
        raise EngineError(
            f"{server.url} serves a context of {longest}, and data.max_prompt_tokens and rollout.max_new_tokens need "
            f"{length}; start it with a longer one or lower them"
        )
    return name, longest


def _served(answer: Answer) -> Served:
    """Times as seen from here: they hold the way to the server and back."""
    start, first, last = answer.start_ns, answer.first_ns, answer.last_ns
    if first is None or last is None:
        return Served()
    streamed = last > first
    return Served(
        decode_s=(last - first) / 1e9 if streamed else None,
        ttft_s=(first - start) / 1e9 if streamed else None,
        e2e_s=(last - start) / 1e9,
    )
