-- What was removed to keep the store small: one row per run, and per sweep of rows that belonged to no run (run_id NULL).
-- reason: age or bytes. bytes is an estimate: the run's share of the file by what its senders sent. producers are those whose rows
-- are gone; what they sent stays in ingest_batches, so that nothing that arrives late again is stored again.
CREATE TABLE retention_log (
  run_id VARCHAR, reason VARCHAR NOT NULL, rows BIGINT NOT NULL, bytes BIGINT, last_heard_ns BIGINT, producers VARCHAR[],
  removed_ns BIGINT NOT NULL
);
