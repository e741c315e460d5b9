-- The ledger: one row per stored OTLP request, written in the same transaction as its rows. Foreign senders have no producer.
CREATE TABLE ingest_batches (
  batch_id VARCHAR PRIMARY KEY, producer VARCHAR, seq BIGINT, signal VARCHAR, rows BIGINT, rejected BIGINT, bytes BIGINT,
  received_ns BIGINT, committed_ns BIGINT
);
