-- The reward a rollout is learned from, from event rlinsight.rollout.scored.
CREATE TABLE rollout_scores (
  run_id VARCHAR, attempt INTEGER, rollout_id VARCHAR, reward DOUBLE, status VARCHAR, reason VARCHAR, time_ns BIGINT
);
