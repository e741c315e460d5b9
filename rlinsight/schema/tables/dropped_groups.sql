-- A group that was sampled and then left out of the update, and why, from event rlinsight.group.dropped.
CREATE TABLE dropped_groups (
  run_id VARCHAR, attempt INTEGER, step BIGINT, group_id VARCHAR, prompt_id VARCHAR, env VARCHAR, reason VARCHAR,
  num_rollouts BIGINT, time_ns BIGINT
);
