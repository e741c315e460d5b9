-- Metrics endpoints the collector scrapes, and how they do: one row per run and target.
-- up is that of the last scrape; last_error is why it last failed, also once it answers again.
CREATE OR REPLACE VIEW scrape_targets AS
WITH scrapes AS (
  SELECT run_id, attempt, service_name AS target, any_value(json_extract_string(resource_attributes, '$."url.full"')) AS url,
    arg_max(value = 1, time_ns) AS up, count(*) AS scrapes, count(*) FILTER (value = 0) AS failures,
    max(time_ns) AS last_ns, max(time_ns) FILTER (value = 1) AS last_success_ns
  FROM otel_metrics WHERE name = 'up' AND scope_name = 'rlinsight.scrape' GROUP BY ALL
), errors AS (
  SELECT run_id, attempt, service_name AS target, arg_max(json_extract_string(log_attributes, '$."rlinsight.reason"'), time_ns) AS last_error
  FROM otel_logs WHERE event_name = 'rlinsight.scrape.failed' GROUP BY ALL
)
SELECT s.run_id, s.attempt, s.target, s.url, s.up, s.scrapes, s.failures, e.last_error,
  to_time(s.last_ns) AS last_scrape, to_time(s.last_success_ns) AS last_success
FROM scrapes s LEFT JOIN errors e ON e.target = s.target AND e.run_id IS NOT DISTINCT FROM s.run_id AND e.attempt IS NOT DISTINCT FROM s.attempt;
