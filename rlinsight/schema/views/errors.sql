-- What went wrong, counted: per run, kind, class and the environment or tool it happened in, with the steps and one case.
-- kind: rollout, request (of an engine, retried or not), score, tool, sync, worker_call, dropped_group, step, run. Steps redone after a resume count as often as they ran.
CREATE OR REPLACE VIEW errors AS
WITH cases AS (
  SELECT run_id, step, 'rollout' AS kind, coalesce(error_type, status) AS type, env AS place, rollout_id AS example
  FROM rollout_samples WHERE status <> 'ok' OR error_type IS NOT NULL
  UNION ALL
  SELECT run_id, step, 'request', error_type, replica, request_id FROM serving_requests WHERE error_type IS NOT NULL
  UNION ALL
  SELECT c.run_id, s.step, 'score', c.reason, NULL, c.rollout_id FROM rollout_scores c
  LEFT JOIN rollout_samples s ON s.run_id = c.run_id AND s.attempt = c.attempt AND s.rollout_id = c.rollout_id
  WHERE c.status <> 'ok'
  UNION ALL
  SELECT run_id, step, 'tool', error_type, tool, rollout_id FROM tool_calls WHERE status_code = 2 OR error_type IS NOT NULL
  UNION ALL
  SELECT run_id, step, 'sync', error_type, replica, span_id FROM weight_syncs WHERE status_code = 2 OR error_type IS NOT NULL
  UNION ALL
  SELECT run_id, step, 'worker_call', method, lane, span_id FROM worker_calls WHERE status_code = 2
  UNION ALL
  SELECT run_id, step, 'dropped_group', reason, env, group_id FROM dropped_groups
  WHERE reason NOT IN ('zero_variance', 'too_easy', 'too_hard')  -- those a run was told to drop: view group_drops
  UNION ALL
  SELECT run_id, step, 'step', status_message, NULL, span_id FROM steps WHERE status_code = 2
  UNION ALL
  SELECT run_id, NULL, 'run', reason, NULL, NULL FROM run_ends WHERE status = 'failed'
)
SELECT run_id, kind, type, place, count(*) AS n, min(step) AS first_step, max(step) AS last_step, min(example) AS example
FROM cases GROUP BY run_id, kind, type, place;
