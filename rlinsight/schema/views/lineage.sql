-- Which steps of an attempt count: those up to valid_through_step; all of them when it is NULL.
-- A resume continues from a checkpoint, so what earlier attempts did after that checkpoint is not part of the run any more.
CREATE OR REPLACE VIEW lineage AS
WITH starts AS (
  SELECT run_id, attempt, max(coalesce(resumed_from_step, 0)) AS resumed_from FROM run_starts GROUP BY run_id, attempt
)
SELECT run_id, attempt,
  min(resumed_from) OVER (
    PARTITION BY run_id ORDER BY attempt ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING
  ) AS valid_through_step
FROM starts;
