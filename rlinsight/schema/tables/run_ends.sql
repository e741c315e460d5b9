-- One row per attempt that ended in an orderly way, from event rlinsight.run.end.
CREATE TABLE run_ends (run_id VARCHAR, attempt INTEGER, time_ns BIGINT, status VARCHAR, exit_code INTEGER, reason VARCHAR);
