-- One engine request of a rollout, from spans named "chat {model}".
CREATE TABLE turns (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, request_id VARCHAR, engine VARCHAR,
  replica VARCHAR, trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, end_ns BIGINT, prompt_tokens BIGINT,
  cached_tokens BIGINT, output_tokens BIGINT, finish_reason VARCHAR, policy_version BIGINT
);
