-- Texts and per-token lists of one turn as sampled, from event rlinsight.turn.content. Lists have one entry per sampled token.
CREATE TABLE token_runs (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, trace_id VARCHAR, prompt_text VARCHAR,
  response_text VARCHAR, prompt_token_ids INTEGER[], token_ids INTEGER[], token_pieces VARCHAR[], rollout_log_probs FLOAT[],
  time_ns BIGINT, batch_id VARCHAR, item INTEGER, policy_versions INTEGER[]
);
