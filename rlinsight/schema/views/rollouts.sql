-- One row per rollout: how it was sampled, scored and trained on, with its texts. Columns of what has not happened are NULL.
-- staleness: the trainer's policy_version when it consumed the rollout minus the oldest weights that sampled it.
-- split is eval for rollouts of a validation, baseline for those whose reward others are compared with. Rollouts of steps redone after a resume are left out.
CREATE OR REPLACE VIEW rollouts AS
WITH samples AS (
  SELECT * FROM rollout_samples
  QUALIFY row_number() OVER (PARTITION BY run_id, step, attempt, rollout_id ORDER BY end_ns DESC) = 1
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward, arg_max(status, time_ns) AS score_status,
    arg_max(reason, time_ns) AS score_reason
  FROM rollout_scores GROUP BY run_id, attempt, rollout_id
), prompts AS (
  SELECT run_id, attempt, group_id, arg_max(data_source, time_ns) AS data_source, arg_max(answer, time_ns) AS answer
  FROM group_prompts GROUP BY run_id, attempt, group_id
), texts AS (
  SELECT run_id, attempt, rollout_id, arg_min(prompt_text, turn_index) AS prompt_text,
    -- The turns' texts in order: sorting each small list costs a third of string_agg(... ORDER BY turn_index).
    array_to_string(list_transform(list_sort(list({t: turn_index, r: response_text})), lambda turn: turn.r), '')
      AS response_text,
    count(DISTINCT turn_index) AS num_turns
  FROM token_runs GROUP BY run_id, attempt, rollout_id
), training AS (
  SELECT run_id, attempt, rollout_id, max(step) AS step_trained, max(policy_version) AS policy_version_trained,
    max(advantage) AS advantage, CAST(sum(list_aggregate(loss_mask, 'count_if')) AS BIGINT) AS loss_tokens,
    CAST(sum(list_aggregate(clipped, 'count_if')) AS BIGINT) AS clipped_tokens
  FROM rollout_training GROUP BY run_id, attempt, rollout_id
)
SELECT s.run_id, s.attempt, s.step, t.step_trained, s.rollout_id, s.group_id, s.prompt_id, p.data_source, s.sample_index,
  s.status, s.finish_reason, c.reward, c.score_status, c.score_reason, t.advantage, s.prompt_tokens, s.response_tokens,
  x.num_turns, t.loss_tokens, t.clipped_tokens, s.policy_version_min, s.policy_version_max, t.policy_version_trained,
  t.policy_version_trained - s.policy_version_min AS staleness, (s.end_ns - s.start_ns) / 1e9 AS duration_s,
  x.prompt_text, x.response_text, p.answer, s.trace_id, s.span_id, s.start_ns, s.end_ns,
  s.error_type, coalesce(s.split, 'train') AS split, s.env
FROM samples s
LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
LEFT JOIN scores c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.rollout_id = s.rollout_id
LEFT JOIN prompts p ON p.run_id = s.run_id AND p.attempt = s.attempt AND p.group_id = s.group_id
LEFT JOIN texts x ON x.run_id = s.run_id AND x.attempt = s.attempt AND x.rollout_id = s.rollout_id
LEFT JOIN training t ON t.run_id = s.run_id AND t.attempt = s.attempt AND t.rollout_id = s.rollout_id
WHERE l.valid_through_step IS NULL OR s.step <= l.valid_through_step;
