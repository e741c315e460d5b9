-- One metric of one validation, from event rlinsight.eval.
CREATE TABLE evals (
  run_id VARCHAR, attempt INTEGER, step BIGINT, policy_version BIGINT, dataset VARCHAR, metric VARCHAR, value DOUBLE,
  num_samples BIGINT, time_ns BIGINT, std_error DOUBLE
);
