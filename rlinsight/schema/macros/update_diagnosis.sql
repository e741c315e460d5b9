-- Per step and quantity of update_by_rollout, its mean over loss tokens (token_mean) beside the mean of the rollouts' own means
-- (sequence_mean): where they part, long rollouts are not like short ones, and how the loss weighs tokens matters. highest is the rollout
-- with the highest mean, and highest_mean that. Of rejected the means are over the tokens before rejection.
-- Example: FROM update_diagnosis('my-run', first_step := 7, last_step := 7);
CREATE OR REPLACE MACRO update_diagnosis(run, first_step := NULL, last_step := NULL) AS TABLE
WITH by_rollout AS (FROM update_by_rollout(run, first_step := first_step, last_step := last_step)),
long AS (
  SELECT step, rollout_id, CASE quantity WHEN 'rejected' THEN judged_tokens ELSE loss_tokens END AS tokens, quantity, mean FROM by_rollout UNPIVOT (
    mean FOR quantity IN (clip_fraction, ratio, weight, rejected, advantage, abs_advantage, entropy, policy_kl, ref_kl, value, value_target))
)
SELECT step, quantity, sum(mean * tokens) / sum(tokens) AS token_mean, avg(mean) AS sequence_mean, count(*) AS rollouts,
  arg_max(rollout_id, mean) AS highest, max(mean) AS highest_mean
FROM long GROUP BY step, quantity;
