"""Rollouts of prompts: one request a sample, and each rollout's own trace.

Owns what a rollout is called, how it is seeded, when an engine's answer counts as failed and what then, and what is
recorded of it all; how a request is sampled is the engine's business.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from core_trainer import models
from core_trainer.rollout.engine import GenerateRequest, RolloutEngine
from core_trainer.types import Prompt, Rollout, SamplingParams, Turn
from rlinsight import names, telemetry
from rlinsight.config import RolloutSection
from rlinsight.errors import EngineError, NonFiniteLogProbs, RequestRefused, RlinsightError
from rlinsight.otlp import AttributeValue

GRACE_S = 60.0  # for what comes before and after the requests


class RequestTimeout(EngineError):
    """An engine did not answer a request in time."""


class RequestAborted(EngineError):
    """An engine gave up a request that nobody asked it to."""


class MalformedTurn(EngineError):
    """An answer without tokens, without a log-prob for each, or with tokens the model does not have."""


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt dispatched in a step, to be answered ``size`` times."""

    group_id: str
    prompt: Prompt
    size: int
    seeds: tuple[int, ...]  # [size]
    split: Literal["train", "eval", "baseline"] = "train"  # no update may learn from the others


def make_groups(
    prompts: Sequence[Prompt], group_size: int, seed: int, step: int, attempt: int, first: int = 0
) -> list[Group]:
    """Name and seed groups of a step, counting from ``first``. Seeds depend on (run seed, step, group, sample), not on
    the attempt or the workers.
    """
    groups = []
    for i, prompt in enumerate(prompts, start=first):
        seeds = tuple(sample_seed(f"{seed}/{step}/{i}/{j}") for j in range(group_size))
        groups.append(Group(f"a{attempt}-s{step:06d}-g{i:04d}", prompt, group_size, seeds))
    return groups


def sample_seed(key: str) -> int:
    """A request's seed from what identifies the sample."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1  # fits OTLP's signed integers


def check_turn(turn: Turn, vocab_size: int) -> None:
    """Raises the EngineError that says why an engine's answer cannot be used, if it cannot."""
    count = len(turn.token_ids)
    if turn.finish_reason == "abort":
        raise RequestAborted(f"the engine gave the request up after {count} tokens")
    if not count or len(turn.rollout_log_probs) != count:
        raise MalformedTurn(f"the engine answered {count} tokens with {len(turn.rollout_log_probs)} log-probs")
    unknown = [token for token in turn.token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise MalformedTurn(
            f"the engine sampled token {unknown[0]}, the model has {vocab_size}; let it serve the model that is trained"
        )
    finite = np.isfinite(turn.rollout_log_probs)
    if not finite.all():
        at = int(finite.argmin())
        raise NonFiniteLogProbs(
            f"the engine gave token {at} of {count} the log-prob {turn.rollout_log_probs[at]}; it computes with broken "
            "weights or overflows"
        )


def time_limit_s(section: RolloutSection) -> float:
    """Seconds after which sampling is stuck: longer than all attempts of a request may take, each in its time."""
    return (section.retries + 1) * section.request_timeout_s + GRACE_S


class Sampler:
    """Samples rollouts from one engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        section: RolloutSection,
        model: str,
        vocab_size: int,
        piece: Callable[[int], str],
    ) -> None:
        """``model`` is its name in the trace; ``piece`` gives the text of one token."""
        self.engine, self.section, self.model = engine, section, model
        self.vocab_size, self._piece = vocab_size, piece

    async def sample(self, groups: Sequence[Group], params: SamplingParams) -> list[Rollout]:
        """Sample every rollout of the groups at once; returns them group by group, sample by sample.

        A request that failed is made again, up to ``rollout.retries`` times, unless it was refused. When it failed for
        good its rollout has an ``error`` with ``rollout.on_error: drop``; otherwise, and for a bug always, this raises
        EngineError, after the other requests were aborted and what was sampled is recorded.
        """
        for group in groups:
            _record_group(group)
        step = telemetry.inject()
        samples = [(group, j) for group in groups for j in range(group.size)]
        if not samples:
            return []
        tasks = [asyncio.create_task(self._rollout(group, j, params, step)) for group, j in samples]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task, (group, j) in zip(tasks, samples, strict=True):
            if not task.cancelled() and task.exception() is None and not task.result().error:
                self._record(task.result(), group, replace(params, seed=group.seeds[j]), step)
        return [task.result() for task in tasks if task in done]  # raises what the first of them failed with

    async def _rollout(self, group: Group, index: int, params: SamplingParams, step: dict[str, str]) -> Rollout:
        """One rollout, of one turn. Records it if it failed."""
        rollout_id = f"{group.group_id}-r{index:03d}"
        rollout = Rollout(rollout_id, group.group_id, index, group.prompt, [], telemetry.new_carrier())
        request = GenerateRequest(
            f"{rollout_id}-t0",
            group.prompt.token_ids,
            replace(params, seed=group.seeds[index]),
            carrier=telemetry.new_carrier(rollout.carrier),
            attributes={names.ROLLOUT_ID: rollout_id, names.GROUP_ID: group.group_id, names.TURN_INDEX: 0},
            session=group.group_id,
        )
        start_ns = time.time_ns()
        try:
            rollout.turns.append(await self._turn(request))
        except Exception as error:  # whatever it is, the record tells what became of the rollout
            rollout.error = type(error).__name__
            self._record_failure(rollout, group, request, start_ns, error, step)
            bug, drop = _is_bug(error), "set rollout.on_error: drop to go on without such rollouts"
            if self.section.on_error == "fail" or bug:  # what is dropped passes for bad luck
                raise EngineError(
                    f"request {request.request_id} to rollout engine {self.engine.name} failed for good: "
                    f"{reason(error)}; {'this is a bug, please report it' if bug else drop}"
                ) from error
        return rollout

    async def _turn(self, first: GenerateRequest) -> Turn:
        """The first good answer of all attempts. Raises what the last one failed with."""
        request, start_ns, attempt = first, time.time_ns(), 0
        while True:
            asked_ns = time.time_ns()
            try:
                turn = await self._ask(request)
            except Exception as error:  # an engine raises whatever its parts raise; the last one is raised again
                replica = getattr(error, "replica", None) or self.engine.replica
                self._record_failed_request(request, replica, asked_ns, error)
                if attempt == self.section.retries or isinstance(error, RequestRefused):
                    raise
                attempt += 1
                name = f"{first.request_id}-retry{attempt}"
                request = replace(request, request_id=name, avoid=request.avoid | {replica})
                continue
            if attempt:
                turn.start_ns = start_ns  # the turn is all its attempts
            turn.carrier = dict(request.carrier)
            return turn

    async def _ask(self, request: GenerateRequest) -> Turn:
        """One attempt. Raises EngineError when the answer is late or no good, and whatever the engine raises."""
        timeout_s = self.section.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                turn = await self.engine.generate(request)
        except BaseException as error:  # also when this task is cancelled
            self.engine.abort(request.request_id)
            if isinstance(error, TimeoutError) and deadline.expired():
                late = RequestTimeout(
                    f"no answer within {timeout_s:g} s; raise rollout.request_timeout_s if the engine is only slow"
                )
                late.replica = getattr(error.__cause__, "replica", None)  # a router names it on the cancellation
                raise late from None
            raise
        try:
            check_turn(turn, self.vocab_size)
        except EngineError as error:
            error.replica = turn.replica
            raise
        return turn

    # Records ---------------------------------------------------------------------------------------------------------

    def _record_failed_request(
        self, request: GenerateRequest, replica: str, start_ns: int, error: BaseException
    ) -> None:
        """The engine's part of it: a child of the turn, as a request that went well has one."""
        attributes = {
            **request.attributes,
            names.REQUEST_ID: request.request_id,
            names.ENGINE: self.engine.name,
            names.REPLICA: replica,
            names.INPUT_TOKENS: len(request.prompt_token_ids),
            names.MAX_TOKENS: request.params.max_new_tokens,
            names.FINISH_REASONS: ["error"],
            names.CORRUPTED: True if isinstance(error, NonFiniteLogProbs) else None,
            names.ERROR_TYPE: type(error).__name__,
            names.BUCKET: "wasted",
        }
        telemetry.record_span(
            names.ENGINE_REQUEST, start_ns, time.time_ns(), attributes, carrier=dict(request.carrier), error=error
        )

    def _record_failure(
        self,
        rollout: Rollout,
        group: Group,
        request: GenerateRequest,
        start_ns: int,
        error: BaseException,
        step: dict[str, str],
    ) -> None:
        """The trace of a rollout whose request failed for good. What was sampled of it is unknown."""
        end_ns = time.time_ns()
        failed = {names.ERROR_TYPE: rollout.error, names.FINISH_REASONS: ["error"]}
        chat = {**self._request(request.params), **request.attributes, **failed, names.REQUEST_ID: request.request_id}
        chat |= {names.INPUT_TOKENS: len(request.prompt_token_ids), names.CONVERSATION_ID: rollout.rollout_id}
        telemetry.record_span(
            f"{names.TURN} {self.model}",
            start_ns,
            end_ns,
            chat,
            carrier=rollout.carrier,
            identity=dict(request.carrier),
            error=error,
        )
        root = {**_identity(rollout, group), **failed, names.STATUS: "error"}
        telemetry.record_span(
            names.ROLLOUT, start_ns, end_ns, root, identity=rollout.carrier, links=[step], error=error
        )

    def _record(self, rollout: Rollout, group: Group, params: SamplingParams, step: dict[str, str]) -> None:
        """The rollout's trace: its root span, one chat span a turn, and each turn's texts and arrays."""
        own = {names.ROLLOUT_ID: rollout.rollout_id, names.GROUP_ID: rollout.group_id}
        for index, turn in enumerate(rollout.turns):
            chat = telemetry.record_span(
                f"{names.TURN} {self.model}",
                turn.start_ns,
                turn.end_ns,
                {
                    **own,
                    names.TURN_INDEX: index,
                    **self._request(params),
                    names.REQUEST_ID: turn.request_id,
                    names.REPLICA: turn.replica,
                    names.INPUT_TOKENS: len(turn.prompt_token_ids),
                    names.CACHED_TOKENS: turn.num_cached_tokens,
                    names.OUTPUT_TOKENS: len(turn.token_ids),
                    names.FINISH_REASONS: [turn.finish_reason],
                    names.POLICY_VERSION: turn.policy_version,
                    names.CONVERSATION_ID: rollout.rollout_id,
                },
                carrier=rollout.carrier,
                identity=turn.carrier,
            )
            content: dict[str, AttributeValue] = {
                **own,
                names.TURN_INDEX: index,
                names.PROMPT_TEXT: rollout.prompt.text,
                names.RESPONSE_TEXT: turn.text,
                names.PROMPT_TOKEN_IDS: np.asarray(turn.prompt_token_ids, dtype="<i4").tobytes(),
                names.TOKEN_IDS: np.asarray(turn.token_ids, dtype="<i4").tobytes(),
                names.TOKEN_PIECES: [self._piece(token) for token in turn.token_ids],
                names.ROLLOUT_LOG_PROBS: np.asarray(turn.rollout_log_probs, dtype="<f4").tobytes(),
            }
            if turn.token_policy_versions is not None:
                content[names.POLICY_VERSIONS] = np.asarray(turn.token_policy_versions, dtype="<i4").tobytes()
            telemetry.event(names.TURN_CONTENT, content, carrier=chat)
        telemetry.record_span(
            names.ROLLOUT,
            min(turn.start_ns for turn in rollout.turns),
            max(turn.end_ns for turn in rollout.turns),
            {
                **_identity(rollout, group),
                names.POLICY_VERSION_MIN: rollout.policy_version,
                names.POLICY_VERSION_MAX: max(version for turn in rollout.turns for version in turn.policy_versions),
                names.STATUS: "ok",
                names.FINISH_REASONS: [rollout.finish_reason],
                names.OUTPUT_TOKENS: rollout.num_response_tokens,
            },
            identity=rollout.carrier,
            links=[step],
        )

    def _request(self, params: SamplingParams) -> dict[str, AttributeValue | None]:
        """What was asked for."""
        return {
            names.OPERATION: "chat",
            names.REQUEST_MODEL: self.model,
            names.ENGINE: self.engine.name,
            names.TEMPERATURE: params.temperature,
            names.TOP_P: params.top_p,
            names.TOP_K: params.top_k,
            names.MAX_TOKENS: params.max_new_tokens,
            names.SEED: params.seed,
        }


def _identity(rollout: Rollout, group: Group) -> dict[str, AttributeValue]:
    return {
        names.ROLLOUT_ID: rollout.rollout_id,
        names.GROUP_ID: rollout.group_id,
        names.PROMPT_ID: rollout.prompt.prompt_id,
        names.SAMPLE_INDEX: rollout.sample_index,
        names.SPLIT: group.split,
        names.INPUT_TOKENS: len(rollout.prompt.token_ids),
    }


def _is_bug(error: Exception) -> bool:
    """Whether neither an engine said what is wrong, nor the network, nor memory that ran out."""
    return not isinstance(error, (RlinsightError, OSError, MemoryError, torch.OutOfMemoryError))


def reason(error: Exception) -> str:
    """An engine's error in one line; with its place in the code if it is none of ours."""
    if isinstance(error, RlinsightError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {models.one_line(error)} ({Path(place.filename).name}:{place.lineno})"


def _record_group(group: Group) -> None:
    attributes = {
        names.GROUP_ID: group.group_id,
        names.PROMPT_ID: group.prompt.prompt_id,
        names.DATA_SOURCE: group.prompt.data_source,
        names.GROUP_SIZE: group.size,
        names.PROMPT_TEXT: group.prompt.text,
    }
    if group.prompt.answer is not None:
        attributes[names.ANSWER] = group.prompt.answer
    telemetry.event(names.GROUP, attributes)
