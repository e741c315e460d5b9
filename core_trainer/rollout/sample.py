"""Rollouts of prompts: one request a sample, and each rollout's own trace.

Owns what a rollout is called, how it is seeded and what is recorded of it; how it is sampled is the engine's business.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from core_trainer.rollout.engine import GenerateRequest, RolloutEngine
from core_trainer.types import Prompt, Rollout, SamplingParams, Turn
from rlinsight import names, telemetry
from rlinsight.otlp import AttributeValue


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt dispatched in a step, to be answered ``size`` times."""

    group_id: str
    prompt: Prompt
    size: int
    seeds: tuple[int, ...]  # [size]
    split: Literal["train", "eval"] = "train"  # eval: no update may learn from it


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


async def sample_rollouts(
    engine: RolloutEngine,
    groups: Sequence[Group],
    params: SamplingParams,
    piece: Callable[[int], str],
    model: str,
) -> list[Rollout]:
    """Sample every rollout of the groups at once; returns them group by group, sample by sample.

    ``piece`` gives the text of one token. Raises what the engine raises, after the other requests were aborted.
    """
    for group in groups:
        _record_group(group)
    step = telemetry.inject()
    samples = [(group, seed) for group in groups for seed in group.seeds]
    waiting = [_one_turn(engine, group, j, params) for group in groups for j in range(group.size)]
    rollouts = await asyncio.gather(*waiting)
    for rollout, (group, seed) in zip(rollouts, samples, strict=True):
        _record_rollout(rollout, group.split, replace(params, seed=seed), piece, engine.name, model, step)
    return rollouts


async def _one_turn(engine: RolloutEngine, group: Group, index: int, params: SamplingParams) -> Rollout:
    rollout_id = f"{group.group_id}-r{index:03d}"
    carrier = telemetry.new_carrier()
    request = GenerateRequest(
        f"{rollout_id}-t0",
        group.prompt.token_ids,
        replace(params, seed=group.seeds[index]),
        carrier=telemetry.new_carrier(carrier),
        attributes={names.ROLLOUT_ID: rollout_id, names.GROUP_ID: group.group_id, names.TURN_INDEX: 0},
        session=group.group_id,
    )
    turn = await engine.generate(request)
    turn.carrier = dict(request.carrier)
    return Rollout(rollout_id, group.group_id, index, group.prompt, [turn], carrier)


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


def _record_rollout(
    rollout: Rollout,
    split: str,
    params: SamplingParams,
    piece: Callable[[int], str],
    engine: str,
    model: str,
    step: dict[str, str],
) -> None:
    """The rollout's trace: its root span, one chat span a turn, and each turn's texts and arrays."""
    identity = {names.ROLLOUT_ID: rollout.rollout_id, names.GROUP_ID: rollout.group_id}
    for index, turn in enumerate(rollout.turns):
        chat = telemetry.record_span(
            f"{names.TURN} {model}",
            turn.start_ns,
            turn.end_ns,
            {
                **identity,
                names.TURN_INDEX: index,
                **_request_attributes(turn, params, model),
                names.ENGINE: engine,
                names.REPLICA: turn.replica,
                names.CONVERSATION_ID: rollout.rollout_id,
            },
            carrier=rollout.carrier,
            identity=turn.carrier,
        )
        telemetry.event(
            names.TURN_CONTENT,
            {
                **identity,
                names.TURN_INDEX: index,
                names.PROMPT_TEXT: rollout.prompt.text,
                names.RESPONSE_TEXT: turn.text,
                names.PROMPT_TOKEN_IDS: np.asarray(turn.prompt_token_ids, dtype="<i4").tobytes(),
                names.TOKEN_IDS: np.asarray(turn.token_ids, dtype="<i4").tobytes(),
                names.TOKEN_PIECES: [piece(token) for token in turn.token_ids],
                names.ROLLOUT_LOG_PROBS: np.asarray(turn.rollout_log_probs, dtype="<f4").tobytes(),
            },
            carrier=chat,
        )
    telemetry.record_span(
        names.ROLLOUT,
        min(turn.start_ns for turn in rollout.turns),
        max(turn.end_ns for turn in rollout.turns),
        {
            **identity,
            names.PROMPT_ID: rollout.prompt.prompt_id,
            names.SAMPLE_INDEX: rollout.sample_index,
            names.SPLIT: split,
            names.POLICY_VERSION_MIN: rollout.policy_version,
            names.POLICY_VERSION_MAX: max(turn.policy_version for turn in rollout.turns),
            names.STATUS: "ok",
            names.FINISH_REASONS: [rollout.finish_reason],
            names.INPUT_TOKENS: len(rollout.prompt.token_ids),
            names.OUTPUT_TOKENS: rollout.num_response_tokens,
        },
        identity=rollout.carrier,
        links=[step],
    )


def _request_attributes(turn: Turn, params: SamplingParams, model: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.OPERATION: "chat",
        names.REQUEST_MODEL: model,
        names.REQUEST_ID: turn.request_id,
        names.TEMPERATURE: params.temperature,
        names.TOP_P: params.top_p,
        names.MAX_TOKENS: params.max_new_tokens,
        names.SEED: params.seed,
        names.INPUT_TOKENS: len(turn.prompt_token_ids),
        names.CACHED_TOKENS: turn.num_cached_tokens,
        names.OUTPUT_TOKENS: len(turn.token_ids),
        names.FINISH_REASONS: [turn.finish_reason],
        names.POLICY_VERSION: turn.policy_version,
    }
    if params.top_k is not None:
        attributes[names.TOP_K] = params.top_k
    return attributes
