-- Where in the response the entropy sits: per step, tenth of the response and finish reason, its mean over loss tokens. usual is the
-- median of that tenth over all steps asked for, whatever the finish reason.
-- Example: FROM entropy_by_position('my-run', first_step := 90, last_step := 100) ORDER BY step, decile;
CREATE OR REPLACE MACRO entropy_by_position(run, first_step := NULL, last_step := NULL) AS TABLE
WITH reasons AS (
  SELECT DISTINCT attempt, rollout_id, finish_reason FROM rollout_samples WHERE run_id = run
), lists AS (
  SELECT t.step, t.attempt, t.rollout_id, t.entropy, t.loss_mask, len(t.entropy) AS total
  FROM rollout_training t LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  WHERE t.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), tokens_of AS (
  SELECT step, attempt, rollout_id, total, unnest(range(total)) AS pos, unnest(entropy) AS entropy, unnest(loss_mask) AS in_loss FROM lists
), deciles AS (
  SELECT k.step, 1 + k.pos * 10 // k.total AS decile, r.finish_reason, avg(k.entropy) AS entropy, count(*) AS tokens
  FROM tokens_of k LEFT JOIN reasons r ON r.attempt = k.attempt AND r.rollout_id = k.rollout_id
  WHERE k.in_loss IS DISTINCT FROM false AND k.entropy IS NOT NULL GROUP BY ALL
)
SELECT step, decile, finish_reason, entropy, tokens, median(entropy) OVER (PARTITION BY decile) AS usual FROM deciles;
