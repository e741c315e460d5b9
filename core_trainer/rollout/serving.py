"""What an engine tells of its own work: one span a request, and samples of its state while it runs.

Every engine records the same two things, so that the tables ``serving_requests`` and ``engine_samples`` read alike.
Durations are the engine's own measurements; what it cannot tell stays None and is NULL in the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from core_trainer.rollout.engine import GenerateRequest
from core_trainer.types import Turn
from rlinsight import names, telemetry

SAMPLE_INTERVAL_S = 0.5  # between two samples of a running engine


@dataclass(slots=True)
class Served:
    """How one request went inside the engine, in seconds."""

    queue_s: float | None = None  # waiting to be scheduled
    prefill_s: float | None = None  # prompt forward passes
    decode_s: float | None = None  # first to last token
    ttft_s: float | None = None  # arrival to first token
    e2e_s: float | None = None  # arrival to last token
    num_preemptions: int | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine was doing at one moment. Counters are cumulative since its start."""

    running: int
    waiting_capacity: int | None = None  # requests waiting for room
    waiting_deferred: int | None = None  # requests waiting for anything else
    kv_usage: float | None = None  # share of the KV cache in use
    prefix_queries: int | None = None  # prompt tokens looked up in the prefix cache
    prefix_hits: int | None = None  # of those, found
    prompt_tokens: int | None = None  # computed
    generation_tokens: int | None = None  # sampled
    preemptions: int | None = None
    awake: bool | None = None


def record_request(request: GenerateRequest, turn: Turn, served: Served, engine: str) -> None:
    """The request's span, a child of the turn's."""
    attributes = {
        **request.attributes,
        names.REQUEST_ID: request.request_id,
        names.ENGINE: engine,
        names.REPLICA: turn.replica,
        names.POLICY_VERSION: turn.policy_version,
        names.INPUT_TOKENS: len(turn.prompt_token_ids),
        names.OUTPUT_TOKENS: len(turn.token_ids),
        names.CACHED_TOKENS: turn.num_cached_tokens,
        names.MAX_TOKENS: request.params.max_new_tokens,
        names.FINISH_REASONS: [turn.finish_reason],
        names.ABORTED: turn.finish_reason == "abort",
        names.QUEUE_S: served.queue_s,
        names.PREFILL_S: served.prefill_s,
        names.DECODE_S: served.decode_s,
        names.TTFT_S: served.ttft_s,
        names.E2E_S: served.e2e_s,
        names.PREEMPTIONS: served.num_preemptions,
    }
    telemetry.record_span(names.ENGINE_REQUEST, turn.start_ns, turn.end_ns, attributes, carrier=dict(request.carrier))


def record_state(engine: str, replica: str, state: EngineState) -> None:
    """One sample of an engine's state."""
    attributes = {
        names.ENGINE: engine,
        names.REPLICA: replica,
        names.RUNNING: state.running,
        names.WAITING_CAPACITY: state.waiting_capacity,
        names.WAITING_DEFERRED: state.waiting_deferred,
        names.KV_USAGE: state.kv_usage,
        names.PREFIX_QUERIES: state.prefix_queries,
        names.PREFIX_HITS: state.prefix_hits,
        names.ENGINE_PROMPT_TOKENS: state.prompt_tokens,
        names.ENGINE_OUTPUT_TOKENS: state.generation_tokens,
        names.ENGINE_PREEMPTIONS: state.preemptions,
        names.AWAKE: state.awake,
    }
    telemetry.event(names.ENGINE_SAMPLE, attributes)
