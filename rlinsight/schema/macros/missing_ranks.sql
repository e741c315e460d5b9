-- Which rank of a worker group did not make a call the others made in the same step: since when they wait for it, and how many calls
-- of that method it has made of how many. Calls count from their start, so it works while the others hang in a collective.
-- Ranks are all that the attempt knows of the group: those that made any call or reported their health, and as many as a call says.
-- What one rank alone does, as a checkpoint, is nobody else's: a method of one rank counts in a step only, and until it ended well.
-- Example: FROM missing_ranks('my-run') ORDER BY step DESC;
CREATE OR REPLACE MACRO missing_ranks(run) AS TABLE
WITH arrived AS (
  SELECT attempt, step, split_part(lane, '/', 1) AS worker_group, method, rank, span_id, start_ns FROM worker_calls WHERE run_id = run
  UNION
  SELECT attempt, step, split_part(lane, '/', 1), method, rank, span_id, start_ns FROM span_starts WHERE run_id = run AND name = 'rl.worker.call'
), calls AS (
  SELECT attempt, step, worker_group, method, rank, count(DISTINCT span_id) AS calls, min(start_ns) AS first_ns
  FROM arrived WHERE method IS NOT NULL AND rank IS NOT NULL GROUP BY ALL
), sizes AS (
  SELECT attempt, split_part(lane, '/', 1) AS worker_group, max(world_size) AS size FROM worker_calls WHERE run_id = run GROUP BY ALL
), ranks AS (
  SELECT attempt, worker_group, rank FROM calls
  UNION
  SELECT attempt, replace(service_name, 'rlinsight.', ''), rank FROM producer_health WHERE run_id = run AND rank IS NOT NULL
  UNION
  SELECT attempt, worker_group, unnest(range(size)) FROM sizes WHERE size IS NOT NULL
), alone AS (
  SELECT attempt, worker_group, method FROM calls GROUP BY ALL HAVING count(DISTINCT rank) = 1
), ended AS (
  SELECT DISTINCT attempt, split_part(lane, '/', 1) AS worker_group, method FROM worker_calls WHERE run_id = run AND status_code IS DISTINCT FROM 2
), made AS (
  SELECT c.attempt, c.step, c.worker_group, c.method, max(c.calls) AS calls, min(c.first_ns) AS first_ns
  FROM calls c
  LEFT JOIN alone a ON a.attempt = c.attempt AND a.worker_group = c.worker_group AND a.method = c.method
  LEFT JOIN ended e ON e.attempt = c.attempt AND e.worker_group = c.worker_group AND e.method = c.method
  WHERE a.method IS NULL OR (c.step IS NOT NULL AND e.method IS NULL) GROUP BY ALL
)
SELECT m.attempt, m.step, m.worker_group, m.method, r.rank, coalesce(c.calls, 0) AS calls, m.calls AS expected_calls,
  to_time(m.first_ns) AS others_since
FROM made m
JOIN ranks r ON r.attempt = m.attempt AND r.worker_group = m.worker_group
LEFT JOIN calls c ON c.attempt = m.attempt AND c.step IS NOT DISTINCT FROM m.step AND c.worker_group = m.worker_group AND c.method = m.method
  AND c.rank = r.rank
WHERE coalesce(c.calls, 0) < m.calls ORDER BY m.attempt, m.step, r.rank;
