-- Raw spans, one row per span as received. Times are unix nanoseconds. Promoted columns (run_id to policy_version) are NULL for
-- spans that lack them. resource_detail and scope_detail hold what a resource and a scope have beyond their attributes and
-- names (dropped counts, entity references, the resource's own schema URL, scope attributes); NULL when nothing.
-- Byte attributes stand as {"base64": "..."}.
CREATE TABLE otel_spans (
  trace_id VARCHAR NOT NULL, span_id VARCHAR NOT NULL, parent_span_id VARCHAR, trace_state VARCHAR, flags BIGINT,
  name VARCHAR NOT NULL, kind TINYINT, start_ns BIGINT NOT NULL, end_ns BIGINT NOT NULL,
  status_code TINYINT, status_message VARCHAR,
  service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR, scope_version VARCHAR,
  resource_attributes JSON, span_attributes JSON, events JSON, links JSON,
  dropped_attributes_count BIGINT, dropped_events_count BIGINT, dropped_links_count BIGINT, schema_url VARCHAR,
  resource_detail JSON, scope_detail JSON,
  run_id VARCHAR, attempt INTEGER, step BIGINT, lane VARCHAR, rank INTEGER, phase VARCHAR, bucket VARCHAR,
  group_id VARCHAR, rollout_id VARCHAR, turn_index INTEGER, request_id VARCHAR, policy_version BIGINT,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);
