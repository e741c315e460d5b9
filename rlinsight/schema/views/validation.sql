-- One row per validation, dataset and metric, beside the best of that metric so far, itself included: best, its best_step and
-- best_std_error. Best is the highest, of a metric called loss the lowest; of equals the first. std_error is over prompts. Step 0 is
-- before training. Validations redone after a resume count once.
CREATE OR REPLACE VIEW validation AS
WITH current AS (
  SELECT e.*, CASE WHEN e.metric = 'loss' THEN -e.value ELSE e.value END AS merit
  FROM evals e LEFT JOIN lineage l ON l.run_id = e.run_id AND l.attempt = e.attempt
  WHERE l.valid_through_step IS NULL OR e.step <= l.valid_through_step
  QUALIFY row_number() OVER (PARTITION BY e.run_id, e.step, e.dataset, e.metric ORDER BY e.attempt DESC, e.time_ns DESC) = 1
), compared AS (
  SELECT *, arg_max({v: value, s: step, e: std_error}, {merit: merit, earlier: -step}) FILTER (isfinite(value))
    OVER (PARTITION BY run_id, dataset, metric ORDER BY step) AS top
  FROM current
)
SELECT run_id, attempt, step, policy_version, dataset, metric, value, std_error, num_samples, top.v AS best, top.s AS best_step,
  top.e AS best_std_error, time_ns
FROM compared;
