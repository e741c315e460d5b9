-- Raw metric points with their stream's identity (gauge, sum, histogram, exponential histogram, summary).
-- value_int is set beside value where the sender sent an integer. metadata and description are the stream's. sent_name is the name as sent where name is
-- the known spelling of it. detail holds the buckets of exponential histograms and the quantiles of summaries.
-- resource_detail and scope_detail as in otel_spans.
CREATE TABLE otel_metrics (
  time_ns BIGINT, start_ns BIGINT, name VARCHAR, sent_name VARCHAR, description VARCHAR, unit VARCHAR, kind VARCHAR,
  temporality VARCHAR, is_monotonic BOOLEAN,
  value DOUBLE, value_int BIGINT, count UBIGINT, sum DOUBLE, min DOUBLE, max DOUBLE, bounds DOUBLE[], bucket_counts UBIGINT[],
  detail JSON, attributes JSON, exemplars JSON, flags BIGINT, metadata JSON,
  service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR, scope_version VARCHAR,
  resource_attributes JSON, schema_url VARCHAR, resource_detail JSON, scope_detail JSON,
  run_id VARCHAR, attempt INTEGER, step BIGINT, rank INTEGER,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);
