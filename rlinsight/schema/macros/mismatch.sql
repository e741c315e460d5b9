-- Training against inference: per step, how far the trainer's log-probs of the sampled tokens are from those the engine reported.
-- mixed_versions: rollouts whose tokens come from more than one policy_version, where a gap is expected; where all come from one, a
-- gap is numerics or weights that were not what they claimed. k3 is the estimator of the KL divergence. worst is the rollout
-- with the largest gap. mismatched counts tokens whose stored values differ; those are rounded unless telemetry.token_decimals is null.
-- usual is the median gap over the steps asked for.
-- Where correction.mode is bypass, old_log_probs are the engine's own: tokens are then compared with the log-probs of the update, where
-- its weights are those that sampled, and the others are left out.
-- Example: FROM mismatch('my-run') WHERE gap > 5 * usual ORDER BY step;
CREATE OR REPLACE MACRO mismatch(run, first_step := NULL, last_step := NULL) AS TABLE
WITH samples AS (
  SELECT DISTINCT attempt, rollout_id, policy_version_min, policy_version_min < policy_version_max AS mixed FROM rollout_samples WHERE run_id = run
), bypasses AS (
  SELECT attempt, bool_or(json_extract_string(config, '$.algorithm.correction.mode') = 'bypass') AS bypass FROM run_starts
  WHERE run_id = run GROUP BY attempt
), lists AS (
  SELECT t.step, coalesce(s.mixed, false) AS mixed_versions, t.rowid AS turn, t.loss_mask, r.rollout_log_probs,
    CASE WHEN b.bypass THEN list_transform(list_zip(t.log_probs, coalesce(r.policy_versions, [s.policy_version_min FOR _ IN t.log_probs])),
      lambda p: CASE WHEN p[2] = t.policy_version THEN p[1] END) ELSE t.old_log_probs END AS own
  FROM rollout_training t JOIN token_runs r
    ON r.run_id = t.run_id AND r.attempt = t.attempt AND r.rollout_id = t.rollout_id AND r.turn_index = t.turn_index
  LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  LEFT JOIN samples s ON s.attempt = t.attempt AND s.rollout_id = t.rollout_id
  LEFT JOIN bypasses b ON b.attempt = t.attempt
  WHERE t.run_id = run AND r.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), gaps AS (
  SELECT step, mixed_versions, turn, unnest(own) - CAST(unnest(rollout_log_probs) AS DOUBLE) AS gap, unnest(loss_mask) AS in_loss
  FROM lists
), by_step AS (
  SELECT step, mixed_versions, count(*) AS tokens, count(*) FILTER (gap <> 0) AS mismatched, avg(abs(gap)) AS gap,
    quantile_cont(abs(gap), 0.99) AS gap_p99, max(abs(gap)) AS gap_max, avg(exp(gap) - 1 - gap) AS k3, arg_max(turn, abs(gap)) AS turn
  FROM gaps WHERE in_loss IS DISTINCT FROM false AND gap IS NOT NULL GROUP BY step, mixed_versions
)
SELECT b.step, b.mixed_versions, b.tokens, b.mismatched, b.gap, b.gap_p99, b.gap_max, b.k3, t.rollout_id AS worst, median(b.gap) OVER () AS usual
FROM by_step b JOIN rollout_training t ON t.rowid = b.turn;
