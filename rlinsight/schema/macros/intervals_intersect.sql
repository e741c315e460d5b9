-- Overlapping parts of two relations with id, start_ns and end_ns, one row per pair that overlaps. Touching is no overlap.
-- An interval without an end stays open; so does the overlap of two such.
-- Example: WITH a AS (SELECT span_id AS id, start_ns, end_ns FROM phases WHERE phase = 'sample'),
-- b AS (SELECT span_id AS id, start_ns, end_ns FROM weight_syncs) FROM intervals_intersect('a', 'b');
CREATE OR REPLACE MACRO intervals_intersect(a, b) AS TABLE
-- Of a pair, one begins inside the other, and those that begin inside an interval stand next to each other in order of start: two
-- lookups and a list of ranks. DuckDB 1.5 has a join for two inequalities, but not beside a CTE that is used twice: it
-- compares all pairs then (100,000 intervals took three minutes, and take about a second this way).
WITH x AS MATERIALIZED (
  SELECT id, start_ns, coalesce(end_ns, 9223372036854775807) AS end_ns, row_number() OVER (ORDER BY start_ns) AS r
  FROM query_table(a) WHERE end_ns IS NULL OR end_ns > start_ns
), y AS MATERIALIZED (
  SELECT id, start_ns, coalesce(end_ns, 9223372036854775807) AS end_ns, row_number() OVER (ORDER BY start_ns) AS r
  FROM query_table(b) WHERE end_ns IS NULL OR end_ns > start_ns
), x_starts AS (SELECT start_ns AS ts, min(r) AS first_r, max(r) AS last_r FROM x GROUP BY start_ns),
y_starts AS (SELECT start_ns AS ts, min(r) AS first_r, max(r) AS last_r FROM y GROUP BY start_ns),
pairs AS (
  SELECT x.r AS xr, unnest(range(lo.first_r, hi.last_r + 1)) AS yr
  FROM x ASOF JOIN y_starts lo ON x.start_ns <= lo.ts ASOF JOIN y_starts hi ON x.end_ns > hi.ts
  UNION ALL
  SELECT unnest(range(lo.first_r, hi.last_r + 1)), y.r
  FROM y ASOF JOIN x_starts lo ON y.start_ns < lo.ts ASOF JOIN x_starts hi ON y.end_ns > hi.ts
)
SELECT x.id AS a_id, y.id AS b_id, greatest(x.start_ns, y.start_ns) AS start_ns,
  nullif(least(x.end_ns, y.end_ns), 9223372036854775807) AS end_ns
FROM pairs p JOIN x ON x.r = p.xr JOIN y ON y.r = p.yr;
