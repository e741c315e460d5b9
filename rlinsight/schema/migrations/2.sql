-- From schema version 1 to 2. Runs in one transaction, after new tables were created from their own files. Every line may find
-- its column there already (IF NOT EXISTS): a table that was new in between has today's columns.
-- The first stores of version 1 lack views_hash.
ALTER TABLE schema_meta ADD COLUMN IF NOT EXISTS views_hash VARCHAR;
ALTER TABLE ingest_batches ADD COLUMN IF NOT EXISTS items BIGINT;
UPDATE ingest_batches SET items = rows + rejected;  -- version 1 did not tell items apart that were stored in part
ALTER TABLE otel_spans ADD COLUMN IF NOT EXISTS resource_detail JSON;
ALTER TABLE otel_spans ADD COLUMN IF NOT EXISTS scope_detail JSON;
ALTER TABLE otel_logs ADD COLUMN IF NOT EXISTS body_is_json BOOLEAN;
ALTER TABLE otel_logs ADD COLUMN IF NOT EXISTS resource_detail JSON;
ALTER TABLE otel_logs ADD COLUMN IF NOT EXISTS scope_detail JSON;
ALTER TABLE otel_logs ADD COLUMN IF NOT EXISTS item INTEGER;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS sent_name VARCHAR;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS description VARCHAR;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS value_int BIGINT;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS metadata JSON;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS scope_version VARCHAR;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS resource_detail JSON;
ALTER TABLE otel_metrics ADD COLUMN IF NOT EXISTS scope_detail JSON;
ALTER TABLE token_runs ADD COLUMN IF NOT EXISTS batch_id VARCHAR;
ALTER TABLE token_runs ADD COLUMN IF NOT EXISTS item INTEGER;
ALTER TABLE rollout_training ADD COLUMN IF NOT EXISTS batch_id VARCHAR;
ALTER TABLE rollout_training ADD COLUMN IF NOT EXISTS item INTEGER;
ALTER TABLE rollout_samples ADD COLUMN IF NOT EXISTS error_type VARCHAR;
ALTER TABLE rollout_samples ADD COLUMN IF NOT EXISTS split VARCHAR;
ALTER TABLE rollout_samples ADD COLUMN IF NOT EXISTS env VARCHAR;
ALTER TABLE span_starts ADD COLUMN IF NOT EXISTS method VARCHAR;
ALTER TABLE token_runs ADD COLUMN IF NOT EXISTS policy_versions INTEGER[];
ALTER TABLE weight_syncs ADD COLUMN IF NOT EXISTS pause_mode VARCHAR;
ALTER TABLE weight_syncs ADD COLUMN IF NOT EXISTS in_flight BIGINT;
ALTER TABLE weight_syncs ADD COLUMN IF NOT EXISTS aborted BIGINT;
ALTER TABLE weight_syncs ADD COLUMN IF NOT EXISTS checksum_trained VARCHAR;
ALTER TABLE weight_syncs ADD COLUMN IF NOT EXISTS checksum_served VARCHAR;
ALTER TABLE weight_syncs ADD COLUMN IF NOT EXISTS error_type VARCHAR;
ALTER TABLE serving_requests ADD COLUMN IF NOT EXISTS error_type VARCHAR;
ALTER TABLE evals ADD COLUMN IF NOT EXISTS std_error DOUBLE;
ALTER TABLE producer_health ADD COLUMN IF NOT EXISTS labels_dropped BIGINT;
ALTER TABLE producer_health ADD COLUMN IF NOT EXISTS metrics_overflowing BIGINT;
ALTER TABLE rollout_training ADD COLUMN IF NOT EXISTS weights FLOAT[];
ALTER TABLE rollout_training ADD COLUMN IF NOT EXISTS critic_values FLOAT[];
ALTER TABLE rollout_training ADD COLUMN IF NOT EXISTS returns FLOAT[];
