-- Quantile q of a histogram with explicit bounds, spread evenly inside the bucket it falls into, as Prometheus does it.
-- counts has one entry more than bounds. In the last bucket, which has no upper bound, the answer is its lower one.
-- NULL for an empty histogram.
-- Example: SELECT name, hist_quantile(bounds, bucket_counts, 0.99) FROM otel_metrics WHERE kind = 'histogram';
CREATE OR REPLACE MACRO hist_quantile(bounds, counts, q) AS
  list_transform(
    [list_position(
      list_transform(range(1, len(counts) + 1), lambda n: counts[n] > 0 AND list_sum(counts[1:n]) >= q * list_sum(counts)), true
    )],
    lambda i: CASE
      WHEN i > len(bounds) THEN bounds[len(bounds)]
      ELSE coalesce(bounds[i - 1], least(0, bounds[1]))
        + (bounds[i] - coalesce(bounds[i - 1], least(0, bounds[1])))
        * (q * list_sum(counts) - coalesce(list_sum(counts[1:i - 1]), 0)) / counts[i]
    END
  )[1];
