"""What the Traces page asks: any trace of the store, whoever sent it, straight from the raw spans and log records.

As in ``queries``, a function takes ``read`` first and every answer is bounded. A span that was sent twice counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.queries import Frame, Read

MAX_SPANS = 250  # rows of one waterfall: 5,000 pixels of page
MAX_LOGS = 500
MAX_LINKS = 20
MAX_SERVICES = 200
MAX_TEXT = 4000  # characters of one log body or attribute list


def version(read: Read) -> str:
    """A cache key that moves with every stored batch."""
    return str(read("SELECT concat_ws('/', count(*), max(committed_ns)) AS key FROM ingest_batches", {})["key"][0])


@dataclass(frozen=True)
class TraceFilter:
    """What the list keeps: traces with at least one span for which all of this holds; None and empty hold."""

    since_ns: int | None = None
    until_ns: int | None = None
    run_id: str | None = None
    service: tuple[str, ...] = ()
    name: str = ""  # anywhere in the span's name, in any case
    min_s: float | None = None
    errors: bool = False
    text: str = ""  # anywhere in the JSON of the span's attributes, in any case

    def where(self) -> tuple[str, dict[str, Any]]:
        """Conditions on ``otel_spans`` with their parameters, the cheap ones first."""
        tests, params = [], {}
        for test, key, value in (
            ("start_ns >= $since", "since", self.since_ns),
            ("start_ns <= $until", "until", self.until_ns),
            ("run_id = $run", "run", self.run_id),
            ("end_ns - start_ns >= $least", "least", None if self.min_s is None else round(self.min_s * 1e9)),
            ("contains(lower(name), lower($name))", "name", self.name or None),
            ("contains(lower(span_attributes::VARCHAR), lower($text))", "text", self.text or None),
        ):
            if value is not None:
                tests.append(test)
                params[key] = value
        if self.errors:
            tests.append("status_code = 2")
        if self.service:
            params |= {f"service{i}": service for i, service in enumerate(self.service)}
            tests.append(f"service_name IN ({', '.join(f'$service{i}' for i in range(len(self.service)))})")
        return " AND ".join(tests) or "true", params


def services(read: Read) -> list[str]:
    """Names of the services that sent spans, those with most spans first."""
    found = read(
        f"""SELECT service_name FROM otel_spans WHERE service_name IS NOT NULL
            GROUP BY service_name ORDER BY count(*) DESC, service_name LIMIT {MAX_SERVICES}""",
        {},
    )
    return [str(name) for name in found["service_name"]]


def extent(read: Read) -> tuple[int, int] | None:
    """Start of the first and of the newest span, unix ns; None in a store without spans."""
    found = read("SELECT min(start_ns) AS first, max(start_ns) AS last FROM otel_spans", {})
    first, last = found["first"][0], found["last"][0]
    return None if last is None or last != last else (int(first), int(last))


def trace_count(read: Read, chosen: TraceFilter) -> int:
    """How many traces the filter keeps."""
    where, params = chosen.where()
    return int(read(f"SELECT count(DISTINCT trace_id) AS n FROM otel_spans WHERE {where}", params)["n"][0])


def trace_page(read: Read, chosen: TraceFilter, size: int, page: int) -> Frame:
    """One page (from 1) of the traces the filter keeps, by their first such span, newest first.

    Two reads: which traces, then what they are by id. ``has_root`` is false while the span everything hangs from is
    not stored; ``name`` and ``service`` are then of the earliest span that is.
    """
    where, params = chosen.where()
    found = read(
        f"""SELECT trace_id, min(start_ns) AS began FROM otel_spans WHERE {where} GROUP BY trace_id
            ORDER BY began DESC, trace_id LIMIT {int(size)} OFFSET {int(size) * (int(page) - 1)}""",
        params,
    )
    slots = {f"id{i}": trace_id for i, trace_id in enumerate(found["trace_id"])}
    whole = read(
        f"""SELECT trace_id, arg_min(name, (parent_span_id IS NOT NULL, start_ns)) AS name,
                   arg_min(coalesce(service_name, ''), (parent_span_id IS NOT NULL, start_ns)) AS service,
                   count(*) FILTER (parent_span_id IS NULL) > 0 AS has_root, min(start_ns) AS start_ns,
                   (max(end_ns) - min(start_ns)) / 1e9 AS duration_s, count(DISTINCT span_id) AS spans,
                   count(DISTINCT span_id) FILTER (status_code = 2) AS errors,
                   count(DISTINCT service_name) AS services, max(run_id) AS run_id, max(step) AS step
            FROM otel_spans WHERE trace_id IN ({_listed(slots)}) GROUP BY trace_id""",
        slots,
    )
    return found[["trace_id"]].merge(whole, on="trace_id", how="left")


def _listed(slots: dict[str, Any]) -> str:
    return ", ".join(f"${slot}" for slot in slots) or "NULL"


def spans(read: Read, trace_id: str, span_id: str | None = None, limit: int = MAX_SPANS) -> Frame:
    """Spans of a trace, open ones too: ``span_id``, then failed ones, then the longest; ``total`` is how many it has.

    ``open_for``: running or lost, by whether the run of an open span is still heard of.
    """
    return read(
        f"""WITH s AS (
              SELECT span_id, parent_span_id, name, service_name, lane, phase,
                     span_attributes ->> '$."rlinsight.worker.method"' AS method, step, rollout_id, start_ns, end_ns,
                     status_code = 2 AS failed, NULL AS open_for
              FROM otel_spans WHERE trace_id = $trace
              QUALIFY row_number() OVER (PARTITION BY span_id ORDER BY ingest_ns DESC) = 1
              UNION ALL
              SELECT span_id, parent_span_id, name, service_name, lane, phase, NULL, step, NULL, start_ns, NULL,
                     false, status FROM open_spans WHERE trace_id = $trace)
            SELECT *, count(*) OVER () AS total FROM s
            ORDER BY span_id IS NOT DISTINCT FROM $span DESC, coalesce(failed, false) DESC,
                     coalesce(end_ns, start_ns + 1000000000000) - start_ns DESC, start_ns LIMIT {int(limit)}""",
        {"trace": trace_id, "span": span_id},
    )


def span(read: Read, trace_id: str, span_id: str) -> Frame:
    """Everything that was sent of one finished span."""
    return read(
        """SELECT name, kind, service_name, service_instance_id, scope_name, scope_version, start_ns, end_ns,
                  status_code, status_message, trace_state, parent_span_id, span_attributes, resource_attributes,
                  events, links, dropped_attributes_count, dropped_events_count, dropped_links_count, run_id, step
           FROM otel_spans WHERE trace_id = $trace AND span_id = $span ORDER BY ingest_ns DESC LIMIT 1""",
        {"trace": trace_id, "span": span_id},
    )


def named(read: Read, ids: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Names of those of the spans (trace id, span id) that are stored."""
    slots = {f"id{i}": span_id for i, (_, span_id) in enumerate(ids)}
    found = read(
        f"SELECT DISTINCT trace_id, span_id, name FROM otel_spans WHERE span_id IN ({_listed(slots)})",
        slots,
    )
    return {(str(row.trace_id), str(row.span_id)): str(row.name) for row in found.itertuples()}


def linked_from(read: Read, trace_id: str) -> Frame:
    """Spans of other traces that link to this one, oldest first; ``total`` is how many there are."""
    return read(
        f"""SELECT *, count(*) OVER () AS total FROM (
              SELECT DISTINCT trace_id, span_id, name, start_ns FROM otel_spans
              WHERE links IS NOT NULL AND trace_id <> $trace AND contains(links::VARCHAR, $trace))
            ORDER BY start_ns LIMIT {MAX_LINKS}""",
        {"trace": trace_id},
    )


def logs(read: Read, trace_id: str) -> Frame:
    """Log records of a trace in order of time; ``total`` is how many it has. Long texts are cut."""
    return read(
        f"""SELECT coalesce(time_ns, observed_ns) AS time_ns, coalesce(severity_text, '') AS severity, severity_number,
                   service_name, event_name, left(body, {MAX_TEXT}) AS body,
                   left(log_attributes::VARCHAR, {MAX_TEXT}) AS attributes, span_id, count(*) OVER () AS total
            FROM otel_logs WHERE trace_id = $trace ORDER BY 1 LIMIT {MAX_LOGS}""",
        {"trace": trace_id},
    )


def step_trace(read: Read, run_id: str, step: int) -> str | None:
    """Trace of a step, begun or finished, of the latest attempt at it; None when no span of it is stored."""
    found = read(
        """SELECT trace_id FROM (
             SELECT trace_id, attempt, start_ns FROM steps WHERE run_id = $run AND step = $step
             UNION ALL
             SELECT trace_id, attempt, start_ns FROM span_starts
             WHERE run_id = $run AND step = $step AND name = 'rl.loop')
           ORDER BY attempt DESC, start_ns DESC LIMIT 1""",
        {"run": run_id, "step": step},
    )
    return str(found["trace_id"][0]) if len(found) else None
