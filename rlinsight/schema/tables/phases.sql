-- One row per phase of a step, from spans that carry rlinsight.phase.
CREATE TABLE phases (
  run_id VARCHAR, attempt INTEGER, step BIGINT, phase VARCHAR, lane VARCHAR, rank INTEGER, bucket VARCHAR,
  start_ns BIGINT, end_ns BIGINT, skipped VARCHAR, trace_id VARCHAR, span_id VARCHAR, status_code TINYINT
);
