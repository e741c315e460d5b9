-- Each turn with the engine request that served it: waits, tokens and preemptions as the engine measured them, NULL where no engine
-- reported it. tpot_s is the time per token after the first. They find each other by the request's id, and by the request's span being
-- a child of the turn's.
CREATE OR REPLACE VIEW turn_requests AS
WITH by_id AS (
  SELECT * FROM serving_requests WHERE request_id IS NOT NULL
  QUALIFY row_number() OVER (PARTITION BY run_id, attempt, request_id ORDER BY end_ns DESC) = 1
), by_parent AS (
  -- One request may be told twice, by a server's own span and by its client: the latest value that is known.
  SELECT run_id, trace_id, parent_span_id, arg_max(cached_tokens, end_ns) AS cached_tokens, arg_max(queue_s, end_ns) AS queue_s,
    arg_max(prefill_s, end_ns) AS prefill_s, arg_max(decode_s, end_ns) AS decode_s, arg_max(ttft_s, end_ns) AS ttft_s,
    arg_max(e2e_s, end_ns) AS e2e_s, arg_max(num_preemptions, end_ns) AS num_preemptions, arg_max(aborted, end_ns) AS aborted,
    arg_max(corrupted, end_ns) AS corrupted, arg_max(span_id, end_ns) AS span_id
  FROM serving_requests WHERE parent_span_id IS NOT NULL GROUP BY run_id, trace_id, parent_span_id
)
SELECT t.run_id, t.attempt, t.step, t.rollout_id, t.turn_index, t.request_id, t.engine, t.replica, t.start_ns, t.end_ns, t.prompt_tokens,
  t.output_tokens, t.finish_reason, t.policy_version, coalesce(t.cached_tokens, q.cached_tokens, p.cached_tokens) AS cached_tokens,
  coalesce(q.queue_s, p.queue_s) AS queue_s, coalesce(q.prefill_s, p.prefill_s) AS prefill_s,
  coalesce(q.decode_s, p.decode_s) AS decode_s, coalesce(q.ttft_s, p.ttft_s) AS ttft_s, coalesce(q.e2e_s, p.e2e_s) AS e2e_s,
  coalesce(q.num_preemptions, p.num_preemptions) AS num_preemptions, coalesce(q.aborted, p.aborted) AS aborted,
  coalesce(q.corrupted, p.corrupted) AS corrupted, t.span_id, coalesce(q.span_id, p.span_id) AS request_span_id,
  coalesce(q.decode_s, p.decode_s) / nullif(t.output_tokens - 1, 0) AS tpot_s
FROM turns t
LEFT JOIN by_id q ON q.run_id = t.run_id AND q.attempt = t.attempt AND q.request_id = t.request_id
LEFT JOIN by_parent p ON p.run_id = t.run_id AND p.trace_id = t.trace_id AND p.parent_span_id = t.span_id;
