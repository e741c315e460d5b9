-- One request as a rollout engine served it, from spans rl.engine.request (ours) and llm_request (vLLM's own).
-- Durations are the engine's own measurements; tokens and waits it does not report are NULL.
CREATE TABLE serving_requests (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, request_id VARCHAR, engine VARCHAR,
  replica VARCHAR, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, start_ns BIGINT, end_ns BIGINT, queue_s DOUBLE,
  prefill_s DOUBLE, decode_s DOUBLE, ttft_s DOUBLE, e2e_s DOUBLE, prompt_tokens BIGINT, cached_tokens BIGINT,
  output_tokens BIGINT, max_tokens BIGINT, finish_reason VARCHAR, num_preemptions BIGINT, aborted BOOLEAN, corrupted BOOLEAN,
  policy_version BIGINT, status_code TINYINT, error_type VARCHAR
);
