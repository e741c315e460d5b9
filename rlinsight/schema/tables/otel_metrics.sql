-- Raw metric points with their stream's identity (gauge, sum, histogram, exponential histogram, summary).
CREATE TABLE otel_metrics (
  time_ns BIGINT, start_ns BIGINT, name VARCHAR, unit VARCHAR, kind VARCHAR, temporality VARCHAR, is_monotonic BOOLEAN,
  value DOUBLE, count UBIGINT, sum DOUBLE, min DOUBLE, max DOUBLE, bounds DOUBLE[], bucket_counts UBIGINT[], detail JSON,
  attributes JSON, exemplars JSON, flags BIGINT, service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR,
  resource_attributes JSON, schema_url VARCHAR, run_id VARCHAR, attempt INTEGER, step BIGINT, rank INTEGER,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);
