-- Per step, how much of what was sampled teaches anything: groups by signal, the share of groups without any (zero_variance), the share of
-- response tokens spent on those, and one of their prompts. After dropping: how many groups were left out (dropped; view group_drops says
-- why), and the share without signal among those the step did learn from (zero_variance_learned).
CREATE OR REPLACE VIEW group_signal AS
SELECT run_id, step, count(*) AS groups, count(*) FILTER (signal = 'mixed') AS mixed, count(*) FILTER (signal = 'all_pass') AS all_pass,
  count(*) FILTER (signal = 'all_fail') AS all_fail, avg(CAST(zero_variance AS INTEGER)) AS zero_variance,
  sum(response_tokens_mean * num_rollouts) FILTER (zero_variance) / nullif(sum(response_tokens_mean * num_rollouts), 0) AS wasted_tokens,
  any_value(prompt_id) FILTER (zero_variance) AS example, count(dropped) AS dropped,
  avg(CAST(zero_variance AS INTEGER)) FILTER (dropped IS NULL) AS zero_variance_learned
FROM groups WHERE signal IS NOT NULL GROUP BY run_id, step;
