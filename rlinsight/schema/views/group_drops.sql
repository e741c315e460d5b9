-- Per step and reason, the groups that were sampled and not learned from: how many, their share of the groups the step sampled, the rollouts
-- and response tokens spent on them, and one of their prompts.
CREATE OR REPLACE VIEW group_drops AS
WITH samples AS (
  SELECT run_id, attempt, group_id, rollout_id, max(response_tokens) AS response_tokens
  FROM rollout_samples GROUP BY run_id, attempt, group_id, rollout_id
), spent AS (
  SELECT run_id, attempt, group_id, count(*) AS rollouts, CAST(sum(response_tokens) AS BIGINT) AS response_tokens
  FROM samples GROUP BY run_id, attempt, group_id
), drops AS (
  SELECT run_id, attempt, step, group_id, arg_max(reason, time_ns) AS reason, arg_max(prompt_id, time_ns) AS prompt_id
  FROM dropped_groups GROUP BY run_id, attempt, step, group_id
), sampled AS (SELECT run_id, step, count(*) AS groups FROM groups GROUP BY run_id, step)
SELECT d.run_id, d.step, d.reason, count(*) AS groups, count(*) / any_value(n.groups) AS share, CAST(sum(s.rollouts) AS BIGINT) AS rollouts,
  CAST(sum(s.response_tokens) AS BIGINT) AS response_tokens, min(d.prompt_id) AS example
FROM drops d
LEFT JOIN lineage l ON l.run_id = d.run_id AND l.attempt = d.attempt
LEFT JOIN spent s ON s.run_id = d.run_id AND s.attempt = d.attempt AND s.group_id = d.group_id
LEFT JOIN sampled n ON n.run_id = d.run_id AND n.step = d.step
WHERE l.valid_through_step IS NULL OR d.step <= l.valid_through_step
GROUP BY d.run_id, d.step, d.reason;
