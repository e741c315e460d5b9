"""Which table a span or event becomes a row of, and which attribute fills which column.

Owns the mapping as data; decode.py applies it. A column that is not named here is filled by the item's fact of the same
name (run_id, step, start_ns, trace_id, ...). Attributes are looked up on the item first, then on its resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rlinsight import names

# Attributes that are facts of every span and event under a column name of their own.
PROMOTED: Mapping[str, str] = {
    "run_id": names.RUN_ID,
    "attempt": names.ATTEMPT,
    "rank": names.RANK,
    "step": names.STEP_INDEX,
    "lane": names.LANE,
    "phase": names.PHASE,
    "bucket": names.BUCKET,
    "group_id": names.GROUP_ID,
    "rollout_id": names.ROLLOUT_ID,
    "turn_index": names.TURN_INDEX,
    "request_id": names.REQUEST_ID,
    "policy_version": names.POLICY_VERSION,
}


class Projection(NamedTuple):
    """Items whose name (up to its first space) is ``name``, or that carry ``has``, become rows of ``table``."""

    table: str
    kind: Literal["span", "event"]
    columns: Mapping[str, str]
    name: str | None = None
    has: str | None = None


# vLLM's names for durations are ours too, and aliases.py knows its others; what it does not send stays NULL.
_SERVING = {
    "engine": names.ENGINE,
    "replica": names.REPLICA,
    "queue_s": names.QUEUE_S,
    "prefill_s": names.PREFILL_S,
    "decode_s": names.DECODE_S,
    "ttft_s": names.TTFT_S,
    "e2e_s": names.E2E_S,
    "prompt_tokens": names.INPUT_TOKENS,
    "output_tokens": names.OUTPUT_TOKENS,
    "cached_tokens": names.CACHED_TOKENS,
    "max_tokens": names.MAX_TOKENS,
    "finish_reason": names.FINISH_REASONS,
    "num_preemptions": names.PREEMPTIONS,
    "aborted": names.ABORTED,
    "corrupted": names.CORRUPTED,
    "error_type": names.ERROR_TYPE,
}

PROJECTIONS: tuple[Projection, ...] = (
    Projection(
        "steps",
        "span",
        {
            "policy_version_in": names.POLICY_VERSION_IN,
            "policy_version_out": names.POLICY_VERSION_OUT,
            "num_prompts": names.NUM_PROMPTS,
            "num_rollouts": names.BATCH_SIZE,
            "num_tokens": names.NUM_TOKENS,
        },
        name=names.STEP,
    ),
    Projection("phases", "span", {"skipped": names.SKIPPED}, has=names.PHASE),
    Projection(
        "rollout_samples",
        "span",
        {
            "prompt_id": names.PROMPT_ID,
            "sample_index": names.SAMPLE_INDEX,
            "policy_version_min": names.POLICY_VERSION_MIN,
            "policy_version_max": names.POLICY_VERSION_MAX,
            "status": names.STATUS,
            "finish_reason": names.FINISH_REASONS,
            "prompt_tokens": names.INPUT_TOKENS,
            "response_tokens": names.OUTPUT_TOKENS,
            "error_type": names.ERROR_TYPE,
            "split": names.SPLIT,
            "env": names.ENV,
        },
        name=names.ROLLOUT,
    ),
    Projection(
        "turns",
        "span",
        {
            "engine": names.ENGINE,
            "replica": names.REPLICA,
            "prompt_tokens": names.INPUT_TOKENS,
            "cached_tokens": names.CACHED_TOKENS,
            "output_tokens": names.OUTPUT_TOKENS,
            "finish_reason": names.FINISH_REASONS,
        },
        name=names.TURN,
    ),
    Projection(
        "weight_syncs",
        "span",
        {
            "engine": names.ENGINE,
            "replica": names.REPLICA,
            "bytes": names.BYTES,
            "refreshed_bytes": names.REFRESHED_BYTES,
            "pause_mode": names.PAUSE_MODE,
            "in_flight": names.SYNC_IN_FLIGHT,
            "aborted": names.SYNC_ABORTED,
            "checksum_trained": names.CHECKSUM_TRAINED,
            "checksum_served": names.CHECKSUM_SERVED,
            "error_type": names.ERROR_TYPE,
        },
        name=names.WEIGHT_SYNC,
    ),
    Projection("serving_requests", "span", _SERVING, name=names.ENGINE_REQUEST),
    Projection("serving_requests", "span", _SERVING, name=names.VLLM_REQUEST),
    Projection(
        "tool_calls",
        "span",
        {"tool": names.TOOL_NAME, "call_id": names.TOOL_CALL_ID, "error_type": names.ERROR_TYPE},
        name=names.TOOL,
    ),
    Projection(
        "worker_calls",
        "span",
        {"method": names.METHOD, "worker_group": names.WORKER_GROUP, "world_size": names.WORLD_SIZE},
        name=names.WORKER_CALL,
    ),
    Projection(
        "run_starts",
        "event",
        {
            "name": names.RUN_NAME,
            "project": names.PROJECT,
            "algorithm": names.ALGORITHM,
            "model": names.MODEL,
            "config": names.CONFIG,
            "config_hash": names.CONFIG_HASH,
            "code_version": names.CODE_VERSION,
            "host": names.HOST,
            "total_steps": names.TOTAL_STEPS,
            "resumed_from_step": names.RESUMED_FROM_STEP,
        },
        name=names.RUN_START,
    ),
    Projection(
        "run_ends",
        "event",
        {"status": names.STATUS, "exit_code": names.EXIT_CODE, "reason": names.REASON},
        name=names.RUN_END,
    ),
    Projection(
        "span_starts",
        "event",
        {
            "name": names.START_NAME,
            "start_ns": names.START_NS,
            "parent_span_id": names.START_PARENT,
            "method": names.METHOD,
        },
        name=names.SPAN_START,
    ),
    Projection(
        "group_prompts",
        "event",
        {
            "prompt_id": names.PROMPT_ID,
            "data_source": names.DATA_SOURCE,
            "group_size": names.GROUP_SIZE,
            "prompt_text": names.PROMPT_TEXT,
            "answer": names.ANSWER,
        },
        name=names.GROUP,
    ),
    Projection(
        "dropped_groups",
        "event",
        {"prompt_id": names.PROMPT_ID, "env": names.ENV, "reason": names.REASON, "num_rollouts": names.BATCH_SIZE},
        name=names.GROUP_DROPPED,
    ),
    Projection(
        "token_runs",
        "event",
        {
            "prompt_text": names.PROMPT_TEXT,
            "response_text": names.RESPONSE_TEXT,
            "prompt_token_ids": names.PROMPT_TOKEN_IDS,
            "token_ids": names.TOKEN_IDS,
            "token_pieces": names.TOKEN_PIECES,
            "rollout_log_probs": names.ROLLOUT_LOG_PROBS,
            "policy_versions": names.POLICY_VERSIONS,
        },
        name=names.TURN_CONTENT,
    ),
    Projection(
        "rewards",
        "event",
        {
            "component": names.COMPONENT,
            "weight": names.COMPONENT_WEIGHT,
            "value": names.COMPONENT_VALUE,
            "label": names.COMPONENT_LABEL,
            "explanation": names.COMPONENT_EXPLANATION,
            "latency_s": names.COMPONENT_LATENCY,
        },
        name=names.REWARD_COMPONENT,
    ),
    Projection(
        "rollout_scores",
        "event",
        {"reward": names.REWARD_VALUE, "status": names.STATUS, "reason": names.REASON},
        name=names.ROLLOUT_SCORED,
    ),
    Projection(
        "rollout_training",
        "event",
        {
            "advantage": names.ADVANTAGE,
            "loss_mask": names.LOSS_MASK,
            "old_log_probs": names.OLD_LOG_PROBS_ARRAY,
            "log_probs": names.LOG_PROBS_ARRAY,
            "ref_log_probs": names.REF_LOG_PROBS_ARRAY,
            "entropy": names.ENTROPY_ARRAY,
            "advantages": names.ADVANTAGES_ARRAY,
            "clipped": names.CLIPPED_ARRAY,
            "weights": names.WEIGHTS_ARRAY,
            "critic_values": names.VALUES_ARRAY,
            "returns": names.RETURNS_ARRAY,
        },
        name=names.ROLLOUT_TRAINED,
    ),
    Projection(
        "step_metrics",
        "event",
        {
            "name": names.METRIC_NAME,
            "value": names.METRIC_VALUE,
            "agg": names.METRIC_AGG,
            "unit": names.METRIC_UNIT,
            "weight": names.METRIC_WEIGHT,
        },
        name=names.STEP_METRIC,
    ),
    Projection(
        "engine_samples",
        "event",
        {
            "engine": names.ENGINE,
            "replica": names.REPLICA,
            "running": names.RUNNING,
            "waiting_capacity": names.WAITING_CAPACITY,
            "waiting_deferred": names.WAITING_DEFERRED,
            "kv_usage": names.KV_USAGE,
            "prefix_queries": names.PREFIX_QUERIES,
            "prefix_hits": names.PREFIX_HITS,
            "prompt_tokens": names.ENGINE_PROMPT_TOKENS,
            "generation_tokens": names.ENGINE_OUTPUT_TOKENS,
            "preemptions": names.ENGINE_PREEMPTIONS,
            "awake": names.AWAKE,
        },
        name=names.ENGINE_SAMPLE,
    ),
    Projection(
        "evals",
        "event",
        {
            "dataset": names.EVAL_DATASET,
            "metric": names.EVAL_METRIC,
            "value": names.EVAL_VALUE,
            "num_samples": names.EVAL_SAMPLES,
            "std_error": names.EVAL_STD_ERROR,
        },
        name=names.EVAL,
    ),
    Projection(
        "alerts",
        "event",
        {
            "rule": names.ALERT_RULE,
            "severity": names.ALERT_SEVERITY,
            "message": names.ALERT_MESSAGE,
            "evidence_sql": names.ALERT_EVIDENCE,
        },
        name=names.ALERT,
    ),
    Projection(
        "model_checks",
        "event",
        {
            "check_id": names.CHECK_ID,
            "model": names.MODEL,
            "part": names.CHECK_PART,
            "status": names.CHECK_STATUS,
            "reason": names.REASON,
            "architecture": names.CHECK_ARCHITECTURE,
            "num_parameters": names.CHECK_PARAMETERS,
            "dtype": names.CHECK_DTYPE,
            "load_s": names.CHECK_LOAD_S,
            "num_prompts": names.CHECK_PROMPTS,
            "num_tokens": names.CHECK_TOKENS,
            "parity": names.CHECK_PARITY,
            "divergent_prompt": names.CHECK_DIVERGENT_PROMPT,
            "divergent_position": names.CHECK_DIVERGENT_POSITION,
            "expected_piece": names.CHECK_EXPECTED_PIECE,
            "found_piece": names.CHECK_FOUND_PIECE,
            "expected_log_prob": names.CHECK_EXPECTED_LOG_PROB,
            "found_log_prob": names.CHECK_FOUND_LOG_PROB,
            "expected_lead": names.CHECK_LEAD,
            "max_log_prob_gap": names.CHECK_MAX_GAP,
            "mean_log_prob_gap": names.CHECK_MEAN_GAP,
            "tokens_per_s": names.CHECK_TOKENS_PER_S,
            "code_version": names.CODE_VERSION,
            "host": names.HOST,
        },
        name=names.MODEL_CHECK,
    ),
    Projection(
        "model_check_latency",
        "event",
        {
            "check_id": names.CHECK_ID,
            "model": names.MODEL,
            "part": names.CHECK_PART,
            "concurrency": names.CHECK_CONCURRENCY,
            "num_requests": names.CHECK_REQUESTS,
            "output_tokens": names.OUTPUT_TOKENS,
            "tokens_per_s": names.CHECK_TOKENS_PER_S,
            **names.CHECK_LATENCY,
        },
        name=names.MODEL_CHECK_LATENCY,
    ),
    Projection(
        "producer_health",
        "event",
        {
            "producer": names.PRODUCER,
            "emitted": names.EMITTED,
            "sent": names.SENT,
            "dropped_queue": names.DROPPED_QUEUE,
            "dropped_limit": names.DROPPED_LIMIT,
            "dropped_disk": names.DROPPED_DISK,
            "dropped_crash": names.DROPPED_CRASH,
            "dropped_fault": names.DROPPED_FAULT,
            "rejected": names.REJECTED,
            "retried": names.RETRIED,
            "queue_length": names.QUEUE_LENGTH,
            "overhead_ns": names.OVERHEAD_NS,
            "labels_dropped": names.LABELS_DROPPED,
            "metrics_overflowing": names.METRICS_OVERFLOWING,
        },
        name=names.PRODUCER_HEALTH,
    ),
)
