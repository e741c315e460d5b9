-- Every start of every run: when, from which checkpoint, how it ended, and when it was last heard of.
-- status: what the run reported at its end; else running while some process was heard of in the last minute; else lost
-- (killed, or its telemetry has not arrived). An attempt that was followed by another one is never running.
CREATE OR REPLACE VIEW attempts AS
WITH starts AS (
  SELECT run_id, attempt, min(time_ns) AS started_ns, arg_max(name, time_ns) AS name, arg_max(project, time_ns) AS project,
    arg_max(algorithm, time_ns) AS algorithm, arg_max(model, time_ns) AS model, arg_max(config, time_ns) AS config,
    arg_max(config_hash, time_ns) AS config_hash, arg_max(code_version, time_ns) AS code_version,
    arg_max(host, time_ns) AS host, arg_max(total_steps, time_ns) AS total_steps,
    arg_max(resumed_from_step, time_ns) AS resumed_from_step
  FROM run_starts GROUP BY run_id, attempt
), ends AS (
  SELECT run_id, attempt, max(time_ns) AS ended_ns, arg_max(status, time_ns) AS status, arg_max(exit_code, time_ns) AS exit_code,
    arg_max(reason, time_ns) AS reason
  FROM run_ends GROUP BY run_id, attempt
), heard AS (
  SELECT run_id, attempt, max(ns) AS last_seen_ns, min(first_ns) AS first_seen_ns FROM (
    SELECT run_id, attempt, max(time_ns) AS ns, min(time_ns) AS first_ns FROM producer_health GROUP BY ALL
    UNION ALL SELECT run_id, attempt, max(end_ns), min(start_ns) FROM steps GROUP BY ALL
    UNION ALL SELECT run_id, attempt, max(end_ns), min(start_ns) FROM phases GROUP BY ALL
    UNION ALL SELECT run_id, attempt, max(start_ns), min(start_ns) FROM span_starts GROUP BY ALL
    UNION ALL SELECT run_id, attempt, started_ns, started_ns FROM starts
    UNION ALL SELECT run_id, attempt, ended_ns, ended_ns FROM ends
  ) WHERE run_id IS NOT NULL GROUP BY run_id, attempt
)
SELECT h.run_id, h.attempt, s.name, s.project, s.algorithm, s.model,
  CASE
    WHEN e.run_id IS NOT NULL THEN e.status
    WHEN h.attempt = max(h.attempt) OVER (PARTITION BY h.run_id) AND now_ns() - h.last_seen_ns < 60e9 THEN 'running'
    ELSE 'lost'
  END AS status,
  to_time(coalesce(s.started_ns, h.first_seen_ns)) AS started, to_time(e.ended_ns) AS ended, to_time(h.last_seen_ns) AS last_seen,
  (coalesce(e.ended_ns, h.last_seen_ns) - coalesce(s.started_ns, h.first_seen_ns)) / 1e9 AS duration_s,
  s.resumed_from_step, l.valid_through_step, s.total_steps, e.exit_code, e.reason, s.config, s.config_hash, s.code_version, s.host,
  coalesce(s.started_ns, h.first_seen_ns) AS started_ns, e.ended_ns, h.last_seen_ns
FROM heard h
LEFT JOIN starts s ON s.run_id = h.run_id AND s.attempt = h.attempt
LEFT JOIN ends e ON e.run_id = h.run_id AND e.attempt = h.attempt
LEFT JOIN lineage l ON l.run_id = h.run_id AND l.attempt = h.attempt;
