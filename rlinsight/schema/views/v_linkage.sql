-- How complete are the joins? Per run and edge: n rows on the left, how many of them find their partner, and the fraction.
-- While a run is live, what is still travelling counts as not linked; a finished run should show 1 on every line.
-- rollout->reward, rollout->training and step->metrics are about steps that finished: one that was abandoned or failed owes
-- none of them. Rollouts of a validation (split eval) owe no step (the first comes before any),
-- group, reward or training either; those that reward.on_error dropped, groups that were dropped, and baselines owe no training.
-- A rollout that ended with an error owes no tokens, reward or training.
-- turn->serving_request is about runs whose engines report their requests; span_start->span about spans that should have ended:
-- those of attempts that reported their end.
CREATE OR REPLACE VIEW v_linkage AS
-- Partners are looked up by the hash of their key, and no join is made: at 100,000 rollouts a quarter of the time. That two keys of a
-- million share their 64 bits by chance, and one hides that the other is missing, happens once in thirty million stores.
WITH sampled AS (SELECT hash(run_id, attempt, rollout_id) AS k FROM rollout_samples),
known_steps AS (
  SELECT hash(run_id, attempt, step) AS k FROM steps
  UNION ALL SELECT hash(run_id, attempt, step) FROM span_starts WHERE name = 'rl.loop'
), finished AS (
  SELECT DISTINCT run_id, attempt, step FROM steps WHERE status_code IS DISTINCT FROM 2
), due AS (
  SELECT run_id, hash(run_id, attempt, rollout_id) AS k, hash(run_id, attempt, group_id) AS group_k, split FROM rollout_samples
  WHERE split IS DISTINCT FROM 'eval' AND status IS DISTINCT FROM 'error' AND hash(run_id, attempt, step) IN (SELECT hash(run_id, attempt, step) FROM finished)
), served AS (
  SELECT hash(run_id, attempt, request_id) AS k FROM serving_requests WHERE request_id IS NOT NULL
  UNION ALL SELECT hash(run_id, trace_id, parent_span_id) FROM serving_requests WHERE parent_span_id IS NOT NULL
), edges AS (
  SELECT run_id, 'rollout->step' AS edge, count(*) AS n,
    count(*) FILTER (hash(run_id, attempt, step) IN (SELECT k FROM known_steps)) AS linked FROM rollout_samples
  WHERE split IS DISTINCT FROM 'eval' GROUP BY run_id
  UNION ALL
  SELECT run_id, 'rollout->group', count(*),
    count(*) FILTER (hash(run_id, attempt, group_id) IN (SELECT hash(run_id, attempt, group_id) FROM group_prompts))
  FROM rollout_samples WHERE split IS DISTINCT FROM 'eval' GROUP BY run_id
  UNION ALL
  SELECT run_id, 'rollout->tokens', count(*),
    count(*) FILTER (hash(run_id, attempt, rollout_id) IN (SELECT hash(run_id, attempt, rollout_id) FROM token_runs))
  FROM rollout_samples WHERE status IS DISTINCT FROM 'error' GROUP BY run_id
  UNION ALL
  SELECT run_id, 'rollout->spans', count(*),
    count(*) FILTER (hash(run_id, attempt, rollout_id) IN (SELECT hash(run_id, attempt, rollout_id) FROM turns))
  FROM rollout_samples GROUP BY run_id
  UNION ALL
  SELECT run_id, 'rollout->reward', count(*),
    count(*) FILTER (k IN (SELECT hash(run_id, attempt, rollout_id) FROM rollout_scores)) FROM due GROUP BY run_id
  UNION ALL
  SELECT run_id, 'rollout->training', count(*),
    count(*) FILTER (k IN (SELECT hash(run_id, attempt, rollout_id) FROM rollout_training)) FROM due
  WHERE split IS DISTINCT FROM 'baseline' AND k NOT IN (SELECT hash(run_id, attempt, rollout_id) FROM rollout_scores WHERE status = 'dropped')
    AND group_k NOT IN (SELECT hash(run_id, attempt, group_id) FROM dropped_groups) GROUP BY run_id
  UNION ALL
  SELECT run_id, 'turn->rollout', count(*), count(*) FILTER (hash(run_id, attempt, rollout_id) IN (SELECT k FROM sampled))
  FROM turns GROUP BY run_id
  UNION ALL
  SELECT run_id, 'tokens->rollout', count(*), count(*) FILTER (hash(run_id, attempt, rollout_id) IN (SELECT k FROM sampled))
  FROM token_runs GROUP BY run_id
  UNION ALL
  SELECT run_id, 'reward->rollout', count(*), count(*) FILTER (hash(run_id, attempt, rollout_id) IN (SELECT k FROM sampled))
  FROM rewards GROUP BY run_id
  UNION ALL
  SELECT run_id, 'training->rollout', count(*), count(*) FILTER (hash(run_id, attempt, rollout_id) IN (SELECT k FROM sampled))
  FROM rollout_training GROUP BY run_id
  UNION ALL
  SELECT run_id, 'training->tokens', count(*), count(*) FILTER (
    hash(run_id, attempt, rollout_id, turn_index) IN (SELECT hash(run_id, attempt, rollout_id, turn_index) FROM token_runs))
  FROM rollout_training GROUP BY run_id
  UNION ALL
  SELECT run_id, 'phase->step', count(*), count(*) FILTER (hash(run_id, attempt, step) IN (SELECT k FROM known_steps))
  FROM phases GROUP BY run_id
  UNION ALL
  SELECT run_id, 'step->metrics', count(*),
    count(*) FILTER (hash(run_id, attempt, step) IN (SELECT hash(run_id, attempt, step) FROM step_metrics)) FROM finished GROUP BY run_id
  UNION ALL
  SELECT run_id, 'turn->serving_request', count(*), count(*) FILTER (
    hash(run_id, attempt, request_id) IN (SELECT k FROM served) OR hash(run_id, trace_id, span_id) IN (SELECT k FROM served))
  FROM turns WHERE run_id IN (SELECT run_id FROM serving_requests) GROUP BY run_id
  UNION ALL
  SELECT run_id, 'serving_request->span', count(*), count(*) FILTER (hash(trace_id, span_id) IN (
    SELECT hash(trace_id, span_id) FROM otel_spans WHERE name IN ('rl.engine.request', 'llm_request')))
  FROM serving_requests GROUP BY run_id
  UNION ALL
  SELECT run_id, 'span_start->span', count(*), count(*) FILTER (hash(trace_id, span_id) IN (
    SELECT hash(trace_id, span_id) FROM otel_spans WHERE name IN (SELECT name FROM span_starts)))
  FROM (
    SELECT DISTINCT s.run_id, s.trace_id, s.span_id FROM span_starts s
    SEMI JOIN run_ends e ON e.run_id = s.run_id AND e.attempt = s.attempt
  ) GROUP BY run_id
)
SELECT run_id, edge, n, linked, linked / n AS fraction FROM edges WHERE run_id IS NOT NULL;
