-- One row per finished step of a run; one that failed or was abandoned (status_code 2 in table steps) is not among them.
-- Steps redone after a resume count once, as the latest attempt did them.
CREATE OR REPLACE VIEW v_steps AS
SELECT s.run_id, s.attempt, s.step, to_time(s.start_ns) AS started, (s.end_ns - s.start_ns) / 1e9 AS duration_s,
  s.policy_version_in, s.policy_version_out, s.num_prompts, s.num_rollouts, s.num_tokens, s.status_code, s.status_message,
  s.trace_id, s.span_id, s.start_ns, s.end_ns
FROM steps s LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
WHERE (l.valid_through_step IS NULL OR s.step <= l.valid_through_step) AND s.status_code IS DISTINCT FROM 2
QUALIFY row_number() OVER (PARTITION BY s.run_id, s.step ORDER BY s.attempt DESC, s.end_ns DESC) = 1;
