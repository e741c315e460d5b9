"""A run as a trace that opens in ui.perfetto.dev and chrome://tracing: Trace Event Format, JSON, gzip for ``*.gz``.

What services sent outside of runs is drawn in the same way. Processes are services and ranks, threads are lanes; what
overlaps in a lane without being nested gets a thread of its own beside it. Links become flow arrows, step metrics and
sampled metrics counters. Times are microseconds since the run's first moment, which ``otherData`` has. Format: "Trace
Event Format", Google, 2016.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import orjson

from rlinsight import schema
from rlinsight.attach import connected
from rlinsight.export import condition, draft

if TYPE_CHECKING:
    import duckdb

SPANS = """
WITH spans AS (
  SELECT coalesce(service_name, '') AS service, rank, coalesce(lane, 'no lane') AS lane, name, phase, bucket, step,
    start_ns, end_ns, trace_id, span_id, parent_span_id, status_code, status_message, span_attributes, events, links
  FROM v_spans WHERE {rows}
), unfinished AS (
  SELECT coalesce(service_name, '') AS service, rank, coalesce(lane, 'no lane') AS lane, name, phase, step, start_ns,
    trace_id, span_id, parent_span_id
  FROM open_spans WHERE {rows}
)
FROM spans UNION ALL BY NAME FROM unfinished
ORDER BY service, rank, lane, start_ns, end_ns DESC NULLS FIRST
"""
LINKED = """
SELECT DISTINCT unnest(json_extract_string(links, '$[*].span_id'))
FROM otel_spans WHERE {rows} AND links IS NOT NULL
"""
COUNTERS = """
SELECT 'step metrics' AS service, NULL AS rank, name, NULL AS labels, time_ns, value
FROM step_metrics WHERE run_id = {run} AND isfinite(value)
UNION ALL
SELECT coalesce(service_name, ''), rank, name, attributes, time_ns, value
FROM otel_metrics WHERE {rows} AND isfinite(value)
ORDER BY time_ns
"""
ORIGIN = """
SELECT min(ns) FROM (
  SELECT min(start_ns) AS ns FROM otel_spans WHERE {rows}
  UNION ALL SELECT min(start_ns) FROM span_starts WHERE {rows}
  UNION ALL SELECT min(time_ns) FROM step_metrics WHERE run_id = {run}
  UNION ALL SELECT min(time_ns) FROM otel_metrics WHERE {rows} AND isfinite(value)
)
"""
FOREVER = 2**63 - 1


class Span(NamedTuple):
    """A row of SPANS; ``end_ns`` None while it is open."""

    service: str
    rank: int | None
    lane: str
    name: str
    phase: str | None
    bucket: str | None
    step: int | None
    start_ns: int
    end_ns: int | None
    trace_id: str
    span_id: str
    parent_span_id: str | None
    status_code: int | None
    status_message: str | None
    span_attributes: str | None
    events: str | None
    links: str | None


def export(store: Path, file: Path, run: str | None, services: Sequence[str] = ()) -> int:
    """Write the trace of one run, or of what ``services`` sent outside of runs; returns the number of spans.

    Raises StoreError: no such run or service, ``file`` exists.
    """
    with connected(store) as con, draft(file) as target:
        rows = condition(con, run, services)
        with gzip.open(target, "wb", compresslevel=6) if file.suffix == ".gz" else target.open("wb") as stream:
            return _Trace(con, run, rows, stream).write()  # type: ignore[arg-type]


def place(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Each span with the number of its thread inside its lane, so that the spans of a thread nest strictly.

    ``spans`` come by service, rank and lane, then by start, the longer first. A span goes into the thread of its parent
    if that is innermost there and lasts long enough, else into the first thread where nothing is going on.
    """
    for _, in_lane in groupby(spans, key=lambda span: span[:3]):
        threads: list[list[tuple[int, str]]] = []  # of each thread, what is going on: (end, span id), innermost last
        for span in in_lane:
            end_ns = FOREVER if span.end_ns is None else span.end_ns
            free = fitting = None
            for number, stack in enumerate(threads):
                while stack and stack[-1][0] <= span.start_ns:
                    stack.pop()
                if not stack:
                    free = number if free is None else free
                elif stack[-1][1] == span.parent_span_id and stack[-1][0] >= end_ns:
                    fitting = number
            number = fitting if fitting is not None else free
            if number is None:
                number = len(threads)
                threads.append([])
            threads[number].append((end_ns, span.span_id))
            yield span, number


class _Trace:
    """One trace on its way to a stream, event by event."""

    def __init__(self, con: duckdb.DuckDBPyConnection, run: str | None, rows: str, stream: BinaryIO) -> None:
        self._con, self._run, self._rows, self._stream = con, run, rows, stream
        self._separator = b"\n"
        self._linked = {row[0] for row in self._ask(LINKED)}
        self._origin: int = next(self._ask(ORIGIN))[0] or 0
        self._pids: dict[tuple[str, int | None], int] = {}
        self._tids: dict[tuple[int, str, int], int] = {}
        self._slices: dict[str, tuple[int, int, int, int]] = {}  # of linked spans: pid, tid, start, end
        self._arrows: list[tuple[str, int, int, int]] = []  # the span linked to; pid, tid and start of the linking one

    def write(self) -> int:
        """Write everything; returns the number of spans."""
        about = {"run_id": self._run, "start_unix_ns": self._origin, "viewer": "https://ui.perfetto.dev"}
        self._stream.write(b'{"displayTimeUnit":"ms","otherData":%s,"traceEvents":[' % orjson.dumps(about))
        spans = 0
        for span, thread in place(map(Span._make, self._ask(SPANS))):
            self._slice(span, thread)
            spans += 1
        for index, arrow in enumerate(self._arrows, start=1):
            self._arrow(index, *arrow)
        for service, rank, name, labels, time_ns, value in self._ask(COUNTERS):
            shown = f"{name} {labels}" if labels and labels != "{}" else name
            self._event(ph="C", name=shown, pid=self._pid(service, rank), ts=self._ts(time_ns), args={"value": value})
        self._stream.write(b"\n]}\n")
        return spans

    def _ask(self, sql: str) -> Iterator[tuple[Any, ...]]:
        run = "NULL" if self._run is None else schema.quoted(self._run)
        reader = (
            self._con.cursor().execute("FROM in_store(?)", [sql.format(rows=self._rows, run=run)]).to_arrow_reader()
        )
        for batch in reader:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def _event(self, **fields: Any) -> None:
        self._stream.write(self._separator + orjson.dumps(fields))
        self._separator = b",\n"

    def _ts(self, ns: int) -> float:
        return (ns - self._origin) / 1000

    def _pid(self, service: str, rank: int | None) -> int:
        pid = self._pids.get((service, rank))
        if pid is None:
            pid = self._pids[service, rank] = len(self._pids) + 1
            name = service or "unnamed service"
            self._event(ph="M", name="process_name", pid=pid, args={"name": name if rank is None else f"{name} {rank}"})
        return pid

    def _tid(self, pid: int, lane: str, thread: int) -> int:
        """Thread ids are unique in the whole trace: viewers that know Linux expect it."""
        tid = self._tids.get((pid, lane, thread))
        if tid is None:
            tid = self._tids[pid, lane, thread] = len(self._tids) + 1
            name = lane if thread == 0 else f"{lane} ({thread + 1})"
            self._event(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": name})
            self._event(ph="M", name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": tid})
        return tid

    def _slice(self, span: Span, thread: int) -> None:
        pid = self._pid(span.service, span.rank)
        tid = self._tid(pid, span.lane, thread)
        args = {"step": span.step, "trace_id": span.trace_id, "span_id": span.span_id}
        if span.status_code == 2:
            args["error"] = span.status_message or "failed"
        place = {"pid": pid, "tid": tid, "ts": self._ts(span.start_ns)}
        args |= orjson.loads(span.span_attributes or "{}")
        common = {"name": span.name, "cat": span.bucket or span.phase or "span", "args": args}
        if span.end_ns is None:
            self._event(ph="B", **place, **common)
        else:
            self._event(ph="X", **place, dur=max(0, span.end_ns - span.start_ns) / 1000, **common)
        for event in orjson.loads(span.events or "[]"):
            at = {**place, "ts": self._ts(event["time_ns"])}
            self._event(ph="i", s="t", name=event["name"], **at, args=event["attributes"])
        if span.span_id in self._linked:
            self._slices[span.span_id] = (pid, tid, span.start_ns, span.end_ns or FOREVER)
        for link in orjson.loads(span.links or "[]"):
            self._arrows.append((link["span_id"], pid, tid, span.start_ns))

    def _arrow(self, index: int, linked: str, pid: int, tid: int, start_ns: int) -> None:
        """From the slice that is linked to, at the moment the linking one begins, to that one."""
        if linked not in self._slices:  # a span of another run, or one that never arrived
            return
        from_pid, from_tid, begin, end = self._slices[linked]
        flow = {"name": "link", "cat": "link", "id": index}
        self._event(ph="s", pid=from_pid, tid=from_tid, ts=self._ts(min(max(start_ns, begin), end)), **flow)
        self._event(ph="f", bp="e", pid=pid, tid=tid, ts=self._ts(start_ns), **flow)
