-- What of each interval is not spent in its children: for a relation with id, parent_id, start_ns and end_ns, its duration and
-- its own part in nanoseconds. Children that overlap count once, and only as far as they lie inside. NULL while it is open.
-- Example: WITH s AS (SELECT span_id AS id, parent_span_id AS parent_id, start_ns, end_ns FROM v_spans WHERE step = 1)
-- FROM intervals_self_time('s') ORDER BY self_ns DESC;
CREATE OR REPLACE MACRO intervals_self_time(intervals) AS TABLE
WITH known AS (
  SELECT id, parent_id, start_ns, end_ns FROM query_table(intervals)
), clipped AS (
  SELECT p.id, greatest(c.start_ns, p.start_ns) AS start_ns, least(c.end_ns, p.end_ns) AS end_ns
  FROM known p JOIN known c ON c.parent_id = p.id
  WHERE greatest(c.start_ns, p.start_ns) < least(c.end_ns, p.end_ns)
), fresh AS (
  SELECT id, end_ns - greatest(start_ns, coalesce(max(end_ns) OVER (
    PARTITION BY id ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), start_ns)) AS ns
  FROM clipped
), covered AS (SELECT id, CAST(sum(greatest(ns, 0)) AS BIGINT) AS ns FROM fresh GROUP BY id)
SELECT k.id, k.start_ns, k.end_ns, k.end_ns - k.start_ns AS dur, k.end_ns - k.start_ns - coalesce(c.ns, 0) AS self_ns
FROM known k LEFT JOIN covered c ON c.id = k.id;
