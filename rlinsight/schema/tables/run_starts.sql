-- One row per attempt of a run, from event rlinsight.run.start.
CREATE TABLE run_starts (
  run_id VARCHAR, attempt INTEGER, time_ns BIGINT, name VARCHAR, project VARCHAR, algorithm VARCHAR, model VARCHAR,
  config JSON, config_hash VARCHAR, code_version VARCHAR, host JSON, total_steps BIGINT, resumed_from_step BIGINT
);
