-- Rollouts the others had to wait for: those that took over half as long again as the first 90 % of their step needed to end.
-- held_s is how long after those it ended. cause is failed, or what it spent its time on: tool or queue when that is half of it, preempted,
-- long (twice the median tokens), else slow (fewer tokens per second than the others).
-- Example: FROM stragglers('my-run') ORDER BY held_s DESC;
CREATE OR REPLACE MACRO stragglers(run) AS TABLE
WITH samples AS (
  SELECT r.* FROM rollout_samples r LEFT JOIN lineage l ON l.run_id = r.run_id AND l.attempt = r.attempt
  WHERE r.run_id = run AND coalesce(r.split, 'train') = 'train' AND (l.valid_through_step IS NULL OR r.step <= l.valid_through_step)
  QUALIFY row_number() OVER (PARTITION BY r.attempt, r.rollout_id ORDER BY r.end_ns DESC) = 1
), steps_of AS (
  SELECT attempt, step, min(start_ns) AS first_ns, quantile_disc(end_ns, 0.9) AS p90_ns, median(response_tokens) AS usual_tokens
  FROM samples GROUP BY attempt, step
), late AS (
  SELECT s.*, p.p90_ns, p.usual_tokens FROM samples s JOIN steps_of p ON p.attempt = s.attempt AND p.step = s.step
  WHERE s.end_ns - p.first_ns > 1.5 * (p.p90_ns - p.first_ns)
), served AS (
  SELECT t.attempt, t.rollout_id, count(*) AS turns, any_value(t.replica) AS replica, sum(t.queue_s) AS queue_s, sum(t.decode_s) AS decode_s,
    CAST(sum(t.num_preemptions) AS BIGINT) AS preemptions
  FROM turn_requests t WHERE t.run_id = run AND t.rollout_id IN (SELECT rollout_id FROM late) GROUP BY t.attempt, t.rollout_id
), tools AS (
  SELECT attempt, rollout_id, sum(end_ns - start_ns) / 1e9 AS tool_s FROM tool_calls WHERE run_id = run GROUP BY attempt, rollout_id
)
SELECT s.step, s.rollout_id, s.group_id, (s.end_ns - s.p90_ns) / 1e9 AS held_s, (s.end_ns - s.start_ns) / 1e9 AS duration_s, v.replica, v.turns,
  s.response_tokens, s.finish_reason, v.queue_s, v.decode_s, t.tool_s, v.preemptions,
  CASE WHEN s.status = 'error' THEN 'failed' WHEN t.tool_s > 0.5 * (s.end_ns - s.start_ns) / 1e9 THEN 'tool' WHEN v.queue_s > 0.5 * (s.end_ns - s.start_ns) / 1e9 THEN 'queue'
    WHEN v.preemptions > 0 THEN 'preempted' WHEN s.response_tokens >= 2 * s.usual_tokens THEN 'long' ELSE 'slow' END AS cause
FROM late s
LEFT JOIN served v ON v.attempt = s.attempt AND v.rollout_id = s.rollout_id
LEFT JOIN tools t ON t.attempt = s.attempt AND t.rollout_id = s.rollout_id
ORDER BY held_s DESC;
