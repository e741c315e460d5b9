-- One row per run: what it is, how far it got, how it stands. Settings and status are those of its latest attempt.
CREATE OR REPLACE VIEW runs AS
WITH latest AS (
  SELECT *, count(*) OVER (PARTITION BY run_id) AS attempts, min(started_ns) OVER (PARTITION BY run_id) AS first_started_ns
  FROM attempts QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY attempt DESC) = 1
), done AS (
  SELECT run_id, count(*) AS steps_done, max(step) AS last_step FROM v_steps GROUP BY run_id
), reward AS (
  SELECT m.run_id, arg_max(m.value, (m.step, m.attempt, m.time_ns)) AS last_reward
  FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE m.name = 'reward/mean' AND (l.valid_through_step IS NULL OR m.step <= l.valid_through_step) GROUP BY m.run_id
)
SELECT a.run_id, a.name, a.project, a.algorithm, a.model, a.status, a.attempts, to_time(a.first_started_ns) AS started, a.ended,
  a.last_seen, (coalesce(a.ended_ns, a.last_seen_ns) - a.first_started_ns) / 1e9 AS duration_s,
  coalesce(d.steps_done, 0) AS steps_done, d.last_step, a.total_steps, r.last_reward, a.exit_code, a.reason,
  a.config, a.config_hash, a.code_version, a.host, a.first_started_ns AS started_ns, a.ended_ns
FROM latest a LEFT JOIN done d ON d.run_id = a.run_id LEFT JOIN reward r ON r.run_id = a.run_id;
