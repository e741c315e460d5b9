"""What the Metrics page asks: the points a clock sampled, whoever sent them, bucketed for a chart.

As in ``queries``, a function takes ``read`` first and every answer is bounded: by a window of time, by the series that
stand out most, and by a number of buckets. Times are unix ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.queries import Frame, Read

MAX_NAMES = 2000
MAX_SERIES = 8  # of one metric; more lines than colours help nobody
MAX_POINTS = 600  # buckets of a series: a panel is about 700 pixels wide
MAX_PHASES = 200
MAX_STEPS = 40
QUANTILES = (0.5, 0.99)


@dataclass(frozen=True)
class Window:
    """What to look at: a stretch of time, and in it one run with everything that belongs to none; or all there is."""

    since_ns: int
    until_ns: int
    run_id: str | None = None

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of ``where`` and the width of a bucket."""
        width = max(1, -(-(self.until_ns - self.since_ns + 1) // MAX_POINTS))
        return {"since": self.since_ns, "until": self.until_ns, "run": self.run_id, "width": width}

    @property
    def where(self) -> str:
        """Condition on a relation with time_ns and run_id."""
        whose = "" if self.run_id is None else " AND (run_id = $run OR run_id IS NULL)"
        return f"time_ns BETWEEN $since AND $until{whose}"


def extent(read: Read, run_id: str | None) -> tuple[int, int] | None:
    """First and last point of a run, or of the store; None where there is none."""
    where = "time_ns IS NOT NULL" if run_id is None else "run_id = $run"
    found = read(f"SELECT min(time_ns) AS first, max(time_ns) AS last FROM otel_metrics WHERE {where}", {"run": run_id})
    first, last = found["first"][0], found["last"][0]
    return None if last is None or last != last else (int(first), int(last))


def step_window(read: Read, run_id: str, step: int) -> tuple[int, int] | None:
    """Start and end of a finished step."""
    found = read(
        "SELECT start_ns, end_ns FROM v_steps WHERE run_id = $run AND step = $step", {"run": run_id, "step": step}
    )
    return (int(found["start_ns"][0]), int(found["end_ns"][0])) if len(found) else None


def catalog(read: Read, window: Window) -> Frame:
    """Metrics with a point in the window: name, kind, unit, what it is, whether a scrape brought it."""
    return read(
        f"""SELECT name, kind, coalesce(is_monotonic, false) AS is_monotonic, max(unit) AS unit,
                   max(description) AS description, bool_or(coalesce(scope_name = 'rlinsight.scrape', false)) AS scraped
            FROM otel_metrics WHERE {window.where} GROUP BY ALL ORDER BY name, kind LIMIT {MAX_NAMES}""",
        window.params,
    )


def is_rate(kind: str, is_monotonic: bool) -> bool:
    """Whether a metric counts something, so that its change in a second is what to look at."""
    return is_monotonic or kind in ("exponential_histogram", "summary")


def series(read: Read, name: str, kind: str, is_monotonic: bool, window: Window) -> Frame:
    """At most MAX_SERIES series of a metric, those that reach highest, in at most MAX_POINTS buckets each.

    Columns: series, what tells it apart (service_name, service_instance_id, rank, host, attributes), (middle of the
    bucket), value, high, and ``total``, how many series there are. A gauge's value is the mean
    of its bucket and high its maximum; a counter's value is its growth in a second; a histogram's are its median and
    0.99 quantile of what was recorded since the bucket before.
    """
    if kind == "histogram":
        sql = _histogram(window)
    elif is_rate(kind, is_monotonic):
        sql = _rate(window)
    else:
        sql = _gauge(window)
    return read(sql, {**window.params, "name": name, "kind": kind})


_SERIES = "hash(run_id, attempt, service_name, service_instance_id, resource_attributes, attributes)"
_CHOSEN = f"""chosen AS (
  SELECT series, any_value(service_name) AS service_name, any_value(service_instance_id) AS service_instance_id,
         any_value(rank) AS rank, any_value(resource_attributes) ->> '$."host.name"' AS host,
         any_value(attributes) AS attributes, count(*) OVER () AS total
  FROM points GROUP BY series ORDER BY max(peak) DESC NULLS LAST, series LIMIT {MAX_SERIES})"""
_TIME = "($since + bucket * $width + $width // 2)::BIGINT AS time_ns"
_BUCKET = "(time_ns - $since) // $width AS bucket"


def _gauge(window: Window) -> str:
    return f"""WITH points AS MATERIALIZED (
          SELECT *, {_SERIES} AS series, value AS peak, {_BUCKET} FROM otel_metrics
          WHERE name = $name AND kind = $kind AND value IS NOT NULL AND {window.where}),
        {_CHOSEN},
        buckets AS (
          SELECT series, bucket, avg(value) AS value, max(value) AS high
          FROM points SEMI JOIN chosen USING (series) GROUP BY series, bucket)
        SELECT *, {_TIME} FROM buckets JOIN chosen USING (series) ORDER BY series, bucket"""


def _rate(window: Window) -> str:
    """Growth from before the window, of which only the sum is known, is left out."""
    return f"""WITH points AS MATERIALIZED (
          SELECT *, {_SERIES} AS series, per_s AS peak, {_BUCKET} FROM counter_increase($name)
          WHERE {window.where} AND from_ns >= $since AND from_ns < time_ns AND increase IS NOT NULL),
        {_CHOSEN},
        buckets AS (
          SELECT series, bucket, sum(increase) / sum(time_ns - from_ns) * 1e9 AS value, max(per_s) AS high
          FROM points SEMI JOIN chosen USING (series) GROUP BY series, bucket)
        SELECT *, {_TIME} FROM buckets JOIN chosen USING (series) ORDER BY series, bucket"""


def _histogram(window: Window) -> str:
    """Cumulative counts are compared with the bucket before; where they began anew they are all new."""
    median, high = QUANTILES
    return f"""WITH points AS MATERIALIZED (
          SELECT *, {_SERIES} AS series, count AS peak, {_BUCKET} FROM otel_metrics
          WHERE name = $name AND kind = $kind AND len(bounds) > 0 AND len(bucket_counts) = len(bounds) + 1
            AND {window.where}),
        {_CHOSEN},
        latest AS (
          SELECT series, bucket, any_value(temporality) = 'delta' AS is_delta, arg_max(bounds, time_ns) AS bounds,
                 CASE WHEN any_value(temporality) = 'delta'
                      THEN list_reduce(list(bucket_counts::BIGINT[]), lambda a, b:
                             list_transform(list_zip(a, b), lambda pair: pair[1] + pair[2]))
                      ELSE arg_max(bucket_counts::BIGINT[], time_ns) END AS counts,
                 arg_max(count, time_ns) AS n, arg_max(start_ns, time_ns) AS began
          FROM points SEMI JOIN chosen USING (series) GROUP BY series, bucket),
        compared AS (
          SELECT *, lag(counts) OVER earlier AS counts_before,
                 n < lag(n) OVER earlier OR coalesce(began > lag(began) OVER earlier, false)
                   OR bounds <> lag(bounds) OVER earlier AS anew
          FROM latest WINDOW earlier AS (PARTITION BY series ORDER BY bucket)),
        grown AS (
          SELECT series, bucket, bounds, CASE
              WHEN is_delta OR anew THEN counts
              ELSE list_transform(list_zip(counts, counts_before), lambda pair: greatest(pair[1] - pair[2], 0))
            END AS counts
          FROM compared WHERE is_delta OR counts_before IS NOT NULL)
        SELECT g.series, c.* EXCLUDE (series), {_TIME}, hist_quantile(g.bounds, g.counts, {median}) AS value,
               hist_quantile(g.bounds, g.counts, {high}) AS high
        FROM grown g JOIN chosen c USING (series) ORDER BY g.series, bucket"""


def scrape_targets(read: Read, run_id: str | None) -> Frame:
    """Metrics endpoints the collector scrapes for the run or for none, or all of them; the silent ones first."""
    whose = "true" if run_id is None else "(run_id = $run OR run_id IS NULL)"
    return read(
        f"""SELECT target, url, up, scrapes, failures, last_error, last_scrape, last_success, run_id
            FROM scrape_targets WHERE {whose} ORDER BY up, target LIMIT 256""",
        {"run": run_id},
    )


def phases(read: Read, window: Window) -> Frame:
    """Phases of the run in the window that are wide enough to see, the longest MAX_PHASES."""
    return read(
        f"""SELECT phase, start_ns, end_ns FROM phases p LEFT JOIN lineage l USING (run_id, attempt)
            WHERE run_id = $run AND end_ns > $since AND start_ns < $until
              AND end_ns - start_ns >= ($until - $since) // 400
              AND (l.valid_through_step IS NULL OR p.step IS NULL OR p.step <= l.valid_through_step)
            ORDER BY end_ns - start_ns DESC LIMIT {MAX_PHASES}""",
        window.params,
    )


def steps(read: Read, window: Window) -> Frame:
    """Starts of the run's steps in the window, every n-th where there are more than MAX_STEPS."""
    return read(
        f"""WITH s AS (SELECT step, start_ns FROM v_steps
                       WHERE run_id = $run AND start_ns BETWEEN $since AND $until),
                 n AS (SELECT greatest(1, ceil(count(*) / {MAX_STEPS}))::BIGINT AS nth FROM s)
            SELECT step, start_ns FROM s, n WHERE step % nth = 0 ORDER BY step""",
        window.params,
    )
