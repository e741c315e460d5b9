-- One row per sampled token, with every log-prob known of it. pos counts from 0 inside the turn.
-- step is the step that sampled the token; policy_version the weights that did, NULL where the whole turn is of its one version.
-- weight is the importance weight of rollout correction, 0 where it rejected the token; value and value_target are the critic's.
-- ratio is the token's own, exp(log_prob - old_log_prob), also with gspo and gmpo, whose loss sees its rollout's; clipped is where a bound
-- of the loss took effect: it cut the gradient, but with cispo, which cuts its weight, and kl_cov, which adds a penalty there.
-- Training columns are NULL until an update consumed the turn.
-- Give run_id and step or rollout_id: the lists are unnested after the filter. Turns sent twice by a foreign sender show twice.
CREATE OR REPLACE VIEW tokens AS
WITH turns_joined AS (
  SELECT r.run_id, r.attempt, r.step, r.rollout_id, r.turn_index, t.step AS step_trained, r.token_ids, r.token_pieces,
    r.rollout_log_probs, r.policy_versions, t.old_log_probs, t.log_probs, t.ref_log_probs, t.entropy, t.advantages, t.loss_mask, t.clipped,
    t.weights, t.critic_values, t.returns
  FROM token_runs r
  LEFT JOIN lineage l ON l.run_id = r.run_id AND l.attempt = r.attempt
  LEFT JOIN rollout_training t
    ON t.run_id = r.run_id AND t.attempt = r.attempt AND t.rollout_id = r.rollout_id AND t.turn_index = r.turn_index
  WHERE l.valid_through_step IS NULL OR r.step <= l.valid_through_step
)
SELECT run_id, attempt, step, rollout_id, turn_index, step_trained, unnest(range(len(token_ids))) AS pos,
  unnest(token_ids) AS token_id, unnest(token_pieces) AS piece, unnest(rollout_log_probs) AS rollout_log_prob,
  unnest(old_log_probs) AS old_log_prob, unnest(log_probs) AS log_prob, unnest(ref_log_probs) AS ref_log_prob,
  unnest(entropy) AS entropy, unnest(advantages) AS advantage, unnest(loss_mask) AS in_loss, unnest(clipped) AS clipped,
  unnest(policy_versions) AS policy_version, unnest(weights) AS weight, unnest(critic_values) AS value, unnest(returns) AS value_target,
  exp(unnest(log_probs) - unnest(old_log_probs)) AS ratio
FROM turns_joined;
