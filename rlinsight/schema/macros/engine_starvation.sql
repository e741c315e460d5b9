-- Were the engines busy while the step waited for rollouts? Per step and replica, from the engine's samples inside phase sample: mean
-- requests running and waiting, KV cache in use, tokens per second, and the share of samples with nothing running. starved: over
-- half of them. Waiting requests beside idle engines mean a scheduler, none at all a caller that sends too little.
-- Example: FROM engine_starvation('my-run') WHERE starved;
CREATE OR REPLACE MACRO engine_starvation(run) AS TABLE
WITH windows AS (
  SELECT DISTINCT p.attempt, p.step, p.start_ns, p.end_ns FROM phases p LEFT JOIN lineage l ON l.run_id = p.run_id AND l.attempt = p.attempt
  WHERE p.run_id = run AND p.phase = 'sample' AND (l.valid_through_step IS NULL OR p.step <= l.valid_through_step)
), inside AS (
  SELECT w.step, w.end_ns, e.* EXCLUDE (step) FROM (SELECT DISTINCT * FROM engine_samples WHERE run_id = run) e
  ASOF JOIN windows w ON w.attempt = e.attempt AND e.time_ns >= w.start_ns
)
SELECT step, engine, replica, count(*) AS samples, avg(running) AS running, avg(coalesce(waiting_capacity, 0) + coalesce(waiting_deferred, 0)) AS waiting,
  avg(kv_usage) AS kv_usage,
  (max(generation_tokens) - min(generation_tokens)) / nullif((max(time_ns) - min(time_ns)) / 1e9, 0) AS tokens_per_s,
  avg(CAST(running = 0 AS INTEGER)) AS idle, avg(CAST(running = 0 AS INTEGER)) > 0.5 AS starved
FROM inside WHERE time_ns <= end_ns GROUP BY step, engine, replica ORDER BY step, replica;
