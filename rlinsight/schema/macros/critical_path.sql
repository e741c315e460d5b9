-- What the steps of a run waited for, in order: at each moment the span whose end everything after it waited for, from the step down
-- its tree. The slices of a step follow each other without a hole and add up to it exactly; a slice of rl.loop or of a phase
-- is time none of its children explains. Give a step or a few: it walks span by span.
-- Example: SELECT name, lane, sum(dur) / 1e9 AS s FROM critical_path('my-run', first_step := 3, last_step := 3) GROUP BY ALL;
CREATE OR REPLACE MACRO critical_path(run, first_step := NULL, last_step := NULL) AS TABLE
WITH RECURSIVE roots AS (
  SELECT step, trace_id, span_id, start_ns, end_ns FROM v_steps
  WHERE run_id = run AND (first_step IS NULL OR step >= first_step) AND (last_step IS NULL OR step <= last_step)
), spans AS (
  SELECT DISTINCT o.trace_id, o.span_id, o.parent_span_id, o.name, o.phase, o.lane, o.start_ns, o.end_ns
  FROM otel_spans o SEMI JOIN roots r ON r.trace_id = o.trace_id
  WHERE o.run_id = run AND (first_step IS NULL OR o.step >= first_step) AND (last_step IS NULL OR o.step <= last_step)
    AND o.end_ns > o.start_ns
), walk AS (
  -- A row: standing at ts inside a span, looking back. The child that ended last before ts takes over until it began.
  SELECT step, trace_id, span_id, start_ns AS floor_ns, end_ns AS ts, 0 AS depth FROM roots
  UNION ALL
  SELECT step, trace_id, m.span_id, m.floor_ns, m.ts, m.depth FROM (
    SELECT step, trace_id, unnest([
      {span_id: child.id, floor_ns: greatest(child.a, floor_ns), ts: least(child.b, ts), depth: depth + 1},
      {span_id: span_id, floor_ns: floor_ns, ts: greatest(child.a, floor_ns), depth: depth}
    ]) AS m
    FROM (
      SELECT w.step, w.trace_id, w.span_id, w.floor_ns, w.ts, w.depth,
        arg_max({id: c.span_id, a: c.start_ns, b: c.end_ns}, (least(c.end_ns, w.ts), -c.start_ns, c.span_id)) AS child
      FROM walk w JOIN spans c ON c.trace_id = w.trace_id AND c.parent_span_id = w.span_id
      WHERE c.start_ns < w.ts AND c.end_ns > w.floor_ns
      GROUP BY w.step, w.trace_id, w.span_id, w.floor_ns, w.ts, w.depth
    )
  ) WHERE m.ts > m.floor_ns
), deepest AS (
  SELECT step, trace_id, ts, arg_max(span_id, depth) AS span_id, max(depth) AS depth FROM walk GROUP BY step, trace_id, ts
), slices AS (
  SELECT d.step, d.trace_id, d.span_id, d.depth,
    coalesce(lag(d.ts) OVER (PARTITION BY d.step, d.trace_id ORDER BY d.ts), r.start_ns) AS start_ns, d.ts AS end_ns
  FROM deepest d JOIN roots r ON r.step = d.step
)
SELECT s.step, s.start_ns, s.end_ns, s.end_ns - s.start_ns AS dur, n.name, n.phase, n.lane, s.depth, s.span_id
FROM slices s JOIN spans n ON n.trace_id = s.trace_id AND n.span_id = s.span_id ORDER BY s.step, s.start_ns;
