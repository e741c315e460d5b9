-- One scalar of one step with its reduction stated, from event rlinsight.step.metric.
CREATE TABLE step_metrics (
  run_id VARCHAR, attempt INTEGER, step BIGINT, time_ns BIGINT, name VARCHAR, value DOUBLE, agg VARCHAR, unit VARCHAR, weight VARCHAR
);
