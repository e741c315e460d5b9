-- Which metrics announce another one: the correlation of every step metric of a run with metric, lag steps later.
-- n is the number of pairs; few pairs correlate by chance.
-- Example: FROM metric_lags('my-run', 'optim/grad_norm') WHERE n >= 30 ORDER BY abs(correlation) DESC LIMIT 10;
CREATE OR REPLACE MACRO metric_lags(run, metric, max_lag := 10) AS TABLE
WITH current AS (
  SELECT m.step, m.name, arg_max(m.value, (m.attempt, m.time_ns)) AS value
  FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE m.run_id = run AND (l.valid_through_step IS NULL OR m.step <= l.valid_through_step) AND isfinite(m.value)
  GROUP BY m.step, m.name
), lags AS (SELECT unnest(range(0, max_lag + 1)) AS lag)
SELECT a.name, g.lag, corr(a.value, b.value) AS correlation, count(*) AS n
FROM lags g JOIN current a ON a.name <> metric JOIN current b ON b.name = metric AND b.step = a.step + g.lag
GROUP BY a.name, g.lag
HAVING count(*) >= 3 AND min(a.value) < max(a.value) AND min(b.value) < max(b.value);
