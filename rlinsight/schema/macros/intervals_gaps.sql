-- The holes between the intervals of a relation with start_ns and end_ns: from the end of one stretch to the start of the next.
-- What lies before the first and after the last is no gap.
-- Example: WITH busy AS (SELECT start_ns, end_ns FROM phases WHERE step = 1) FROM intervals_gaps('busy') WHERE dur > 1e9;
CREATE OR REPLACE MACRO intervals_gaps(intervals) AS TABLE
WITH stretches AS (
  SELECT end_ns AS start_ns, lead(start_ns) OVER (ORDER BY start_ns) AS end_ns FROM intervals_union(intervals)
)
SELECT start_ns, end_ns, end_ns - start_ns AS dur FROM stretches WHERE end_ns IS NOT NULL ORDER BY 1;
