-- Overlapping parts of two relations with id, start_ns and end_ns, one row per pair that overlaps.
CREATE OR REPLACE MACRO intervals_intersect(a, b) AS TABLE
SELECT x.id AS a_id, y.id AS b_id, greatest(x.start_ns, y.start_ns) AS start_ns, least(x.end_ns, y.end_ns) AS end_ns
FROM query_table(a) x JOIN query_table(b) y ON x.start_ns < y.end_ns AND y.start_ns < x.end_ns;
