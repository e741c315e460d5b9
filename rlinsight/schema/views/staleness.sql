-- Per step and staleness, the rollouts an update consumed: how many optimizer steps behind were the oldest weights that sampled
-- them, and how did they do. step is the step that trained.
CREATE OR REPLACE VIEW staleness AS
WITH trained AS (
  SELECT DISTINCT run_id, attempt, step, rollout_id, policy_version, advantage FROM rollout_training
), samples AS (
  SELECT DISTINCT run_id, attempt, rollout_id, policy_version_min, policy_version_max FROM rollout_samples
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward FROM rollout_scores GROUP BY run_id, attempt, rollout_id
)
SELECT t.run_id, t.step, t.policy_version - s.policy_version_min AS staleness, count(DISTINCT t.rollout_id) AS rollouts,
  count(*) FILTER (s.policy_version_min < s.policy_version_max) AS mixed_versions, avg(c.reward) AS reward, avg(t.advantage) AS advantage
FROM trained t
LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
JOIN samples s ON s.run_id = t.run_id AND s.attempt = t.attempt AND s.rollout_id = t.rollout_id
LEFT JOIN scores c ON c.run_id = t.run_id AND c.attempt = t.attempt AND c.rollout_id = t.rollout_id
WHERE l.valid_through_step IS NULL OR t.step <= l.valid_through_step
GROUP BY t.run_id, t.step, t.policy_version - s.policy_version_min;
