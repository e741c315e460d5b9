"""Every question the pages ask of a run, as SQL over the store's views. SQL stands in modules of queries alone; those
of rollouts, traces and metrics are ``rollout_queries``, ``trace_queries`` and ``metric_queries``.

A function takes ``read`` (SQL and named parameters to a DataFrame) first, so it runs the same under Streamlit's cache,
in a test, or in a notebook. Every answer is bounded: by the run and a step range, by a LIMIT, or by a bucket count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Frame = Any  # a pandas DataFrame; its published annotations make every column a union of types
Row = Any  # a row or column of one
Read = Callable[[str, dict[str, Any]], Frame]

MAX_RUNS = 200
MAX_POINTS = 1200  # steps a curve draws one by one; longer runs are averaged into this many buckets
MAX_SPANS = 2500  # bars a browser draws without stutter

# Rows of steps that a resume did again are no part of the run; for ``s`` with a step, left joined to ``lineage l``.
COUNTS = "(l.valid_through_step IS NULL OR s.step IS NULL OR s.step <= l.valid_through_step)"

METRICS = [
    "reward_mean",
    "reward_std",
    "response_length_mean",
    "response_length_max",
    "response_length_truncated",
    "reward_zero_variance_groups",
    "entropy",
    "rollout_kl",
    "rollout_log_prob_gap",
    "rollout_log_prob_gap_max",
    "policy_kl",
    "ref_kl",
    "clip_fraction",
    "grad_norm",
    "grad_norm_embeddings",
    "grad_norm_attention",
    "grad_norm_mlp",
    "grad_norm_norms",
    "grad_norm_head",
    "grad_norm_value_head",
    "grad_norm_lora",
    "grad_norm_other",
    "weights_changed",
    "kl_coef",
    "kl_reward",
    "sampling_rounds",
    "correction_k3",
    "correction_chi2_token",
    "correction_chi2_sequence",
    "correction_effective_sample_size",
    "correction_weight_effective_sample_size",
    "correction_weight_bounded_fraction",
    "correction_rejected_token_fraction",
    "correction_rejected_rollout_fraction",
    "critic_value_loss",
    "critic_explained_variance",
    "critic_value_mean",
    "critic_return_mean",
    "tokens_per_s",
    "generation_tokens_per_s",
]


def versions(read: Read, run_id: str) -> tuple[str, str]:
    """Two cache keys: one moves with every stored batch, one only with what a step leaves behind or the run's end."""
    frame = read(
        """SELECT (SELECT concat_ws('/', count(*), max(committed_ns)) FROM ingest_batches) AS batches,
                  concat_ws('/', (SELECT concat_ws('/', status, last_step, attempts) FROM runs WHERE run_id = $run),
                    (SELECT count(*) FROM step_metrics WHERE run_id = $run),
                    (SELECT count(*) FROM phases WHERE run_id = $run),
                    (SELECT count(*) FROM token_runs WHERE run_id = $run),
                    (SELECT count(*) FROM rollout_scores WHERE run_id = $run),
                    (SELECT count(*) FROM evals WHERE run_id = $run),
                    (SELECT count(*) FROM rollout_training WHERE run_id = $run)) AS steps""",
        {"run": run_id},
    )
    return str(frame["batches"][0]), str(frame["steps"][0])


def runs(read: Read) -> Frame:
    """Newest runs first: identity, status, progress, times in unix ns."""
    return read(
        f"""SELECT run_id, name, project, algorithm, model, status, attempts, started_ns, ended_ns, last_step,
                   total_steps, reason
            FROM runs ORDER BY started_ns DESC NULLS LAST, run_id LIMIT {MAX_RUNS}""",
        {},
    )


def run_facts(read: Read, run_id: str) -> Frame:
    """What the newest attempt of the run was started with: config and host as JSON, code version."""
    return read(
        "SELECT config, config_hash, code_version, host FROM runs WHERE run_id = $run",
        {"run": run_id},
    )


def attempts(read: Read, run_id: str) -> Frame:
    """One row per start of the run, oldest first."""
    return read(
        """SELECT attempt, status, started, duration_s, resumed_from_step, exit_code, reason
           FROM attempts WHERE run_id = $run ORDER BY attempt""",
        {"run": run_id},
    )


def linkage(read: Read, run_id: str) -> Frame:
    """How complete the joins are: edge, rows, rows that found their partner."""
    return read("SELECT edge, n, linked FROM v_linkage WHERE run_id = $run ORDER BY edge", {"run": run_id})


def health(read: Read, run_id: str) -> Frame:
    """What each producer emitted, what is stored, and what was dropped."""
    return read(
        """SELECT service_name, rank, emitted, stored, missing, dropped, refused, retried, queue_length, overhead_s,
                  last_report
           FROM health WHERE run_id = $run ORDER BY service_name, rank""",
        {"run": run_id},
    )


def raised_alerts(read: Read, run_id: str) -> Frame:
    """The latest alerts of the run's own that no rule over curves repeats, each message once; newest first.

    A rule that speaks often leaves room for the latest of each other.
    """
    return read(
        """WITH said AS (
             SELECT step, severity, message, rule, time_ns FROM alerts
             WHERE run_id = $run AND rule NOT IN ('mismatch', 'no_signal')
             QUALIFY row_number() OVER (PARTITION BY rule, message ORDER BY time_ns DESC) = 1),
           chosen AS (
             FROM said ORDER BY row_number() OVER (PARTITION BY rule ORDER BY time_ns DESC), time_ns DESC LIMIT 5)
           SELECT step, severity, message FROM chosen ORDER BY time_ns DESC""",
        {"run": run_id},
    )


def open_spans(read: Read, run_id: str) -> Frame:
    """Spans that began and have not ended, oldest first, beside the median seconds of finished ones of that name.

    Calls of workers are compared with those of their method.
    """
    return read(
        f"""SELECT o.name, o.phase, o.method, o.lane, o.rank, o.step, o.start_ns, o.age_s,
                   CASE WHEN o.method IS NULL THEN
                     (SELECT median((s.end_ns - s.start_ns) / 1e9)
                      FROM otel_spans s LEFT JOIN lineage l USING (run_id, attempt)
                      WHERE s.run_id = $run AND s.name = o.name AND {COUNTS})
                   ELSE
                     (SELECT median((s.end_ns - s.start_ns) / 1e9)
                      FROM worker_calls s LEFT JOIN lineage l USING (run_id, attempt)
                      WHERE s.run_id = $run AND s.method = o.method AND {COUNTS})
                   END AS usual_s
            FROM open_spans o WHERE o.run_id = $run ORDER BY o.start_ns LIMIT 50""",
        {"run": run_id},
    )


def curves(read: Read, run_id: str, points: int = MAX_POINTS) -> Frame:
    """Step metrics, one row per step; runs over ``points`` steps are averaged, ``steps`` says over how many."""
    means = ", ".join(f"avg({name}) AS {name}" for name in METRICS)
    return read(
        f"""WITH m AS (SELECT * FROM train_metrics WHERE run_id = $run),
                 w AS (SELECT greatest(1, ceil(count(*) / {int(points)}))::BIGINT AS width, min(step) AS first FROM m)
            SELECT max(step) AS step, count(*) AS steps, {means}
            FROM m, w GROUP BY (step - first) // width ORDER BY step""",
        {"run": run_id},
    )


def signals(read: Read, run_id: str) -> Frame:
    """Share of a step's groups that all passed, were mixed, all failed."""
    return read(
        f"""WITH g AS (SELECT step, signal FROM groups WHERE run_id = $run AND signal IS NOT NULL),
                 w AS (SELECT greatest(1, ceil((max(step) - min(step) + 1) / {MAX_POINTS}))::BIGINT AS width FROM g)
            SELECT max(step) AS step, avg((signal = 'all_pass')::INT) AS all_pass,
                   avg((signal = 'mixed')::INT) AS mixed,
                   avg((signal = 'all_fail')::INT) AS all_fail
            FROM g, w GROUP BY step // width ORDER BY step""",
        {"run": run_id},
    )


def validation(read: Read, run_id: str) -> Frame:
    """Metrics of each validation: dataset, metric, step (0 is before training), value, std_error over prompts."""
    return read(
        f"""WITH v AS (SELECT * FROM validation WHERE run_id = $run),
                 w AS (SELECT greatest(1, ceil((max(step) - min(step) + 1) / {MAX_POINTS}))::BIGINT AS width FROM v)
            SELECT dataset, metric, max(step) AS step, arg_max(value, step) AS value,
                   arg_max(std_error, step) AS std_error
            FROM v, w GROUP BY dataset, metric, step // width ORDER BY dataset, metric, step""",
        {"run": run_id},
    )


def drops(read: Read, run_id: str) -> Frame:
    """Groups a step sampled and did not learn from, by reason; in long runs the mean over several steps."""
    return read(
        f"""WITH d AS (SELECT * FROM group_drops WHERE run_id = $run),
                 w AS (SELECT greatest(1, ceil((max(step) - min(step) + 1) / {MAX_POINTS}))::BIGINT AS width FROM d)
            SELECT reason, max(step) AS step, sum(groups) / any_value(width) AS groups
            FROM d, w GROUP BY reason, step // width ORDER BY reason, step""",
        {"run": run_id},
    )


def components(read: Read, run_id: str) -> Frame:
    """Mean of each reward component by step over what was sampled to train on, before its weight."""
    return read(
        f"""WITH r AS (SELECT s.step, c.component, c.value FROM rewards c
                       JOIN rollout_samples s USING (run_id, attempt, rollout_id)
                       LEFT JOIN lineage l USING (run_id, attempt)
                       WHERE c.run_id = $run AND coalesce(s.split, 'train') = 'train' AND {COUNTS}),
                 w AS (SELECT greatest(1, ceil((max(step) - min(step) + 1) / {MAX_POINTS}))::BIGINT AS width FROM r)
            SELECT component, max(step) AS step, avg(value) AS value
            FROM r, w GROUP BY component, step // width ORDER BY component, step""",
        {"run": run_id},
    )


def phase_seconds(read: Read, run_id: str, first: int, last: int) -> Frame:
    """Seconds of each controller phase by step, with the step's unattributed rest as phase ``unattributed``.

    ``skipped`` says why a phase did no work.
    """
    return read(
        f"""WITH p AS (
              SELECT p.step, p.phase, sum(p.end_ns - p.start_ns) / 1e9 AS seconds, any_value(p.skipped) AS skipped
              FROM phases p JOIN v_steps s USING (run_id, attempt, step)
              WHERE p.run_id = $run AND p.step BETWEEN $first AND $last GROUP BY ALL
              UNION ALL
              SELECT step, 'unattributed', unattributed_s, NULL FROM v_phase_coverage
              WHERE run_id = $run AND step BETWEEN $first AND $last),
            w AS (SELECT greatest(1, ceil(($last - $first + 1) / {MAX_POINTS // 4}))::BIGINT AS width)
            SELECT max(step) AS step, phase, sum(seconds) / count(DISTINCT step) AS seconds,
                   any_value(skipped) AS skipped
            FROM p, w GROUP BY phase, step // width ORDER BY step""",
        {"run": run_id, "first": first, "last": last},
    )


def step_walls(read: Read, run_id: str, first: int, last: int) -> Frame:
    """Start, end and wall seconds of finished steps."""
    return read(
        """SELECT step, start_ns, end_ns, duration_s AS wall_s
           FROM v_steps WHERE run_id = $run AND step BETWEEN $first AND $last ORDER BY step""",
        {"run": run_id, "first": first, "last": last},
    )


def spans(read: Read, run_id: str, first: int, last: int, limit: int = MAX_SPANS) -> Frame:
    """Longest ``limit`` spans of the steps, open ones first; ``total`` on each row is how many there are."""
    return read(
        f"""SELECT name, phase, method, lane, step, span_id, parent_span_id, start_ns, end_ns, rollout_id, failed,
                   count(*) OVER () AS total
            FROM timeline WHERE run_id = $run AND step BETWEEN $first AND $last
            ORDER BY coalesce(end_ns, start_ns + 1000000000000) - start_ns DESC LIMIT {int(limit)}""",
        {"run": run_id, "first": first, "last": last},
    )


def span_totals(read: Read, run_id: str, first: int, last: int) -> Frame:
    """Count, total, mean and longest seconds by span name and lane, rollouts included."""
    return read(
        """SELECT name, lane, method, count(*) AS n, sum(duration_s) AS total_s, avg(duration_s) AS mean_s,
                  max(duration_s) AS max_s
           FROM timeline WHERE run_id = $run AND step BETWEEN $first AND $last AND end_ns IS NOT NULL
           GROUP BY ALL ORDER BY total_s DESC LIMIT 40""",
        {"run": run_id, "first": first, "last": last},
    )


def catalog(read: Read) -> Frame:
    """Views first, then tables: what each answers, its columns and types."""
    return read(
        """SELECT c.table_name AS relation, v.view_name IS NOT NULL AS is_view,
                  coalesce(v.comment, t.comment) AS about, c.column_name AS name, c.data_type AS type
           FROM duckdb_columns() c
           LEFT JOIN duckdb_views() v ON v.view_name = c.table_name AND v.database_name = c.database_name
           LEFT JOIN duckdb_tables() t ON t.table_name = c.table_name AND t.database_name = c.database_name
           WHERE NOT c.internal AND c.schema_name = 'main'
           -- Where the file's views are of another version, temporary ones stand before them.
           QUALIFY (c.database_name = 'temp') = bool_or(c.database_name = 'temp') OVER (PARTITION BY c.table_name)
           ORDER BY is_view DESC, relation, c.column_index""",
        {},
    )
