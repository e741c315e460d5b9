-- What every process did when: one row per span that has a lane, and per span still open (end_ns NULL).
-- Give run_id and step. Rollouts and their turns have their own traces; everything else hangs under the step's rl.loop span.
-- Spans of steps redone after a resume are left out.
CREATE OR REPLACE VIEW timeline AS
WITH spans AS (
  SELECT run_id, attempt, step, lane, name, phase, span_attributes ->> '$."rlinsight.worker.method"' AS method, bucket, start_ns, end_ns,
    status_code, rollout_id, turn_index, trace_id, span_id, parent_span_id, service_name
  FROM v_spans WHERE lane IS NOT NULL
  UNION ALL
  SELECT run_id, attempt, step, lane, name, phase, method, NULL, start_ns, NULL, NULL, NULL, NULL, trace_id, span_id, parent_span_id,
    service_name
  FROM open_spans WHERE lane IS NOT NULL
)
SELECT s.run_id, s.attempt, s.step, s.lane, s.name, s.phase, s.method, s.bucket, to_time(s.start_ns) AS started,
  (s.end_ns - s.start_ns) / 1e9 AS duration_s, s.start_ns, s.end_ns, s.status_code = 2 AS failed, s.rollout_id, s.turn_index,
  s.trace_id, s.span_id, s.parent_span_id, s.service_name
FROM spans s LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
WHERE l.valid_through_step IS NULL OR s.step IS NULL OR s.step <= l.valid_through_step;
