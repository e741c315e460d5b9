-- Which rank of a worker group did not make a call the others made in the same step: since when they wait for it, and how many calls
-- of that method it has made of how many. Calls count from their start, so it works while the others hang in a collective.
-- Ranks are those that ever made that call in the attempt.
-- Example: FROM missing_ranks('my-run') ORDER BY step DESC;
CREATE OR REPLACE MACRO missing_ranks(run) AS TABLE
WITH arrived AS (
  SELECT attempt, step, split_part(lane, '/', 1) AS worker_group, method, rank, span_id, start_ns FROM worker_calls WHERE run_id = run
  UNION
  SELECT attempt, step, split_part(lane, '/', 1), method, rank, span_id, start_ns FROM span_starts WHERE run_id = run AND name = 'rl.worker.call'
), calls AS (
  SELECT attempt, step, worker_group, method, rank, count(DISTINCT span_id) AS calls, min(start_ns) AS first_ns
  FROM arrived WHERE method IS NOT NULL AND rank IS NOT NULL GROUP BY ALL
), ranks AS (SELECT DISTINCT attempt, worker_group, method, rank FROM calls),
made AS (
  SELECT attempt, step, worker_group, method, max(calls) AS calls, min(first_ns) AS first_ns FROM calls GROUP BY ALL
)
SELECT m.attempt, m.step, m.worker_group, m.method, r.rank, coalesce(c.calls, 0) AS calls, m.calls AS expected_calls,
  to_time(m.first_ns) AS others_since
FROM made m
JOIN ranks r ON r.attempt = m.attempt AND r.worker_group = m.worker_group AND r.method = m.method
LEFT JOIN calls c ON c.attempt = m.attempt AND c.step IS NOT DISTINCT FROM m.step AND c.worker_group = m.worker_group AND c.method = m.method
  AND c.rank = r.rank
WHERE coalesce(c.calls, 0) < m.calls ORDER BY m.attempt, m.step, r.rank;
