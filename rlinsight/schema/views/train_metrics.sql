-- One row per step with every step metric as a column; a metric that was not reported is NULL.
-- Column names: policy/, optim/ and perf/ are dropped, other slashes become underscores (reward/mean is reward_mean).
-- Metrics of your own are in table step_metrics. Steps redone after a resume count once, as the latest attempt did them.
CREATE OR REPLACE VIEW train_metrics AS
WITH current AS (
  SELECT m.* FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE l.valid_through_step IS NULL OR m.step <= l.valid_through_step
), wide AS (
  SELECT run_id, attempt, step,
    arg_max(value, time_ns) FILTER (name = 'reward/mean') AS reward_mean,
    arg_max(value, time_ns) FILTER (name = 'reward/std') AS reward_std,
    arg_max(value, time_ns) FILTER (name = 'reward/max') AS reward_max,
    arg_max(value, time_ns) FILTER (name = 'reward/min') AS reward_min,
    arg_max(value, time_ns) FILTER (name = 'reward/zero_variance_groups') AS reward_zero_variance_groups,
    arg_max(value, time_ns) FILTER (name = 'advantage/abs_mean') AS advantage_abs_mean,
    arg_max(value, time_ns) FILTER (name = 'response_length/mean') AS response_length_mean,
    arg_max(value, time_ns) FILTER (name = 'response_length/max') AS response_length_max,
    arg_max(value, time_ns) FILTER (name = 'response_length/truncated') AS response_length_truncated,
    arg_max(value, time_ns) FILTER (name = 'prompt_length/mean') AS prompt_length_mean,
    arg_max(value, time_ns) FILTER (name = 'policy/entropy') AS entropy,
    arg_max(value, time_ns) FILTER (name = 'policy/rollout_kl') AS rollout_kl,
    arg_max(value, time_ns) FILTER (name = 'policy/rollout_log_prob_gap') AS rollout_log_prob_gap,
    arg_max(value, time_ns) FILTER (name = 'policy/rollout_log_prob_gap_max') AS rollout_log_prob_gap_max,
    arg_max(value, time_ns) FILTER (name = 'policy/num_mismatched_tokens') AS num_mismatched_tokens,
    arg_max(value, time_ns) FILTER (name = 'policy/policy_kl') AS policy_kl,
    arg_max(value, time_ns) FILTER (name = 'policy/ref_kl') AS ref_kl,
    arg_max(value, time_ns) FILTER (name = 'policy/clip_fraction') AS clip_fraction,
    arg_max(value, time_ns) FILTER (name = 'policy/ratio_max') AS ratio_max,
    arg_max(value, time_ns) FILTER (name = 'loss/total') AS loss_total,
    arg_max(value, time_ns) FILTER (name = 'loss/policy') AS loss_policy,
    arg_max(value, time_ns) FILTER (name = 'loss/kl') AS loss_kl,
    arg_max(value, time_ns) FILTER (name = 'optim/grad_norm') AS grad_norm,
    arg_max(value, time_ns) FILTER (name = 'optim/learning_rate') AS learning_rate,
    arg_max(value, time_ns) FILTER (name = 'optim/weights_changed') AS weights_changed,
    arg_max(value, time_ns) FILTER (name = 'policy/staleness') AS staleness,
    arg_max(value, time_ns) FILTER (name = 'perf/tokens_per_s') AS tokens_per_s,
    arg_max(value, time_ns) FILTER (name = 'perf/samples_per_s') AS samples_per_s,
    arg_max(value, time_ns) FILTER (name = 'perf/generation_tokens_per_s') AS generation_tokens_per_s
  FROM current GROUP BY run_id, attempt, step
  QUALIFY row_number() OVER (PARTITION BY run_id, step ORDER BY attempt DESC) = 1
)
SELECT w.*, s.duration_s AS step_s, s.started, s.num_rollouts, s.num_tokens, s.policy_version_in, s.policy_version_out, s.trace_id
FROM wide w LEFT JOIN v_steps s ON s.run_id = w.run_id AND s.attempt = w.attempt AND s.step = w.step;
