-- What is open far longer than it ever took: open spans older than a minute and five times the longest finished span of their name in
-- the run (longest_s, NULL for one that never finished), calls of workers by method. innermost: nothing hung is open inside it, so that is where it hangs.
CREATE OR REPLACE VIEW hung_spans AS
WITH usual AS (
  SELECT run_id, name, NULL AS method, max(end_ns - start_ns) / 1e9 AS longest_s
  FROM otel_spans WHERE name IN (SELECT name FROM span_starts WHERE method IS NULL) GROUP BY run_id, name
  UNION ALL
  SELECT run_id, 'rl.worker.call', method, max(end_ns - start_ns) / 1e9 FROM worker_calls WHERE method IS NOT NULL GROUP BY run_id, method
), hung AS (
  SELECT o.run_id, o.attempt, o.step, o.name, o.phase, o.method, o.lane, o.rank, o.status, o.started, o.age_s, u.longest_s, o.trace_id, o.span_id,
    o.parent_span_id
  FROM open_spans o LEFT JOIN usual u ON u.run_id = o.run_id AND u.name = o.name AND u.method IS NOT DISTINCT FROM o.method
  WHERE o.age_s > greatest(60, 5 * coalesce(u.longest_s, 0))
)
SELECT h.*, NOT EXISTS (FROM hung c WHERE c.trace_id = h.trace_id AND c.parent_span_id = h.span_id) AS innermost FROM hung h;
