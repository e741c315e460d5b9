-- Did a resume continue the run? Per resume and metric, the mean of the window_steps steps before the checkpoint and of those after it. jump:
-- they differ by over six standard deviations of the 20 steps before and by over a tenth; a metric that was constant jumps when it is
-- constant at another value. Times and speeds (perf/) are left out.
-- Example: FROM resume_check('my-run') WHERE jump;
CREATE OR REPLACE MACRO resume_check(run, window_steps := 3) AS TABLE
WITH current AS (
  SELECT m.step, m.name, arg_max(m.value, (m.attempt, m.time_ns)) AS value
  FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE m.run_id = run AND m.name NOT LIKE 'perf/%' AND (l.valid_through_step IS NULL OR m.step <= l.valid_through_step) GROUP BY m.step, m.name
), resumes AS (
  SELECT attempt, resumed_from_step AS checkpoint FROM attempts
  WHERE run_id = run AND resumed_from_step > 0
), compared AS (
  SELECT r.attempt, r.checkpoint, c.name, avg(c.value) FILTER (c.step BETWEEN r.checkpoint - window_steps + 1 AND r.checkpoint) AS before,
    avg(c.value) FILTER (c.step BETWEEN r.checkpoint + 1 AND r.checkpoint + window_steps) AS after,
    stddev_samp(c.value) FILTER (c.step BETWEEN r.checkpoint - 19 AND r.checkpoint) AS spread,
    stddev_samp(c.value) FILTER (c.step > r.checkpoint) AS spread_after
  FROM resumes r JOIN current c ON c.step BETWEEN r.checkpoint - 19 AND r.checkpoint + window_steps
  WHERE isfinite(c.value) GROUP BY ALL
)
SELECT attempt, checkpoint, name, before, after, spread, abs(after - before) > 0.1 * abs(before)
    AND CASE WHEN spread > 0 THEN abs(after - before) > 6 * spread ELSE spread_after = 0 END AS jump
FROM compared ORDER BY attempt, name;
