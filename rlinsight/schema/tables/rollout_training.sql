-- A turn as an update consumed it, from event rl.rollout.trained. Lists align with token_runs.token_ids of the turn.
CREATE TABLE rollout_training (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, policy_version BIGINT, advantage DOUBLE,
  loss_mask BOOLEAN[], old_log_probs FLOAT[], log_probs FLOAT[], ref_log_probs FLOAT[], entropy FLOAT[], advantages FLOAT[],
  clipped BOOLEAN[], time_ns BIGINT, batch_id VARCHAR, item INTEGER,
  weights FLOAT[], critic_values FLOAT[], returns FLOAT[]
);
