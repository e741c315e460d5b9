-- A step-level span has begun, from event rlinsight.span.start; view open_spans shows those that have not ended.
CREATE TABLE span_starts (
  run_id VARCHAR, attempt INTEGER, step BIGINT, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, name VARCHAR,
  start_ns BIGINT, lane VARCHAR, rank INTEGER, phase VARCHAR, service_name VARCHAR, method VARCHAR
);
