-- Training against inference: per step, how far the trainer's log-probs of the sampled tokens are from those the engine reported.
-- mixed_versions: rollouts whose tokens come from more than one policy_version, where a gap is expected; where all come from one, a
-- gap is numerics or weights that were not what they claimed. k3 is the estimator of the KL divergence. worst is the rollout
-- with the largest gap. usual is the median gap over the steps asked for.
-- Example: FROM mismatch('my-run') WHERE gap > 5 * usual ORDER BY step;
CREATE OR REPLACE MACRO mismatch(run, first_step := NULL, last_step := NULL) AS TABLE
WITH samples AS (
  SELECT DISTINCT attempt, rollout_id, policy_version_min < policy_version_max AS mixed FROM rollout_samples WHERE run_id = run
), lists AS (
  SELECT t.step, t.attempt, t.rollout_id, t.old_log_probs, t.loss_mask, r.rollout_log_probs
  FROM rollout_training t JOIN token_runs r
    ON r.run_id = t.run_id AND r.attempt = t.attempt AND r.rollout_id = t.rollout_id AND r.turn_index = t.turn_index
  LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  WHERE t.run_id = run AND r.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), gaps AS (
  SELECT step, attempt, rollout_id, unnest(old_log_probs) - CAST(unnest(rollout_log_probs) AS DOUBLE) AS gap, unnest(loss_mask) AS in_loss
  FROM lists
), by_step AS (
  SELECT g.step, coalesce(s.mixed, false) AS mixed_versions, count(*) AS tokens, count(*) FILTER (g.gap <> 0) AS mismatched, avg(abs(g.gap)) AS gap,
    quantile_cont(abs(g.gap), 0.99) AS gap_p99, max(abs(g.gap)) AS gap_max, avg(exp(g.gap) - 1 - g.gap) AS k3,
    arg_max(g.rollout_id, abs(g.gap)) AS worst
  FROM gaps g LEFT JOIN samples s ON s.attempt = g.attempt AND s.rollout_id = g.rollout_id
  WHERE g.in_loss IS DISTINCT FROM false AND g.gap IS NOT NULL GROUP BY g.step, coalesce(s.mixed, false)
)
SELECT step, mixed_versions, tokens, mismatched, gap, gap_p99, gap_max, k3, worst, median(gap) OVER () AS usual FROM by_step;
