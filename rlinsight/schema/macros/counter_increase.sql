-- How much a counter (or the count of a histogram or summary) grew between its points.
-- One row per point and series: it grew by increase from from_ns to time_ns, per_s of it a second. A counter that began anew
-- (its value fell, or its start moved) counts from zero. The first point counts from the series' start where that is known:
-- such a row may begin before the run, and increase is NULL where it is not. Sum increase over the rows you ask about.
-- Example: FROM counter_increase('vllm:generation_tokens_total') WHERE run_id = 'my-run' ORDER BY time_ns;
CREATE OR REPLACE MACRO counter_increase(metric) AS TABLE
WITH points AS (
  SELECT DISTINCT ON (run_id, attempt, service_name, service_instance_id, resource_attributes, attributes, time_ns)
    run_id, attempt, rank, name, service_name, service_instance_id, resource_attributes, attributes, time_ns, nullif(start_ns, 0) AS start_ns,
    CASE WHEN kind = 'sum' THEN value ELSE CAST(count AS DOUBLE) END AS value, coalesce(temporality, 'cumulative') = 'delta' AS is_delta
  FROM otel_metrics
  WHERE name = metric AND (is_monotonic OR kind IN ('histogram', 'exponential_histogram', 'summary'))
), steps AS (
  SELECT *, lag(value) OVER series AS before, lag(start_ns) OVER series AS start_before, lag(time_ns) OVER series AS time_before
  FROM points
  WINDOW series AS (PARTITION BY run_id, attempt, service_name, service_instance_id, resource_attributes, attributes ORDER BY time_ns)
), resets AS (
  SELECT *, NOT is_delta AND (coalesce(value < before, false) OR coalesce(start_ns > start_before, false)) AS is_reset FROM steps
), grown AS (
  SELECT *,
    CASE WHEN is_delta OR is_reset THEN value WHEN before IS NOT NULL THEN value - before WHEN start_ns IS NOT NULL THEN value END AS increase,
    CASE WHEN is_delta OR before IS NULL THEN start_ns WHEN is_reset THEN greatest(time_before, start_ns) ELSE time_before END AS from_ns
  FROM resets
)
SELECT run_id, attempt, rank, name, service_name, service_instance_id, resource_attributes, attributes, from_ns, time_ns, value, increase, is_reset,
  increase / nullif((time_ns - from_ns) / 1e9, 0) AS per_s
FROM grown;
