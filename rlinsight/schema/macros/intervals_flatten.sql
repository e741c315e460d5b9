-- Nested intervals to slices that do not overlap: at each moment the innermost one of a relation with id, start_ns and end_ns, which
-- is the one that began last, of those the one that ends first. The slices of an id are what a flame graph shows of it.
-- One without an end stays open. An interval costs a row of work per edge of another inside it.
-- Example: WITH s AS (SELECT span_id AS id, start_ns, end_ns FROM v_spans WHERE step = 1 AND lane = 'policy/0')
-- FROM intervals_flatten('s');
CREATE OR REPLACE MACRO intervals_flatten(intervals) AS TABLE
WITH known AS (
  SELECT id, start_ns, coalesce(end_ns, 9223372036854775807) AS end_ns FROM query_table(intervals)
  WHERE end_ns IS NULL OR end_ns > start_ns
), moments AS (
  SELECT ts, row_number() OVER (ORDER BY ts) AS r, lead(ts) OVER (ORDER BY ts) AS next_ts
  FROM (SELECT start_ns AS ts FROM known UNION SELECT end_ns FROM known)
), covered AS (
  SELECT k.id, k.start_ns, k.end_ns, unnest(range(a.r, b.r)) AS r
  FROM known k JOIN moments a ON a.ts = k.start_ns JOIN moments b ON b.ts = k.end_ns
), owned AS (
  SELECT r, arg_max(id, (start_ns, -end_ns, id)) AS id FROM covered GROUP BY r
), marked AS (
  SELECT o.id, m.ts AS start_ns, m.next_ts AS end_ns,
    (lag(o.id) OVER w IS DISTINCT FROM o.id OR lag(m.next_ts) OVER w < m.ts) AS begins
  FROM owned o JOIN moments m ON m.r = o.r WINDOW w AS (ORDER BY m.ts)
), numbered AS (
  SELECT id, start_ns, end_ns, sum(CAST(begins AS INTEGER)) OVER (ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS slice FROM marked
)
SELECT any_value(id) AS id, min(start_ns) AS start_ns, nullif(max(end_ns), 9223372036854775807) AS end_ns
FROM numbered GROUP BY slice ORDER BY 2;
