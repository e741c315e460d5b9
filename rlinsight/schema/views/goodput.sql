-- Where a step's wall time went, all lanes together: a moment is productive when any lane is, else overhead, wasted or idle when any
-- lane says so, else unattributed. The five *_ns add up to wall_ns exactly; goodput is the productive share. Give run_id.
CREATE OR REPLACE VIEW goodput AS
WITH leaves AS (
  SELECT s.run_id, s.step, o.bucket, greatest(o.start_ns, s.start_ns) AS start_ns, least(o.end_ns, s.end_ns) AS end_ns
  FROM v_steps s JOIN otel_spans o ON o.run_id = s.run_id AND o.attempt = s.attempt AND o.step = s.step
  WHERE o.bucket IS NOT NULL AND o.start_ns < s.end_ns AND o.end_ns > s.start_ns
), edges AS (
  SELECT run_id, step, bucket, start_ns AS ts, 1 AS delta FROM leaves
  UNION ALL SELECT run_id, step, bucket, end_ns, -1 FROM leaves
), moments AS (
  SELECT run_id, step, ts, sum(delta) FILTER (bucket = 'productive') AS productive, sum(delta) FILTER (bucket = 'overhead') AS overhead,
    sum(delta) FILTER (bucket = 'wasted') AS wasted, sum(delta) FILTER (bucket = 'idle') AS idle
  FROM edges GROUP BY run_id, step, ts
), swept AS (
  SELECT run_id, step, lead(ts) OVER w - ts AS ns,
    CASE WHEN sum(productive) OVER w > 0 THEN 'productive' WHEN sum(overhead) OVER w > 0 THEN 'overhead'
      WHEN sum(wasted) OVER w > 0 THEN 'wasted' WHEN sum(idle) OVER w > 0 THEN 'idle' END AS bucket
  FROM moments WINDOW w AS (PARTITION BY run_id, step ORDER BY ts)
), spent AS (
  SELECT run_id, step, CAST(coalesce(sum(ns) FILTER (bucket = 'productive'), 0) AS BIGINT) AS productive_ns,
    CAST(coalesce(sum(ns) FILTER (bucket = 'overhead'), 0) AS BIGINT) AS overhead_ns,
    CAST(coalesce(sum(ns) FILTER (bucket = 'wasted'), 0) AS BIGINT) AS wasted_ns,
    CAST(coalesce(sum(ns) FILTER (bucket = 'idle'), 0) AS BIGINT) AS idle_ns
  FROM swept GROUP BY run_id, step
)
SELECT s.run_id, s.attempt, s.step, s.end_ns - s.start_ns AS wall_ns, coalesce(p.productive_ns, 0) AS productive_ns,
  coalesce(p.overhead_ns, 0) AS overhead_ns, coalesce(p.wasted_ns, 0) AS wasted_ns, coalesce(p.idle_ns, 0) AS idle_ns,
  s.end_ns - s.start_ns - coalesce(p.productive_ns + p.overhead_ns + p.wasted_ns + p.idle_ns, 0) AS unattributed_ns,
  coalesce(p.productive_ns, 0) / nullif(s.end_ns - s.start_ns, 0) AS goodput
FROM v_steps s LEFT JOIN spent p ON p.run_id = s.run_id AND p.step = s.step;
