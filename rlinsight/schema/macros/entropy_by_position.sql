-- Where in the response the entropy sits: per step, tenth of the response and finish reason, its mean over loss tokens. usual is the
-- median of that tenth over all steps asked for, whatever the finish reason.
-- Example: FROM entropy_by_position('my-run', first_step := 90, last_step := 100) ORDER BY step, decile;
CREATE OR REPLACE MACRO entropy_by_position(run, first_step := NULL, last_step := NULL) AS TABLE
WITH reasons AS (
  SELECT DISTINCT attempt, rollout_id, finish_reason FROM rollout_samples WHERE run_id = run
), lists AS (
  SELECT t.step, r.finish_reason, t.entropy, t.loss_mask
  FROM rollout_training t LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  LEFT JOIN reasons r ON r.attempt = t.attempt AND r.rollout_id = t.rollout_id
  WHERE t.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), by_token AS (
  SELECT step, finish_reason, unnest(entropy) AS entropy, unnest(loss_mask) AS in_loss,
    1 + unnest(range(len(entropy))) * 10 // len(entropy) AS decile
  FROM lists
), deciles AS (
  SELECT step, decile, finish_reason, avg(entropy) AS entropy, count(*) AS tokens
  FROM by_token WHERE in_loss IS DISTINCT FROM false AND entropy IS NOT NULL GROUP BY step, decile, finish_reason
)
SELECT step, decile, finish_reason, entropy, tokens, median(entropy) OVER (PARTITION BY decile) AS usual FROM deciles;
