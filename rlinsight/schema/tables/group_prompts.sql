-- One row per group (prompt dispatched in a step), from event rlinsight.group.
CREATE TABLE group_prompts (
  run_id VARCHAR, attempt INTEGER, step BIGINT, group_id VARCHAR, prompt_id VARCHAR, data_source VARCHAR, group_size INTEGER,
  prompt_text VARCHAR, answer VARCHAR, time_ns BIGINT
);
