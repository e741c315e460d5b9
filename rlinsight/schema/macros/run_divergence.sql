-- Where two runs part: per step metric the first step at which they differ by more than tolerance, relative, and both values there; NULL
-- for one that never does. Times and speeds (perf/) are left out.
-- Example: FROM run_divergence('run-a', 'run-b') WHERE first_step IS NOT NULL ORDER BY first_step;
CREATE OR REPLACE MACRO run_divergence(run_a, run_b, tolerance := 1e-3) AS TABLE
WITH current AS (
  SELECT m.run_id, m.step, m.name, arg_max(m.value, (m.attempt, m.time_ns)) AS value
  FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE m.run_id IN (run_a, run_b) AND m.name NOT LIKE 'perf/%' AND (l.valid_through_step IS NULL OR m.step <= l.valid_through_step)
  GROUP BY m.run_id, m.step, m.name
), compared AS (
  SELECT a.name, a.step, a.value AS a, b.value AS b,
    a.value IS DISTINCT FROM b.value AND coalesce(abs(a.value - b.value) > tolerance * greatest(abs(a.value), abs(b.value)), true) AS differs
  FROM current a JOIN current b ON b.name = a.name AND b.step = a.step WHERE a.run_id = run_a AND b.run_id = run_b
)
SELECT name, min(step) FILTER (differs) AS first_step, arg_min(a, step) FILTER (differs) AS value_a, arg_min(b, step) FILTER (differs) AS value_b,
  count(*) AS steps_compared
FROM compared GROUP BY name ORDER BY first_step NULLS LAST, name;
