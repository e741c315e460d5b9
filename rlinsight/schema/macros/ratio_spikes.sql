-- The very tokens behind a spike of the ratio: loss tokens whose probability an update moved by more than the factor above, up or down,
-- largest first. Give the steps: the lists of each are unnested.
-- Example: FROM ratio_spikes('my-run', first_step := 400, last_step := 400) LIMIT 50;
CREATE OR REPLACE MACRO ratio_spikes(run, first_step := NULL, last_step := NULL, above := 2.0) AS TABLE
WITH lists AS (
  SELECT t.* FROM rollout_training t LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  WHERE t.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), moved AS (
  SELECT step, attempt, rollout_id, turn_index, unnest(range(len(log_probs))) AS pos, unnest(log_probs) AS log_prob, unnest(old_log_probs) AS old_log_prob,
    unnest(ref_log_probs) AS ref_log_prob, unnest(advantages) AS advantage, unnest(clipped) AS clipped, unnest(loss_mask) AS in_loss
  FROM lists
), spikes AS (
  SELECT *, exp(CAST(log_prob AS DOUBLE) - old_log_prob) AS ratio FROM moved
  WHERE in_loss IS DISTINCT FROM false AND abs(log_prob - old_log_prob) > ln(above)
)
SELECT s.step, s.rollout_id, s.turn_index, s.pos, r.token_ids[s.pos + 1] AS token_id, r.token_pieces[s.pos + 1] AS piece, s.ratio, s.log_prob,
  s.old_log_prob, s.ref_log_prob, r.rollout_log_probs[s.pos + 1] AS rollout_log_prob, s.advantage, s.clipped
FROM spikes s LEFT JOIN token_runs r
  ON r.run_id = run AND r.attempt = s.attempt AND r.rollout_id = s.rollout_id AND r.turn_index = s.turn_index
ORDER BY abs(s.log_prob - s.old_log_prob) DESC;
