-- One engine received one weight version, from span rl.weight_sync.
CREATE TABLE weight_syncs (
  run_id VARCHAR, attempt INTEGER, step BIGINT, policy_version BIGINT, engine VARCHAR, replica VARCHAR, start_ns BIGINT,
  end_ns BIGINT, bytes BIGINT, refreshed_bytes BIGINT, span_id VARCHAR, status_code TINYINT,
  pause_mode VARCHAR, in_flight BIGINT, aborted BIGINT, checksum_trained VARCHAR, checksum_served VARCHAR, error_type VARCHAR
);
