-- Raw log records. Byte attributes stand in log_attributes as {"bytes": length}; their content is in the token tables.
CREATE TABLE otel_logs (
  time_ns BIGINT, observed_ns BIGINT, trace_id VARCHAR, span_id VARCHAR, flags BIGINT,
  severity_number TINYINT, severity_text VARCHAR, event_name VARCHAR, body VARCHAR,
  service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR, scope_version VARCHAR,
  resource_attributes JSON, log_attributes JSON, dropped_attributes_count BIGINT, schema_url VARCHAR,
  run_id VARCHAR, attempt INTEGER, step BIGINT, rank INTEGER,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);
