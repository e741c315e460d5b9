-- Is the text broken, since when and where from? Per step, replica and policy_version: turns, the share that is garbled (over 5 % of the
-- characters unusable), repetitive (over half of its runs of four words said before), and corrupted (the engine saw logits that
-- are not finite). Judged by the last 2,000 characters of a turn, which bounds the time of long ones: what breaks stays broken.
-- Rollouts of a validation and baselines are left out.
-- Example: FROM garbled_output('my-run') WHERE garbled > 0.1 OR repetitive > 0.1 ORDER BY step LIMIT 10;
CREATE OR REPLACE MACRO garbled_output(run, first_step := NULL, last_step := NULL) AS TABLE
WITH texts AS (
  SELECT k.attempt, k.step, k.rollout_id, k.turn_index, garbled_fraction(right(k.response_text, 2000)) > 0.05 AS garbled,
    repeated_fraction(right(k.response_text, 2000)) > 0.5 AS repetitive
  FROM token_runs k LEFT JOIN lineage l ON l.run_id = k.run_id AND l.attempt = k.attempt
  WHERE k.run_id = run AND (first_step IS NULL OR k.step >= first_step) AND (last_step IS NULL OR k.step <= last_step)
    AND (l.valid_through_step IS NULL OR k.step <= l.valid_through_step) AND k.response_text IS NOT NULL
    AND hash(k.attempt, k.rollout_id) NOT IN (SELECT hash(attempt, rollout_id) FROM rollout_samples WHERE run_id = run AND split <> 'train')
), requests AS (SELECT attempt, rollout_id, turn_index, replica, policy_version, corrupted FROM turn_requests WHERE run_id = run)
SELECT t.step, q.replica, q.policy_version, count(*) AS turns, avg(CAST(t.garbled AS INTEGER)) AS garbled, avg(CAST(t.repetitive AS INTEGER)) AS repetitive,
  avg(CAST(q.corrupted AS INTEGER)) AS corrupted, min(t.rollout_id) FILTER (t.garbled OR t.repetitive) AS example
FROM texts t LEFT JOIN requests q ON q.attempt = t.attempt AND q.rollout_id = t.rollout_id AND q.turn_index = t.turn_index
GROUP BY t.step, q.replica, q.policy_version;
