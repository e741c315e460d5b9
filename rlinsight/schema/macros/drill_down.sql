-- From a step to its prompts and rollouts in one table: reward and advantage beside what training saw of the rollout, and the trace to
-- open. gap is the mean |old_log_probs - rollout_log_probs|, moved the mean |log_probs - old_log_probs| of its tokens.
-- Example: FROM drill_down('my-run', 7) ORDER BY reward LIMIT 20;
CREATE OR REPLACE MACRO drill_down(run, of_step) AS TABLE
WITH samples AS (
  SELECT s.* FROM rollout_samples s LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
  WHERE s.run_id = run AND s.step = of_step AND coalesce(s.split, 'train') = 'train' AND (l.valid_through_step IS NULL OR s.step <= l.valid_through_step)
  QUALIFY row_number() OVER (PARTITION BY s.attempt, s.rollout_id ORDER BY s.end_ns DESC) = 1
), scores AS (
  SELECT attempt, rollout_id, arg_max(reward, time_ns) AS reward, arg_max(status, time_ns) AS status FROM rollout_scores
  WHERE run_id = run AND rollout_id IN (SELECT rollout_id FROM samples) GROUP BY ALL
), lists AS (
  SELECT t.attempt, t.rollout_id, t.step AS step_trained, t.advantage, t.policy_version, t.old_log_probs, t.log_probs, r.rollout_log_probs
  FROM rollout_training t LEFT JOIN token_runs r
    ON r.run_id = run AND r.attempt = t.attempt AND r.rollout_id = t.rollout_id AND r.turn_index = t.turn_index
  WHERE t.run_id = run AND t.rollout_id IN (SELECT rollout_id FROM samples)
), trained AS (
  SELECT attempt, rollout_id, max(step_trained) AS step_trained, max(advantage) AS advantage, max(policy_version) AS policy_version,
    avg(list_avg(list_transform(list_zip(old_log_probs, rollout_log_probs), lambda p: abs(p[1] - p[2])))) AS gap,
    avg(list_avg(list_transform(list_zip(log_probs, old_log_probs), lambda p: abs(p[1] - p[2])))) AS moved
  FROM lists GROUP BY attempt, rollout_id
)
SELECT s.step, s.prompt_id, s.group_id, g.signal, s.rollout_id, c.reward, t.advantage, s.status, c.status AS score_status, s.finish_reason,
  s.response_tokens, t.step_trained, t.policy_version - s.policy_version_min AS staleness, t.gap, t.moved, s.attempt, s.trace_id
FROM samples s
LEFT JOIN groups g ON g.run_id = run AND g.step = of_step AND g.attempt = s.attempt AND g.group_id = s.group_id
LEFT JOIN scores c ON c.attempt = s.attempt AND c.rollout_id = s.rollout_id
LEFT JOIN trained t ON t.attempt = s.attempt AND t.rollout_id = s.rollout_id;
