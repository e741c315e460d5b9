-- Do the phases explain the step? Wall time, the part of it covered by at least one phase, and the unattributed rest.
-- Phases that overlap are counted once. Steps redone after a resume count as the latest attempt did them.
CREATE OR REPLACE VIEW v_phase_coverage AS
WITH clipped AS (
  SELECT s.run_id, s.attempt, s.step, greatest(p.start_ns, s.start_ns) AS start_ns, least(p.end_ns, s.end_ns) AS end_ns
  FROM v_steps s JOIN phases p ON p.run_id = s.run_id AND p.attempt = s.attempt AND p.step = s.step
  WHERE p.start_ns < s.end_ns AND p.end_ns > s.start_ns
), fresh AS (
  SELECT run_id, step, end_ns - greatest(start_ns, coalesce(max(end_ns) OVER (
    PARTITION BY run_id, step ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)) AS ns
  FROM clipped
), covered AS (SELECT run_id, step, sum(greatest(ns, 0)) AS ns FROM fresh GROUP BY run_id, step)
SELECT s.run_id, s.attempt, s.step, s.duration_s, coalesce(c.ns, 0) / 1e9 AS covered_s,
  s.duration_s - coalesce(c.ns, 0) / 1e9 AS unattributed_s, coalesce(c.ns, 0) / nullif(s.end_ns - s.start_ns, 0) AS fraction
FROM v_steps s LEFT JOIN covered c ON c.run_id = s.run_id AND c.step = s.step;
