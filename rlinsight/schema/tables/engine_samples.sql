-- What one engine replica was doing at one moment, from event rlinsight.engine.sample. Token and preemption counts are
-- cumulative since the engine's start; a drop is a restart.
CREATE TABLE engine_samples (
  run_id VARCHAR, attempt INTEGER, step BIGINT, engine VARCHAR, replica VARCHAR, time_ns BIGINT, running BIGINT,
  waiting_capacity BIGINT, waiting_deferred BIGINT, kv_usage DOUBLE, prefix_queries BIGINT, prefix_hits BIGINT,
  prompt_tokens BIGINT, generation_tokens BIGINT, preemptions BIGINT, awake BOOLEAN
);
