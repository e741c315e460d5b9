-- How a rollout was sampled, from span rl.rollout.
CREATE TABLE rollout_samples (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, group_id VARCHAR, prompt_id VARCHAR, sample_index INTEGER,
  trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, end_ns BIGINT, policy_version_min BIGINT, policy_version_max BIGINT,
  status VARCHAR, finish_reason VARCHAR, prompt_tokens BIGINT, response_tokens BIGINT,
  error_type VARCHAR, split VARCHAR, env VARCHAR
);
