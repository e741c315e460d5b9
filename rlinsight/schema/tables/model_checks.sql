-- How training, or one rollout engine, took a model that `rlinsight check-model` tried, from event rlinsight.model_check.
-- Belongs to no run; one check has a row a part. What a part did not come to is NULL.
CREATE TABLE model_checks (
  check_id VARCHAR, time_ns BIGINT, model VARCHAR, part VARCHAR, status VARCHAR, reason VARCHAR, architecture VARCHAR,
  num_parameters BIGINT, dtype VARCHAR, load_s DOUBLE, num_prompts BIGINT, num_tokens BIGINT, parity DOUBLE,
  divergent_prompt BIGINT, divergent_position BIGINT, expected_piece VARCHAR, found_piece VARCHAR,
  expected_log_prob DOUBLE, found_log_prob DOUBLE, expected_lead DOUBLE, max_log_prob_gap DOUBLE, mean_log_prob_gap DOUBLE,
  tokens_per_s DOUBLE, code_version VARCHAR, host JSON
);
