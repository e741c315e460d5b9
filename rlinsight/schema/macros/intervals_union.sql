-- The time covered by at least one interval of a relation with start_ns and end_ns: disjoint stretches in order, and how many
-- intervals (n) make up each. Intervals that touch are one stretch; one without an end makes an open stretch.
-- Example: WITH busy AS (SELECT start_ns, end_ns FROM phases WHERE step = 1) FROM intervals_union('busy');
CREATE OR REPLACE MACRO intervals_union(intervals) AS TABLE
WITH known AS (
  SELECT start_ns, coalesce(end_ns, 9223372036854775807) AS end_ns FROM query_table(intervals) WHERE end_ns IS NULL OR end_ns > start_ns
), marked AS (
  SELECT start_ns, end_ns, coalesce(start_ns > max(end_ns) OVER (
    ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS begins
  FROM known
), numbered AS (
  SELECT start_ns, end_ns, sum(CAST(begins AS INTEGER)) OVER (ORDER BY start_ns, end_ns ROWS UNBOUNDED PRECEDING) AS stretch
  FROM marked
)
SELECT min(start_ns) AS start_ns, nullif(max(end_ns), 9223372036854775807) AS end_ns, count(*) AS n
FROM numbered GROUP BY stretch ORDER BY 1;
