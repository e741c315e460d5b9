-- What is going on right now: spans that began and have not ended, oldest first, with their age.
-- method is the worker method of a call.
-- Only of attempts that have not reported their end. status running: the run is alive; lost: it was not heard of for a minute, so this is
-- what it was doing when it went silent.
CREATE OR REPLACE VIEW open_spans AS
WITH live AS (
  SELECT run_id, attempt, status, last_seen_ns FROM attempts WHERE status IN ('running', 'lost')
  QUALIFY attempt = max(attempt) OVER (PARTITION BY run_id)
), ended AS (
  SELECT o.trace_id, o.span_id FROM otel_spans o JOIN live v ON v.run_id = o.run_id AND v.attempt = o.attempt
)
SELECT DISTINCT s.run_id, s.attempt, s.step, s.name, s.phase, s.method, s.lane, s.rank, v.status, to_time(s.start_ns) AS started,
  (CASE v.status WHEN 'running' THEN now_ns() ELSE v.last_seen_ns END - s.start_ns) / 1e9 AS age_s,
  s.service_name, s.trace_id, s.span_id, s.parent_span_id, s.start_ns
FROM span_starts s JOIN live v ON v.run_id = s.run_id AND v.attempt = s.attempt
ANTI JOIN ended e ON e.trace_id = s.trace_id AND e.span_id = s.span_id
ORDER BY s.start_ns;
