-- Per step and reward component: its mean before its weight, how often it failed (those are in no mean), and how it goes with the
-- length of the response.
CREATE OR REPLACE VIEW reward_by_component AS
WITH samples AS (
  SELECT DISTINCT run_id, step, attempt, rollout_id, response_tokens FROM rollout_samples WHERE coalesce(split, 'train') = 'train'
)
SELECT s.run_id, s.step, w.component, any_value(w.weight) AS weight, count(*) AS rollouts, avg(w.value) AS value,
  count(*) FILTER (w.value IS NULL) AS failed,
  CASE WHEN min(w.value) < max(w.value) AND min(s.response_tokens) < max(s.response_tokens) THEN corr(w.value, s.response_tokens) END
    AS corr_length
FROM samples s
LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
JOIN rewards w ON w.run_id = s.run_id AND w.attempt = s.attempt AND w.rollout_id = s.rollout_id
WHERE l.valid_through_step IS NULL OR s.step <= l.valid_through_step
GROUP BY s.run_id, s.step, w.component;
