-- How complete are the joins? Per run and edge: n rows on the left, how many of them find their partner, and the fraction.
-- While a run is live, what is still travelling counts as not linked; a finished run should show 1 on every line.
-- rollout->reward, rollout->training and step->metrics are about steps that finished: one that was abandoned or failed owes
-- none of them. Rollouts of a validation (split eval) owe no group, reward or training either.
-- turn->serving_request is about runs whose engines report their requests; span_start->span about spans that should have ended:
-- those of attempts that reported their end.
CREATE OR REPLACE VIEW v_linkage AS
WITH known_steps AS (
  SELECT run_id, attempt, step FROM steps UNION SELECT run_id, attempt, step FROM span_starts WHERE name = 'rl.loop'
), finished AS (
  SELECT DISTINCT run_id, attempt, step FROM steps WHERE status_code IS DISTINCT FROM 2
), due AS (
  FROM rollout_samples SEMI JOIN finished USING (run_id, attempt, step) WHERE split IS DISTINCT FROM 'eval'
), sampled AS (SELECT DISTINCT run_id, attempt, rollout_id FROM rollout_samples),
scored AS (SELECT DISTINCT run_id, attempt, rollout_id FROM rollout_scores),
trained AS (SELECT DISTINCT run_id, attempt, rollout_id FROM rollout_training),
prompts AS (SELECT DISTINCT run_id, attempt, group_id FROM group_prompts),
contents AS (SELECT DISTINCT run_id, attempt, rollout_id, turn_index FROM token_runs),
with_text AS (SELECT DISTINCT run_id, attempt, rollout_id FROM token_runs),
with_turn AS (SELECT DISTINCT run_id, attempt, rollout_id FROM turns),
measured AS (SELECT DISTINCT run_id, attempt, step FROM step_metrics),
closed AS (
  SELECT DISTINCT s.run_id, s.attempt, s.trace_id, s.span_id FROM span_starts s
  SEMI JOIN run_ends e ON e.run_id = s.run_id AND e.attempt = s.attempt
), edges AS (
  SELECT r.run_id, 'rollout->step' AS edge, count(*) AS n, count(k.step) AS linked
  FROM rollout_samples r LEFT JOIN known_steps k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.step = r.step GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->group', count(*), count(k.group_id)
  FROM rollout_samples r LEFT JOIN prompts k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.group_id = r.group_id
  WHERE r.split IS DISTINCT FROM 'eval'
  GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->tokens', count(*), count(k.rollout_id)
  FROM rollout_samples r LEFT JOIN with_text k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id
  GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->spans', count(*), count(k.rollout_id)
  FROM rollout_samples r LEFT JOIN with_turn k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id
  GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->reward', count(*), count(k.rollout_id)
  FROM due r LEFT JOIN scored k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->training', count(*), count(k.rollout_id)
  FROM due r LEFT JOIN trained k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id GROUP BY r.run_id
  UNION ALL
  SELECT t.run_id, 'turn->rollout', count(*), count(k.rollout_id)
  FROM turns t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'tokens->rollout', count(*), count(k.rollout_id)
  FROM token_runs t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id
  GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'reward->rollout', count(*), count(k.rollout_id)
  FROM rewards t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'training->rollout', count(*), count(k.rollout_id)
  FROM rollout_training t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id
  GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'training->tokens', count(*), count(k.rollout_id)
  FROM rollout_training t
  LEFT JOIN contents k
    ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id AND k.turn_index = t.turn_index
  GROUP BY t.run_id
  UNION ALL
  SELECT p.run_id, 'phase->step', count(*), count(k.step)
  FROM phases p LEFT JOIN known_steps k ON k.run_id = p.run_id AND k.attempt = p.attempt AND k.step = p.step GROUP BY p.run_id
  UNION ALL
  SELECT s.run_id, 'step->metrics', count(*), count(m.step)
  FROM finished s LEFT JOIN measured m ON m.run_id = s.run_id AND m.attempt = s.attempt AND m.step = s.step GROUP BY s.run_id
  UNION ALL
  SELECT t.run_id, 'turn->serving_request', count(*), count(t.request_span_id)
  FROM turn_requests t WHERE t.run_id IN (SELECT run_id FROM serving_requests) GROUP BY t.run_id
  UNION ALL
  SELECT q.run_id, 'serving_request->span', count(*), count(o.span_id)
  FROM serving_requests q LEFT JOIN (SELECT DISTINCT run_id, trace_id, span_id FROM otel_spans) o
    ON o.run_id = q.run_id AND o.trace_id = q.trace_id AND o.span_id = q.span_id
  GROUP BY q.run_id
  UNION ALL
  SELECT s.run_id, 'span_start->span', count(*), count(o.span_id)
  FROM closed s LEFT JOIN (SELECT DISTINCT trace_id, span_id FROM otel_spans SEMI JOIN run_ends USING (run_id, attempt)) o
    ON o.trace_id = s.trace_id AND o.span_id = s.span_id
  GROUP BY s.run_id
)
SELECT run_id, edge, n, linked, linked / n AS fraction FROM edges WHERE run_id IS NOT NULL;
