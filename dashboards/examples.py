"""Questions worth asking of this schema, offered on the SQL page."""

from __future__ import annotations

from dataclasses import dataclass

from rlinsight import schema


@dataclass(frozen=True)
class Example:
    """A question and its SQL; ``{run}`` in it stands for the selected run as a string literal."""

    title: str
    sql: str

    def sql_for(self, run_id: str) -> str:
        """The SQL with the run filled in."""
        return self.sql.replace("{run}", schema.quoted(run_id))


EXAMPLES = (
    Example(
        "Is it learning? Reward, length, entropy and KL by step",
        """SELECT step, reward_mean, response_length_mean, response_length_truncated, entropy, ref_kl,
       clip_fraction, grad_norm
FROM train_metrics
WHERE run_id = {run}
ORDER BY step""",
    ),
    Example(
        "Does it get better on data it is not trained on? Validations, and the best so far",
        """SELECT dataset, metric, step, value, std_error, best, best_step
FROM validation
WHERE run_id = {run}
ORDER BY dataset, metric, step""",
    ),
    Example(
        "Where did each step's time go, and what is unattributed?",
        """SELECT p.step, p.phase, sum(p.end_ns - p.start_ns) / 1e9 AS seconds,
       any_value(c.unattributed_s) AS step_unattributed_s, any_value(c.fraction) AS covered
FROM phases p JOIN v_phase_coverage c USING (run_id, attempt, step)
WHERE p.run_id = {run}
GROUP BY p.step, p.phase
ORDER BY p.step DESC, seconds DESC""",
    ),
    Example(
        "Which prompts teach nothing? Groups whose rewards are all equal",
        """SELECT prompt_id, any_value(prompt_text) AS prompt, signal, count(*) AS groups,
       avg(reward_mean) AS reward, max(step) AS last_step
FROM groups
WHERE run_id = {run} AND zero_variance
GROUP BY prompt_id, signal
ORDER BY groups DESC
LIMIT 100""",
    ),
    Example(
        "Does truncation cost reward?",
        """SELECT step, avg((finish_reason = 'length')::INT) AS truncated,
       avg(reward) FILTER (finish_reason = 'length') AS reward_truncated,
       avg(reward) FILTER (finish_reason <> 'length') AS reward_finished,
       quantile_cont(response_tokens, [0.5, 0.9, 0.99]) AS length_quantiles
FROM rollouts
WHERE run_id = {run} AND split = 'train'
GROUP BY step
ORDER BY step""",
    ),
    Example(
        "Which tokens does the engine see differently from the trainer?",
        """SELECT rollout_id, pos, piece, rollout_log_prob, old_log_prob, old_log_prob - rollout_log_prob AS gap
FROM tokens
WHERE run_id = {run} AND step = (SELECT max(step) FROM v_steps WHERE run_id = {run}) AND in_loss
ORDER BY abs(gap) DESC
LIMIT 50""",
    ),
    Example(
        "Which tokens moved most in the last update?",
        """SELECT rollout_id, pos, piece, exp(log_prob - old_log_prob) AS ratio, advantage, clipped
FROM tokens
WHERE run_id = {run} AND step = (SELECT max(step) FROM v_steps WHERE run_id = {run}) AND in_loss
ORDER BY abs(log_prob - old_log_prob) DESC
LIMIT 50""",
    ),
    Example(
        "What did the last update do? Means over tokens beside means over rollouts",
        """SELECT quantity, token_mean, sequence_mean, rollouts, highest, highest_mean
FROM update_diagnosis({run}, first_step := (SELECT max(step) FROM rollout_training WHERE run_id = {run}))
ORDER BY quantity""",
    ),
    Example(
        "Which groups were sampled and not learned from, and why?",
        """SELECT step, reason, groups, share, rollouts, response_tokens, example
FROM group_drops
WHERE run_id = {run}
ORDER BY step, reason""",
    ),
    Example(
        "Where in the response is the entropy? By tenth of its length",
        """SELECT step, tenth, avg(entropy) AS entropy, count(*) AS tokens
FROM (SELECT step, entropy, ntile(10) OVER (PARTITION BY rollout_id, turn_index ORDER BY pos) AS tenth
      FROM tokens WHERE run_id = {run} AND in_loss
        AND step IN (SELECT unnest([min(step), max(step)]) FROM v_steps WHERE run_id = {run}))
GROUP BY ALL
ORDER BY step, tenth""",
    ),
    Example(
        "Which rollouts held the batch? The last to finish in each step",
        """SELECT step, rollout_id, (end_ns - quantile_cont(end_ns, 0.9) OVER (PARTITION BY step)) / 1e9 AS held_s,
       response_tokens, finish_reason
FROM rollouts
WHERE run_id = {run} AND split = 'train'
QUALIFY row_number() OVER (PARTITION BY step ORDER BY end_ns DESC) = 1
ORDER BY held_s DESC
LIMIT 50""",
    ),
    Example(
        "Reward components: value by step and correlation with length",
        """SELECT r.step, w.component, avg(w.value) AS value, corr(w.value, r.response_tokens) AS corr_with_length
FROM rewards w JOIN rollouts r USING (run_id, attempt, rollout_id)
WHERE r.run_id = {run} AND r.split = 'train'
GROUP BY ALL
ORDER BY r.step, w.component""",
    ),
    Example(
        "Does staleness matter? Reward by policy versions behind",
        """SELECT staleness, count(*) AS rollouts, avg(reward) AS reward, avg(abs(advantage)) AS abs_advantage
FROM rollouts
WHERE run_id = {run} AND split = 'train' AND step_trained IS NOT NULL
GROUP BY staleness
ORDER BY staleness""",
    ),
    Example(
        "What is it doing right now? Open spans",
        """SELECT name, lane, step, age_s FROM open_spans WHERE run_id = {run} ORDER BY age_s DESC""",
    ),
    Example(
        "Did the weights reach the engine? Syncs by version",
        """SELECT step, policy_version, replica, (end_ns - start_ns) / 1e9 AS seconds, bytes, refreshed_bytes,
       status_code
FROM weight_syncs
WHERE run_id = {run}
ORDER BY policy_version DESC, replica""",
    ),
    Example(
        "Is the telemetry complete? Joins, then producers",
        """SELECT edge, n, linked, fraction FROM v_linkage WHERE run_id = {run} ORDER BY fraction, edge""",
    ),
    Example(
        "All runs, newest first",
        """SELECT run_id, status, last_step, total_steps, last_reward, started, duration_s
FROM runs
ORDER BY started DESC""",
    ),
)
