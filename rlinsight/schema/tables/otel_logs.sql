-- Raw log records, one row per record as received. Byte attributes stand in log_attributes as {"base64": "..."}, or, where a token
-- table holds their content, as {"bytes": length} (arrays of texts as {"items": length}); batch_id and item find that row.
-- body_is_json: the body was not text and stands as JSON. item counts from 0 inside its batch (NULL in rows older than the column).
-- resource_detail and scope_detail as in otel_spans.
CREATE TABLE otel_logs (
  time_ns BIGINT, observed_ns BIGINT, trace_id VARCHAR, span_id VARCHAR, flags BIGINT,
  severity_number TINYINT, severity_text VARCHAR, event_name VARCHAR, body VARCHAR, body_is_json BOOLEAN,
  service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR, scope_version VARCHAR,
  resource_attributes JSON, log_attributes JSON, dropped_attributes_count BIGINT, schema_url VARCHAR,
  resource_detail JSON, scope_detail JSON,
  run_id VARCHAR, attempt INTEGER, step BIGINT, rank INTEGER,
  batch_id VARCHAR NOT NULL, item INTEGER, ingest_ns BIGINT NOT NULL
);
