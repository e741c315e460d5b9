-- What the update of a step did with each rollout it consumed: means over the rollout's loss tokens. clip_fraction is the share that a bound
-- of the loss changed, ratio exp(log_prob - old_log_prob), weight the importance weight of rollout correction, policy_kl and ref_kl are k3 of
-- the policy before the update and of the reference, value and value_target the critic's. token_share is the rollout's part of the step's
-- loss tokens. rejected is the share of its tokens that rollout correction weighs 0, those it took out of the loss among them: of 1 and
-- without loss tokens, the whole rollout was rejected in a group that was kept. NULL for what was not recorded.
-- Example: FROM update_by_rollout('my-run', first_step := 7, last_step := 7) ORDER BY clip_fraction DESC LIMIT 20;
CREATE OR REPLACE MACRO update_by_rollout(run, first_step := NULL, last_step := NULL) AS TABLE
WITH lists AS (
  SELECT t.* FROM rollout_training t LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  WHERE t.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), by_token AS (
  SELECT step, attempt, rollout_id, unnest(loss_mask) AS in_loss, CAST(unnest(log_probs) AS DOUBLE) AS log_prob,
    CAST(unnest(old_log_probs) AS DOUBLE) AS old_log_prob, CAST(unnest(ref_log_probs) AS DOUBLE) AS ref_log_prob, unnest(entropy) AS entropy,
    unnest(advantages) AS advantage, unnest(clipped) AS clipped, unnest(weights) AS weight, unnest(critic_values) AS value,
    unnest(returns) AS value_target
  FROM lists
), moved AS (
  SELECT *, log_prob - old_log_prob AS move, log_prob - ref_log_prob AS drift, in_loss IS DISTINCT FROM false AS learnt FROM by_token
  WHERE in_loss IS DISTINCT FROM false OR weight = 0
), groups_of AS (SELECT DISTINCT attempt, rollout_id, group_id FROM rollout_samples WHERE run_id = run)
SELECT m.step, any_value(g.group_id) AS group_id, m.rollout_id, count(*) FILTER (m.learnt) AS loss_tokens,
  count(*) FILTER (m.learnt) / nullif(sum(count(*) FILTER (m.learnt)) OVER (PARTITION BY m.step), 0) AS token_share,
  avg(CAST(m.clipped AS INTEGER)) FILTER (m.learnt) AS clip_fraction, avg(exp(m.move)) FILTER (m.learnt) AS ratio,
  max(exp(m.move)) FILTER (m.learnt) AS ratio_max, avg(m.weight) FILTER (m.learnt) AS weight, avg(CAST(m.weight = 0 AS INTEGER)) AS rejected,
  avg(m.advantage) FILTER (m.learnt) AS advantage, avg(abs(m.advantage)) FILTER (m.learnt) AS abs_advantage,
  avg(m.entropy) FILTER (m.learnt) AS entropy, avg(exp(m.move) - m.move - 1) FILTER (m.learnt) AS policy_kl,
  avg(exp(-m.drift) + m.drift - 1) FILTER (m.learnt) AS ref_kl, avg(m.value) FILTER (m.learnt) AS value,
  avg(m.value_target) FILTER (m.learnt) AS value_target, count(*) AS judged_tokens
FROM moved m LEFT JOIN groups_of g ON g.attempt = m.attempt AND g.rollout_id = m.rollout_id
GROUP BY m.step, m.attempt, m.rollout_id;
