-- Is the telemetry complete? One row per producer: what it says it emitted and dropped, and what is stored of it.
-- refused: items the collector could not take, or not in full; alone or with their whole batch, which then has no ledger row.
-- missing: emitted, not dropped, not refused with their batch and not stored yet; above 0 for a moment while batches travel.
-- Producers whose rows were removed to keep the store small (retention_log) are left out.
-- Senders that do not identify themselves share the row with producer NULL; they report nothing, so only stored is known.
CREATE OR REPLACE VIEW health AS
WITH said AS (
  -- Only the report written for a killed producer knows dropped_crash; a living one has lost nothing that way.
  SELECT * REPLACE (coalesce(dropped_crash, 0) AS dropped_crash) FROM producer_health QUALIFY row_number() OVER (PARTITION BY producer ORDER BY time_ns DESC) = 1
), stored AS (
  SELECT producer, count(*) AS batches, sum(rows) AS rows, sum(coalesce(items, rows)) AS items, sum(rejected) AS rejected, sum(bytes) AS bytes, max(committed_ns) AS last_ns
  FROM ingest_batches b
  ANTI JOIN (SELECT unnest(producers) AS producer FROM retention_log) gone ON gone.producer = b.producer
  GROUP BY producer
)
SELECT h.run_id, h.attempt, coalesce(h.producer, s.producer) AS producer, h.service_name, h.rank, h.emitted, h.sent,
  CAST(coalesce(s.rows, 0) AS BIGINT) AS stored, CAST(greatest(coalesce(s.rejected, 0), coalesce(h.rejected, 0)) AS BIGINT) AS refused,
  h.dropped_queue, h.dropped_limit, h.dropped_disk, h.dropped_crash, h.dropped_fault,
  h.dropped_queue + h.dropped_limit + h.dropped_disk + h.dropped_crash + h.dropped_fault AS dropped,
  CAST(greatest(0, h.emitted - h.dropped_queue - h.dropped_limit - h.dropped_disk - h.dropped_crash - h.dropped_fault
    - greatest(0, coalesce(h.rejected, 0) - coalesce(s.rejected, 0)) - coalesce(s.items, 0)) AS BIGINT) AS missing,
  h.retried, h.queue_length, h.overhead_ns / 1e9 AS overhead_s, s.batches, CAST(s.bytes AS BIGINT) AS bytes,
  to_time(h.time_ns) AS last_report, to_time(s.last_ns) AS last_stored, h.labels_dropped, h.metrics_overflowing
FROM said h FULL OUTER JOIN stored s ON s.producer = h.producer;
