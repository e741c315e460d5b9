"""Every question the pages ask of a run, as SQL over the store's views. SQL stands in modules of queries alone; those
of traces and metrics are ``trace_queries`` and ``metric_queries``.

A function takes ``read`` (SQL and named parameters to a DataFrame) first, so it runs the same under Streamlit's cache,
in a test, or in a notebook. Every answer is bounded: by the run and a step range, by a LIMIT, or by a bucket count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Frame = Any  # a pandas DataFrame; its published annotations make every column a union of types
Row = Any  # a row or column of one
Read = Callable[[str, dict[str, Any]], Frame]

MAX_RUNS = 200
MAX_POINTS = 1200  # steps a curve draws one by one; longer runs are averaged into this many buckets
MAX_SPANS = 2500  # bars a browser draws without stutter
MAX_TOKENS = 2000  # tokens of one strip
MAX_SIBLINGS = 16

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
    "weights_changed",
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


def open_spans(read: Read, run_id: str) -> Frame:
    """Spans that began and have not ended, oldest first, beside the median seconds of finished spans of that name."""
    return read(
        f"""SELECT o.name, o.phase, o.lane, o.rank, o.step, o.start_ns, o.age_s,
                   (SELECT median((s.end_ns - s.start_ns) / 1e9)
                    FROM otel_spans s LEFT JOIN lineage l USING (run_id, attempt)
                    WHERE s.run_id = $run AND s.name = o.name AND {COUNTS}) AS usual_s
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


def components(read: Read, run_id: str) -> Frame:
    """Mean of each reward component by step, before its weight."""
    return read(
        f"""WITH r AS (SELECT s.step, c.component, c.value FROM rewards c
                       JOIN rollout_samples s USING (run_id, attempt, rollout_id)
                       LEFT JOIN lineage l USING (run_id, attempt) WHERE c.run_id = $run AND {COUNTS}),
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


@dataclass(frozen=True)
class RolloutFilter:
    """What the Rollouts page keeps. None or empty means no restriction."""

    first: int | None = None
    last: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    finish: tuple[str, ...] = ()
    signal: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    text: str = ""
    group_id: str | None = None

    def where(self) -> tuple[str, dict[str, Any]]:
        """Conditions on ``rollouts r`` and ``groups g``, with their parameters."""
        tests, params = ["r.run_id = $run"], {}
        bounds = [("r.step >= $first", "first", self.first), ("r.step <= $last", "last", self.last)]
        bounds += [("r.reward >= $low", "low", self.min_reward), ("r.reward <= $high", "high", self.max_reward)]
        bounds += [("r.group_id = $group", "group", self.group_id)]
        for test, key, value in bounds:
            if value is not None:
                tests.append(test)
                params[key] = value
        chosen = [("r.finish_reason", "finish", self.finish), ("r.data_source", "source", self.source)]
        for column, key, values in [*chosen, ("g.signal", "signal", self.signal)]:
            if values:
                slots = [f"{key}{i}" for i in range(len(values))]
                tests.append(f"{column} IN ({', '.join('$' + slot for slot in slots)})")
                params |= dict(zip(slots, values, strict=True))
        if self.text:
            # By turn and straight from the texts: the view would first put every rollout's turns together.
            tests.append(
                """EXISTS (FROM token_runs k
                   WHERE k.run_id = $run AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id
                     AND (contains(lower(k.response_text), lower($text))
                          OR contains(lower(k.prompt_text), lower($text))))"""
            )
            params["text"] = self.text
        return " AND ".join(tests), params


SORTS = {
    "newest": "r.step DESC, r.group_id, r.sample_index",
    "reward, low first": "r.reward ASC NULLS LAST, r.step DESC, r.rollout_id",
    "reward, high first": "r.reward DESC NULLS LAST, r.step DESC, r.rollout_id",
    "longest": "r.response_tokens DESC NULLS LAST, r.step DESC, r.rollout_id",
    "shortest": "r.response_tokens ASC NULLS LAST, r.step DESC, r.rollout_id",
    "largest |advantage|": "abs(r.advantage) DESC NULLS LAST, r.step DESC, r.rollout_id",
    "stalest": "r.staleness DESC NULLS LAST, r.step DESC, r.rollout_id",
}


def rollout_counts(read: Read, run_id: str, chosen: RolloutFilter) -> Frame:
    """How many rollouts the filter keeps, and their mean reward and length."""
    where, params = chosen.where()
    return read(
        f"""SELECT count(*) AS n, avg(r.reward) AS reward, avg(r.response_tokens) AS tokens,
                   avg((r.finish_reason = 'length')::INT) AS truncated
            FROM rollouts r LEFT JOIN groups g USING (run_id, attempt, group_id) WHERE {where}""",
        {"run": run_id} | params,
    )


def rollout_page(read: Read, run_id: str, chosen: RolloutFilter, sort: str, size: int, page: int) -> Frame:
    """One page (from 1) of the filtered rollouts, with the prompt's end and the response's beginning.

    Two reads: which rollouts, then their texts by id. Joined, the texts of the whole run would be put together first.
    """
    where, params = chosen.where()
    found = read(
        f"""SELECT r.attempt, r.rollout_id, r.step, r.reward, r.advantage, r.response_tokens, r.finish_reason,
                   g.signal, r.staleness, r.data_source
            FROM rollouts r LEFT JOIN groups g USING (run_id, attempt, group_id) WHERE {where}
            ORDER BY {SORTS[sort]} LIMIT {int(size)} OFFSET {int(size) * (int(page) - 1)}""",
        {"run": run_id} | params,
    )
    return _texts(read, run_id, found, 400)


def _texts(read: Read, run_id: str, found: Frame, length: int) -> Frame:
    """``found`` with the last ``length`` characters of each prompt and the first of each response."""
    slots = {f"id{i}": rollout_id for i, rollout_id in enumerate(found["rollout_id"])}
    names = ", ".join(f"${slot}" for slot in slots) or "NULL"
    texts = read(
        f"""SELECT attempt, rollout_id, right(arg_min(prompt_text, turn_index), {length}) AS prompt,
                   left(string_agg(response_text, '' ORDER BY turn_index), {length}) AS response
            FROM token_runs WHERE run_id = $run AND rollout_id IN ({names}) GROUP BY attempt, rollout_id""",
        {"run": run_id} | slots,
    )
    return found.merge(texts, on=["attempt", "rollout_id"], how="left")


def rollout_choices(read: Read, run_id: str) -> Frame:
    """Values the filters offer: finish reasons, data sources, and the first and last step."""
    return read(
        """SELECT list_sort(list(DISTINCT finish_reason) FILTER (finish_reason IS NOT NULL)) AS finish,
                  min(step) AS first, max(step) AS last,
                  (SELECT list_sort(list(DISTINCT data_source) FILTER (data_source IS NOT NULL)) FROM group_prompts
                   WHERE run_id = $run) AS sources
           FROM rollout_samples WHERE run_id = $run""",
        {"run": run_id},
    )


def rollout(read: Read, run_id: str, rollout_id: str) -> Frame:
    """Everything about one rollout but its tokens."""
    return read(
        """SELECT r.*, g.signal FROM rollouts r LEFT JOIN groups g USING (run_id, attempt, group_id)
           WHERE r.run_id = $run AND r.rollout_id = $rollout LIMIT 1""",
        {"run": run_id, "rollout": rollout_id},
    )


def reward_components(read: Read, run_id: str, rollout_id: str) -> Frame:
    """Components of one rollout's reward and what each contributed."""
    return read(
        """SELECT component, value, weight, value * weight AS contribution, label, explanation, latency_s * 1e3 AS ms
           FROM rewards WHERE run_id = $run AND rollout_id = $rollout ORDER BY abs(value * weight) DESC, component""",
        {"run": run_id, "rollout": rollout_id},
    )


def tokens(read: Read, run_id: str, rollout_id: str, start: int, limit: int = MAX_TOKENS) -> Frame:
    """At most ``limit`` tokens of a rollout from position ``start``; ``total`` is how many it has."""
    return read(
        f"""SELECT turn_index, pos, token_id, piece, rollout_log_prob, old_log_prob, log_prob, ref_log_prob, entropy,
                   advantage, in_loss, clipped, count(*) OVER () AS total
            FROM tokens WHERE run_id = $run AND rollout_id = $rollout
            ORDER BY turn_index, pos LIMIT {int(limit)} OFFSET $start""",
        {"run": run_id, "rollout": rollout_id, "start": start},
    )


def siblings(read: Read, run_id: str, group_id: str) -> Frame:
    """At most MAX_SIBLINGS rollouts of the group, best reward first; ``total`` is how many it has."""
    found = read(
        f"""SELECT attempt, rollout_id, sample_index, reward, advantage, response_tokens, finish_reason,
                   count(*) OVER () AS total
            FROM rollouts WHERE run_id = $run AND group_id = $group
            ORDER BY reward DESC NULLS LAST, sample_index LIMIT {MAX_SIBLINGS}""",
        {"run": run_id, "group": group_id},
    )
    return _texts(read, run_id, found, 2000)


def trace(read: Read, trace_id: str) -> Frame:
    """Spans of one trace in order of their start."""
    return read(
        """SELECT name, lane, start_ns, (end_ns - start_ns) / 1e9 AS seconds, status_message, span_id, parent_span_id
           FROM v_spans WHERE trace_id = $trace ORDER BY start_ns, end_ns DESC LIMIT 200""",
        {"trace": trace_id},
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
