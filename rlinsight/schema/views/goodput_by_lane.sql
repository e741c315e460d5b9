-- Where each lane's part of a step went: nanoseconds productive, overhead, wasted, idle, and unattributed (no leaf of the lane covers
-- them). The buckets of a lane add up to the step exactly: where leaves overlap, the first of that order counts.
-- Only of spans that state their bucket (rl.bucket). Give run_id.
CREATE OR REPLACE VIEW goodput_by_lane AS
WITH leaves AS (
  SELECT s.run_id, s.attempt, s.step, o.lane, o.bucket, greatest(o.start_ns, s.start_ns) AS start_ns, least(o.end_ns, s.end_ns) AS end_ns,
    s.start_ns AS step_start_ns, s.end_ns AS step_end_ns
  FROM v_steps s JOIN otel_spans o ON o.run_id = s.run_id AND o.attempt = s.attempt AND o.step = s.step
  WHERE o.bucket IS NOT NULL AND o.start_ns < s.end_ns AND o.end_ns > s.start_ns
), edges AS (
  SELECT run_id, attempt, step, lane, bucket, start_ns AS ts, 1 AS delta FROM leaves
  UNION ALL SELECT run_id, attempt, step, lane, bucket, end_ns, -1 FROM leaves
  UNION ALL SELECT DISTINCT run_id, attempt, step, lane, NULL, step_start_ns, 0 FROM leaves
  UNION ALL SELECT DISTINCT run_id, attempt, step, lane, NULL, step_end_ns, 0 FROM leaves
), moments AS (
  SELECT run_id, attempt, step, lane, ts, sum(delta) FILTER (bucket = 'productive') AS productive,
    sum(delta) FILTER (bucket = 'overhead') AS overhead, sum(delta) FILTER (bucket = 'wasted') AS wasted,
    sum(delta) FILTER (bucket = 'idle') AS idle
  FROM edges GROUP BY run_id, attempt, step, lane, ts
), swept AS (
  SELECT run_id, attempt, step, lane, lead(ts) OVER w - ts AS ns,
    CASE WHEN sum(productive) OVER w > 0 THEN 'productive' WHEN sum(overhead) OVER w > 0 THEN 'overhead'
      WHEN sum(wasted) OVER w > 0 THEN 'wasted' WHEN sum(idle) OVER w > 0 THEN 'idle' ELSE 'unattributed' END AS bucket
  FROM moments WINDOW w AS (PARTITION BY run_id, step, attempt, lane ORDER BY ts)
)
SELECT run_id, attempt, step, lane, bucket, CAST(sum(ns) AS BIGINT) AS ns, sum(ns) / 1e9 AS duration_s
FROM swept WHERE ns > 0 GROUP BY run_id, attempt, step, lane, bucket;
