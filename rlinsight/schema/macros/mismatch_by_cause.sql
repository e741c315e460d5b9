-- The same gap split by what may cause it: position in the response (from pos on, in steps of bucket tokens), whether the prompt came
-- from the prefix cache, whether the request was preempted, whether the rollout's tokens come from several policy_versions, whether
-- these tokens are stale, sampled by other weights than the step started from, and the replica. NULL where no engine reported it.
-- cause is the first of stale weights, preemption and cache hit that holds, else numerics. mismatched counts tokens whose stored values
-- differ; those are rounded unless telemetry.token_decimals is null. usual is the median gap over all rows.
-- Where correction.mode is bypass, old_log_probs are the engine's own: tokens are then compared with the log-probs of the update, where
-- its weights are those that sampled, and the others are left out.
-- Example: FROM mismatch_by_cause('my-run', first_step := 90, bucket := 128) ORDER BY gap DESC;
CREATE OR REPLACE MACRO mismatch_by_cause(run, first_step := NULL, last_step := NULL, bucket := 512) AS TABLE
WITH causes AS (
  SELECT attempt, rollout_id, turn_index, replica, policy_version, cached_tokens > 0 AS cached, num_preemptions > 0 AS preempted
  FROM turn_requests WHERE run_id = run
), samples AS (
  SELECT DISTINCT attempt, rollout_id, policy_version_min < policy_version_max AS mixed FROM rollout_samples WHERE run_id = run
), versions AS (
  SELECT DISTINCT attempt, step, policy_version_in FROM steps WHERE run_id = run
), bypasses AS (
  SELECT attempt, bool_or(json_extract_string(config, '$.algorithm.correction.mode') = 'bypass') AS bypass FROM run_starts
  WHERE run_id = run GROUP BY attempt
), lists AS (
  SELECT c.cached, c.preempted, c.replica, coalesce(s.mixed, false) AS mixed_versions, t.loss_mask, r.rollout_log_probs,
    v.policy_version_in AS trained, coalesce(r.policy_versions, [c.policy_version FOR _ IN r.rollout_log_probs]) AS sampled,
    CASE WHEN b.bypass THEN list_transform(list_zip(t.log_probs, sampled),
      lambda p: CASE WHEN p[2] = t.policy_version THEN p[1] END) ELSE t.old_log_probs END AS own
  FROM rollout_training t JOIN token_runs r
    ON r.run_id = t.run_id AND r.attempt = t.attempt AND r.rollout_id = t.rollout_id AND r.turn_index = t.turn_index
  LEFT JOIN lineage l ON l.run_id = t.run_id AND l.attempt = t.attempt
  LEFT JOIN causes c ON c.attempt = t.attempt AND c.rollout_id = t.rollout_id AND c.turn_index = t.turn_index
  LEFT JOIN samples s ON s.attempt = t.attempt AND s.rollout_id = t.rollout_id
  LEFT JOIN versions v ON v.attempt = t.attempt AND v.step = t.step
  LEFT JOIN bypasses b ON b.attempt = t.attempt
  WHERE t.run_id = run AND r.run_id = run AND (first_step IS NULL OR t.step >= first_step) AND (last_step IS NULL OR t.step <= last_step)
    AND (l.valid_through_step IS NULL OR t.step <= l.valid_through_step)
), gaps AS (
  SELECT cached, preempted, replica, mixed_versions, unnest(range(len(own))) AS pos, unnest(sampled) <> trained AS stale,
    unnest(own) - CAST(unnest(rollout_log_probs) AS DOUBLE) AS gap, unnest(loss_mask) AS in_loss
  FROM lists
), by_cause AS (
  SELECT pos // bucket * bucket AS pos, cached, preempted, mixed_versions, stale, replica,
    CASE WHEN coalesce(stale, mixed_versions) THEN 'stale weights' WHEN preempted THEN 'preemption' WHEN cached THEN 'cache hit'
      ELSE 'numerics' END AS cause,
    count(*) AS tokens, count(*) FILTER (gap <> 0) AS mismatched, avg(abs(gap)) AS gap, max(abs(gap)) AS gap_max
  FROM gaps WHERE in_loss IS DISTINCT FROM false AND gap IS NOT NULL GROUP BY ALL
)
SELECT *, median(gap) OVER () AS usual FROM by_cause;
