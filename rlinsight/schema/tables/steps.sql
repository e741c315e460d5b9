-- One row per step, from span rl.loop.
CREATE TABLE steps (
  run_id VARCHAR, attempt INTEGER, step BIGINT, trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, end_ns BIGINT,
  policy_version_in BIGINT, policy_version_out BIGINT, num_prompts BIGINT, num_rollouts BIGINT, num_tokens BIGINT,
  status_code TINYINT, status_message VARCHAR
);
