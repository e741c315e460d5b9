-- Per step: the share of rollouts that hit max_new_tokens, their reward beside that of the finished ones, and lengths.
CREATE OR REPLACE VIEW truncation AS
WITH samples AS (
  SELECT DISTINCT run_id, step, attempt, rollout_id, finish_reason, response_tokens FROM rollout_samples WHERE coalesce(split, 'train') = 'train'
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward FROM rollout_scores GROUP BY run_id, attempt, rollout_id
)
SELECT s.run_id, s.step, count(*) AS rollouts, avg(CAST(s.finish_reason = 'length' AS INTEGER)) AS truncated,
  avg(c.reward) FILTER (s.finish_reason = 'length') AS reward_truncated,
  avg(c.reward) FILTER (s.finish_reason <> 'length') AS reward_finished,
  quantile_cont(s.response_tokens, 0.5) AS tokens_p50, quantile_cont(s.response_tokens, 0.9) AS tokens_p90,
  quantile_cont(s.response_tokens, 0.99) AS tokens_p99
FROM samples s
LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
LEFT JOIN scores c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.rollout_id = s.rollout_id
WHERE l.valid_through_step IS NULL OR s.step <= l.valid_through_step
GROUP BY s.run_id, s.step;
