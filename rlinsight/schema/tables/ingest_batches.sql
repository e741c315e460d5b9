-- The ledger: one row per stored OTLP request, written in the same transaction as its rows. Foreign senders have no producer.
-- Of items received, rows have a raw row and rejected are not stored, or not as domain rows.
CREATE TABLE ingest_batches (
  batch_id VARCHAR PRIMARY KEY, producer VARCHAR, seq BIGINT, signal VARCHAR, items BIGINT, rows BIGINT, rejected BIGINT, bytes BIGINT,
  received_ns BIGINT, committed_ns BIGINT
);
