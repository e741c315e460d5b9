-- One reward component of one rollout, from event gen_ai.evaluation.result.
CREATE TABLE rewards (
  run_id VARCHAR, attempt INTEGER, rollout_id VARCHAR, component VARCHAR, weight DOUBLE, value DOUBLE, label VARCHAR,
  explanation VARCHAR, latency_s DOUBLE, time_ns BIGINT
);
