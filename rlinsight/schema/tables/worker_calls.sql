-- One remote call as one rank of a worker group executed it, from span rl.worker.call.
CREATE TABLE worker_calls (
  run_id VARCHAR, attempt INTEGER, step BIGINT, method VARCHAR, worker_group VARCHAR, rank INTEGER, world_size INTEGER, lane VARCHAR,
  start_ns BIGINT, end_ns BIGINT, status_code TINYINT, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR
);
