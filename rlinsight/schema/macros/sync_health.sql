-- Did every engine get, and serve, every weight version? Per version and replica: how long it took, whether the checksums agree, and how
-- many turns that began after it were still sampled by older weights (served_old). problem is missing (the version reached
-- other replicas only), failed, checksum or served_old; NULL when all is well.
-- Example: FROM sync_health('my-run') WHERE problem IS NOT NULL;
CREATE OR REPLACE MACRO sync_health(run) AS TABLE
WITH syncs AS (
  SELECT w.* REPLACE (max(w.checksum_trained) OVER (PARTITION BY w.attempt, w.policy_version) AS checksum_trained)
  FROM weight_syncs w LEFT JOIN lineage l ON l.run_id = w.run_id AND l.attempt = w.attempt
  WHERE w.run_id = run AND (l.valid_through_step IS NULL OR w.step <= l.valid_through_step)
  QUALIFY row_number() OVER (PARTITION BY w.attempt, w.replica, w.policy_version ORDER BY w.end_ns DESC) = 1
), due AS (
  SELECT v.attempt, v.policy_version, v.step, r.replica
  FROM (SELECT attempt, policy_version, min(step) AS step FROM syncs GROUP BY ALL) v
  JOIN (SELECT attempt, replica, min(policy_version) AS first_version FROM syncs GROUP BY ALL) r
    ON r.attempt = v.attempt AND r.first_version <= v.policy_version
), served AS (
  SELECT y.attempt, y.replica, y.policy_version, count(*) FILTER (t.policy_version < y.policy_version) AS old, count(*) AS turns
  FROM (SELECT attempt, replica, start_ns, policy_version FROM turns WHERE run_id = run) t
  ASOF JOIN syncs y ON y.attempt = t.attempt AND y.replica = t.replica AND t.start_ns >= y.end_ns
  GROUP BY ALL
)
SELECT d.attempt, d.step, d.policy_version, s.engine, d.replica, (s.end_ns - s.start_ns) / 1e9 AS duration_s, s.bytes, s.pause_mode,
  s.in_flight, s.aborted, s.checksum_trained = s.checksum_served AS same_checksum, coalesce(v.turns, 0) AS turns_after,
  coalesce(v.old, 0) AS served_old, s.error_type,
  CASE WHEN s.span_id IS NULL THEN 'missing' WHEN s.status_code = 2 OR s.error_type IS NOT NULL THEN 'failed'
    WHEN s.checksum_trained <> s.checksum_served THEN 'checksum' WHEN v.old > 0 THEN 'served_old' END AS problem
FROM due d
LEFT JOIN syncs s ON s.attempt = d.attempt AND s.replica IS NOT DISTINCT FROM d.replica AND s.policy_version = d.policy_version
LEFT JOIN served v ON v.attempt = d.attempt AND v.replica = d.replica AND v.policy_version = d.policy_version
ORDER BY d.policy_version, d.replica;
