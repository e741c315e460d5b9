-- One row per group: its prompt and what its rollouts earned. signal says whether the group teaches anything:
-- all_pass and all_fail have equal rewards, hence zero advantages (all_pass when that reward is above 0); mixed is useful.
-- NULL until a rollout is scored. dropped is why the group was not learned from, NULL where it was. Groups of a validation, baselines, and groups of steps redone after a resume are left out.
CREATE OR REPLACE VIEW groups AS
WITH prompts AS (
  SELECT * FROM group_prompts
  WHERE hash(run_id, attempt, group_id) NOT IN (
    SELECT hash(run_id, attempt, group_id) FROM rollout_samples WHERE split <> 'train')
  QUALIFY row_number() OVER (PARTITION BY run_id, attempt, group_id ORDER BY time_ns DESC) = 1
), samples AS (
  SELECT run_id, attempt, group_id, rollout_id, max(response_tokens) AS response_tokens,
    max(CAST(finish_reason = 'length' AS INTEGER)) AS truncated
  FROM rollout_samples GROUP BY run_id, attempt, group_id, rollout_id
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward FROM rollout_scores GROUP BY run_id, attempt, rollout_id
), drops AS (
  SELECT run_id, attempt, group_id, arg_max(reason, time_ns) AS reason FROM dropped_groups GROUP BY run_id, attempt, group_id
), earned AS (
  SELECT s.run_id, s.attempt, s.group_id, count(*) AS num_rollouts, count(c.reward) AS num_scored, avg(c.reward) AS reward_mean,
    stddev_pop(c.reward) AS reward_std, min(c.reward) AS reward_min, max(c.reward) AS reward_max,
    avg(s.response_tokens) AS response_tokens_mean, CAST(sum(s.truncated) AS BIGINT) AS num_truncated
  FROM samples s
  LEFT JOIN scores c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.rollout_id = s.rollout_id
  GROUP BY s.run_id, s.attempt, s.group_id
)
SELECT p.run_id, p.attempt, p.step, p.group_id, p.prompt_id, p.data_source, p.group_size, coalesce(e.num_rollouts, 0) AS num_rollouts,
  coalesce(e.num_scored, 0) AS num_scored, e.reward_mean, e.reward_std, e.reward_min, e.reward_max,
  e.reward_min = e.reward_max AS zero_variance,
  CASE WHEN e.reward_min < e.reward_max THEN 'mixed' WHEN e.reward_max > 0 THEN 'all_pass' WHEN e.reward_max <= 0 THEN 'all_fail' END
    AS signal,
  d.reason AS dropped,
  e.response_tokens_mean, e.num_truncated, p.prompt_text, p.answer, p.time_ns
FROM prompts p
LEFT JOIN lineage l ON l.run_id = p.run_id AND l.attempt = p.attempt
LEFT JOIN drops d ON d.run_id = p.run_id AND d.attempt = p.attempt AND d.group_id = p.group_id
LEFT JOIN earned e ON e.run_id = p.run_id AND e.attempt = p.attempt AND e.group_id = p.group_id
WHERE l.valid_through_step IS NULL OR p.step <= l.valid_through_step;
