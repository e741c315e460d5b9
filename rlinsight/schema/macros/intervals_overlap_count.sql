-- How many intervals of a relation with start_ns and end_ns are open at each moment: from ts for dur nanoseconds, n of them.
-- An interval holds its start and not its end; one without an end stays open; an empty one counts nowhere.
-- Example: WITH busy AS (SELECT start_ns, end_ns FROM turns WHERE step = 1) FROM intervals_overlap_count('busy') ORDER BY ts;
CREATE OR REPLACE MACRO intervals_overlap_count(intervals) AS TABLE
WITH edges AS (
  SELECT start_ns AS ts, 1 AS delta FROM query_table(intervals) WHERE end_ns IS NULL OR end_ns > start_ns
  UNION ALL
  SELECT end_ns, -1 FROM query_table(intervals) WHERE end_ns > start_ns
), moments AS (SELECT ts, sum(delta) AS delta FROM edges GROUP BY ts)
SELECT ts, CAST(sum(delta) OVER (ORDER BY ts) AS BIGINT) AS n, lead(ts) OVER (ORDER BY ts) - ts AS dur FROM moments;
