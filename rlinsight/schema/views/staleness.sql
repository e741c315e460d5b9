-- Per step, the rollouts its updates consumed by how old the weights were that sampled them, in optimizer steps: staleness when the update
-- consumed them, at_start when the step began. A step of several updates makes its own rollouts stale; at_start is above 0 only
-- where they were sampled before it. mixed_versions of them span an update. step is the step that trained.
CREATE OR REPLACE VIEW staleness AS
WITH trained AS (
  SELECT DISTINCT run_id, attempt, step, rollout_id, policy_version, advantage FROM rollout_training
), samples AS (
  SELECT DISTINCT run_id, attempt, rollout_id, policy_version_min, policy_version_max FROM rollout_samples
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward FROM rollout_scores GROUP BY run_id, attempt, rollout_id
)
SELECT t.run_id, t.step, t.policy_version - s.policy_version_min AS staleness, b.policy_version_in - s.policy_version_min AS at_start,
  count(DISTINCT t.rollout_id) AS rollouts, count(*) FILTER (s.policy_version_min < s.policy_version_max) AS mixed_versions,
  avg(c.reward) AS reward, avg(t.advantage) AS advantage
FROM trained t
LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
JOIN samples s ON s.run_id = t.run_id AND s.attempt = t.attempt AND s.rollout_id = t.rollout_id
LEFT JOIN scores c ON c.run_id = t.run_id AND c.attempt = t.attempt AND c.rollout_id = t.rollout_id
LEFT JOIN v_steps b ON b.run_id = t.run_id AND b.attempt = t.attempt AND b.step = t.step
WHERE l.valid_through_step IS NULL OR t.step <= l.valid_through_step
GROUP BY t.run_id, t.step, t.policy_version - s.policy_version_min, b.policy_version_in - s.policy_version_min;
