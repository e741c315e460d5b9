-- Is the reward still about what it is for? Each weighted reward component beside each validation metric, over the steps that have both:
-- their slopes per step and their correlation. disagree: over at least five validations, one goes up while the other goes down.
-- Example: FROM reward_vs_eval('my-run') WHERE disagree;
CREATE OR REPLACE MACRO reward_vs_eval(run) AS TABLE
WITH validated AS (
  SELECT e.step, e.dataset, e.metric, arg_max(e.value, e.time_ns) AS value
  FROM evals e LEFT JOIN lineage l ON l.run_id = e.run_id AND l.attempt = e.attempt
  WHERE e.run_id = run AND (l.valid_through_step IS NULL OR e.step <= l.valid_through_step) GROUP BY ALL
), rewarded AS (SELECT step, component, value FROM reward_by_component WHERE run_id = run AND weight <> 0)
SELECT r.component, v.dataset, v.metric, count(*) AS validations, regr_slope(r.value, r.step) AS reward_slope, regr_slope(v.value, v.step) AS eval_slope,
  CASE WHEN min(r.value) < max(r.value) AND min(v.value) < max(v.value) THEN corr(r.value, v.value) END AS correlation,
  coalesce(count(*) >= 5 AND correlation < -0.5, false) AS disagree
FROM rewarded r JOIN validated v ON v.step = r.step GROUP BY r.component, v.dataset, v.metric;
