-- When nothing productive ran on any lane for at least min_s seconds, from the first productive leaf of an attempt to its last: since
-- when, for how long, after and before what, and which phases of the step were open for a tenth of it or more.
-- Example: FROM idle_gaps('my-run', min_s := 60) ORDER BY idle_s DESC;
CREATE OR REPLACE MACRO idle_gaps(run, min_s := 5) AS TABLE
WITH work AS (
  SELECT o.attempt, o.step, o.name, o.start_ns, o.end_ns FROM otel_spans o LEFT JOIN lineage l ON l.run_id = o.run_id AND l.attempt = o.attempt
  WHERE o.run_id = run AND o.bucket = 'productive' AND (l.valid_through_step IS NULL OR o.step IS NULL OR o.step <= l.valid_through_step)
), looked AS (
  SELECT attempt, step, name AS before, start_ns AS end_ns, max(end_ns) OVER w AS start_ns, arg_max(name, end_ns) OVER w AS after,
    arg_max(step, end_ns) OVER w AS after_step
  FROM work WINDOW w AS (PARTITION BY attempt ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), gaps AS (SELECT * FROM looked WHERE end_ns - start_ns >= min_s * 1e9)
SELECT g.attempt, g.after_step, g.step AS before_step, to_time(g.start_ns) AS since, (g.end_ns - g.start_ns) / 1e9 AS idle_s, g.after, g.before,
  list_sort(list(DISTINCT p.phase) FILTER (
    least(p.end_ns, g.end_ns) - greatest(p.start_ns, g.start_ns) >= 0.1 * (g.end_ns - g.start_ns))) AS phases, g.start_ns, g.end_ns
FROM gaps g LEFT JOIN phases p ON p.run_id = run AND p.attempt = g.attempt AND p.step IN (g.step, g.after_step)
GROUP BY ALL ORDER BY g.start_ns;
