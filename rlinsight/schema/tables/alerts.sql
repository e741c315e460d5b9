-- Something a process found wrong while the run went on, from event rlinsight.alert; evidence_sql is the query that shows it.
CREATE TABLE alerts (
  run_id VARCHAR, attempt INTEGER, step BIGINT, time_ns BIGINT, rule VARCHAR, severity VARCHAR, message VARCHAR,
  evidence_sql VARCHAR
);
