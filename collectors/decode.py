"""OTLP requests to rows: each item becomes its raw row and the domain rows its name or attributes call for.

Pure: rows are a function of one item, its resource and scope, so order and delays do not matter. An item whose
attribute does not fit its column keeps its raw row, gets no domain row and is counted as rejected; one without a usable
raw row (no ids, impossible times) is rejected whole. Does not parse payloads (payload.py) nor build Arrow (arrow.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from collectors import aliases
from collectors.cardinality import Cardinality
from collectors.points import POINT_FACTS, TEMPORALITY, exemplar_facts
from collectors.projections import PROJECTIONS, PROMOTED, Projection
from collectors.values import MAX_BIGINT, BadValue, any_value, attributes, coercion, to_json
from rlinsight import names

Columns = Mapping[str, Mapping[str, str]]  # {table: {column: SQL type}}


@dataclass(slots=True)
class Decoded:
    """Rows of one request by table, in the tables' column order; of ``items`` received, ``rejected`` are incomplete."""

    items: int = 0
    rejected: int = 0
    problem: str | None = None  # about the first rejected item
    rows: dict[str, list[tuple]] = field(default_factory=dict)

    @property
    def stored(self) -> int:
        """Items with a raw row."""
        return sum(len(rows) for table, rows in self.rows.items() if table in RAW_TABLES)

    def add(self, table: str, row: tuple) -> None:
        self.rows.setdefault(table, []).append(row)

    def reject(self, problem: str) -> None:
        self.rejected += 1
        self.problem = self.problem or problem


RAW_TABLES = frozenset({"otel_spans", "otel_logs", "otel_metrics"})
RESOURCE_PROBLEM = "resource_problem"  # a fact no column holds


class Decoder:
    """Decodes requests for a store with these ``columns``. Remembers series alone; threads may share it."""

    def __init__(self, columns: Columns) -> None:
        self._cardinality = Cardinality()
        self._raw_row = {table: itemgetter(*columns[table]) for table in RAW_TABLES}
        types = columns["otel_spans"]
        self._promoted = {key: (column, coercion(types[column])) for column, key in PROMOTED.items()}
        self._by_name: dict[tuple[str, str], _Table] = {}
        self._by_attribute: list[_Table] = []
        for projection in PROJECTIONS:
            table = _Table(projection, columns[projection.table])
            if projection.name:
                self._by_name[projection.kind, projection.name] = table
            else:
                self._by_attribute.append(table)

    def traces(self, request: Any, batch_id: str, ingest_ns: int) -> Decoded:
        """Rows of an ExportTraceServiceRequest."""
        out = Decoded()
        for resource_spans in request.resource_spans:
            resource, base = self._resource(resource_spans, batch_id, ingest_ns)
            for scope_spans in resource_spans.scope_spans:
                facts = base | _scope(scope_spans, resource_spans)
                for span in scope_spans.spans:
                    out.items += 1
                    self._span(span, resource, facts.copy(), out)
        return out

    def logs(self, request: Any, batch_id: str, ingest_ns: int) -> Decoded:
        """Rows of an ExportLogsServiceRequest."""
        out = Decoded()
        for resource_logs in request.resource_logs:
            resource, base = self._resource(resource_logs, batch_id, ingest_ns)
            for scope_logs in resource_logs.scope_logs:
                facts = base | _scope(scope_logs, resource_logs)
                for record in scope_logs.log_records:
                    self._log(record, resource, facts | {"item": out.items}, out)
                    out.items += 1
        return out

    def metrics(self, request: Any, batch_id: str, ingest_ns: int) -> Decoded:
        """Rows of an ExportMetricsServiceRequest, one per data point."""
        out = Decoded()
        for resource_metrics in request.resource_metrics:
            resource, base = self._resource(resource_metrics, batch_id, ingest_ns)
            for scope_metrics in resource_metrics.scope_metrics:
                facts = base | _scope(scope_metrics, resource_metrics)
                for metric in scope_metrics.metrics:
                    self._metric(metric, resource, facts, out)
        return out

    def _resource(self, sent: Any, batch_id: str, ingest_ns: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """A resource's attributes, and the facts that all of its items share."""
        resource = attributes(sent.resource.attributes)
        facts: dict[str, Any] = dict.fromkeys(PROMOTED)
        facts |= {
            "service_name": _text_or_none(resource.get(names.SERVICE_NAME)),
            "service_instance_id": _text_or_none(resource.get(names.SERVICE_INSTANCE_ID)),
            "resource_attributes": to_json(resource),
            "resource_detail": _resource_detail(sent),
            "batch_id": batch_id,
            "ingest_ns": ingest_ns,
        }
        resource = _known(resource)
        facts[RESOURCE_PROBLEM] = self._promote(resource, facts)
        return resource, facts

    def _promote(self, attrs: dict[str, Any], facts: dict[str, Any]) -> str | None:
        """Set the promoted facts found in ``attrs``; returns what is wrong with one that does not fit, NULL then."""
        problem = None
        for key in self._promoted.keys() & attrs.keys():
            value = attrs[key]
            if value is None:
                continue
            column, coerce = self._promoted[key]
            try:
                facts[column] = coerce(value)
            except BadValue as error:
                problem = f"{key}: {error}"
                facts[column] = None
        if facts["attempt"] is None and facts["run_id"] is not None:
            facts["attempt"] = 1  # a sender that knows no resumes is in its first attempt
        return problem

    def _span(self, span: Any, resource: dict[str, Any], facts: dict[str, Any], out: Decoded) -> None:
        start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        if (
            len(span.trace_id) != 16
            or len(span.span_id) != 8
            or not 0 < start_ns <= MAX_BIGINT
            or not 0 < end_ns <= MAX_BIGINT
        ):
            out.reject(f"span {span.name!r}: needs a 16-byte trace id, an 8-byte span id, a start and an end time")
            return
        attrs = attributes(span.attributes)
        facts["span_attributes"] = to_json(attrs)
        attrs = _known(attrs)
        problem = self._promote(attrs, facts) or facts[RESOURCE_PROBLEM]
        status, events, links = span.status, span.events, span.links
        facts["trace_id"] = span.trace_id.hex()
        facts["span_id"] = span.span_id.hex()
        facts["parent_span_id"] = span.parent_span_id.hex() or None
        facts["trace_state"] = span.trace_state or None
        facts["flags"] = span.flags
        facts["name"] = span.name
        facts["kind"] = _tiny(span.kind)
        facts["start_ns"] = start_ns
        facts["end_ns"] = end_ns
        facts["status_code"] = _tiny(status.code)
        facts["status_message"] = status.message or None
        facts["events"] = to_json([_span_event(event) for event in events]) if events else None
        facts["links"] = to_json([_link(link) for link in links]) if links else None
        facts["dropped_attributes_count"] = span.dropped_attributes_count
        facts["dropped_events_count"] = span.dropped_events_count
        facts["dropped_links_count"] = span.dropped_links_count
        out.add("otel_spans", self._raw_row["otel_spans"](facts))
        tables = [table for table in self._by_attribute if table.attribute in attrs]
        named = self._by_name.get(("span", span.name.partition(" ")[0]))
        if named is not None:
            tables.append(named)
        _project(tables, facts, attrs, resource, problem, span.name, out)

    def _log(self, record: Any, resource: dict[str, Any], facts: dict[str, Any], out: Decoded) -> None:
        sent = attributes(record.attributes)
        attrs = _known(sent)
        problem = self._promote(attrs, facts) or facts[RESOURCE_PROBLEM]
        event_name = record.event_name or _text_or_none(attrs.get("event.name"))
        if len(record.trace_id) not in (0, 16) or len(record.span_id) not in (0, 8):
            problem = problem or "a trace id has 16 bytes and a span id 8"
        table = self._by_name.get(("event", event_name)) if event_name else None
        # Their content stands in the token table, if a row of it comes about; which also needs a run.
        outlined = table.bulky if table is not None and facts["run_id"] is not None else frozenset()
        body = any_value(record.body)
        facts["time_ns"] = _time(record.time_unix_nano)
        facts["observed_ns"] = _time(record.observed_time_unix_nano)
        facts["trace_id"] = record.trace_id.hex() or None
        facts["span_id"] = record.span_id.hex() or None
        facts["flags"] = record.flags
        facts["severity_number"] = _tiny(record.severity_number) or None
        facts["severity_text"] = record.severity_text or None
        facts["event_name"] = event_name
        facts["body_is_json"] = None if body is None else not isinstance(body, str)
        facts["body"] = to_json(body) if facts["body_is_json"] else body
        facts["dropped_attributes_count"] = record.dropped_attributes_count
        raw_time = facts["time_ns"]
        facts["time_ns"] = raw_time or facts["observed_ns"]
        complete = _project([table] if table else [], facts, attrs, resource, problem, event_name or "log record", out)
        if complete and outlined:
            sent = {key: _outline(value) if key in outlined else value for key, value in sent.items()}
        facts["time_ns"], facts["log_attributes"] = raw_time, to_json(sent)
        out.add("otel_logs", self._raw_row["otel_logs"](facts))

    def _metric(self, metric: Metric, resource: dict[str, Any], base: dict[str, Any], out: Decoded) -> None:
        kind = metric.WhichOneof("data")
        if kind is None:
            return
        data = getattr(metric, kind)
        name = aliases.metric_name(metric.name)
        stream = {
            "name": name,
            "sent_name": metric.name if name != metric.name else None,
            "description": metric.description or None,
            "metadata": to_json(attributes(metric.metadata)) if metric.metadata else None,
            "unit": metric.unit or None,
            "kind": kind,
            "temporality": TEMPORALITY.get(int(getattr(data, "aggregation_temporality", 0))),
            "is_monotonic": data.is_monotonic if kind == "sum" else None,
        }
        for point in data.data_points:
            out.items += 1
            attrs = attributes(point.attributes)
            labels = to_json(attrs)
            if refusal := self._cardinality.refusal(base["resource_attributes"], name, labels):
                out.reject(f"metric {metric.name!r}: {refusal}")
                continue
            facts = base | stream
            problem = self._promote(_known(attrs), facts) or base[RESOURCE_PROBLEM]
            facts.update(POINT_FACTS[kind](point))
            facts["time_ns"], facts["start_ns"] = _time(point.time_unix_nano), _time(point.start_time_unix_nano)
            facts["attributes"], facts["flags"] = labels, point.flags
            exemplars = getattr(point, "exemplars", ())
            facts["exemplars"] = to_json([exemplar_facts(exemplar) for exemplar in exemplars]) if exemplars else None
            out.add("otel_metrics", self._raw_row["otel_metrics"](facts))
            if problem:
                out.reject(f"metric {metric.name!r}: {problem}")


class _Table:
    """A projection compiled for one table: how each column is found, in the table's order."""

    def __init__(self, projection: Projection, types: Mapping[str, str]) -> None:
        unknown = set(projection.columns) - set(types)
        if unknown:
            raise ValueError(f"projection of {projection.table} fills columns that do not exist: {sorted(unknown)}")
        self.name = projection.table
        self.needs_run = "run_id" in types
        self.attribute = projection.has
        self.bulky = frozenset(key for column, key in projection.columns.items() if types[column].endswith("[]"))
        self._columns: list[tuple[str, str, Callable[[Any], Any] | None]] = [
            (column, projection.columns.get(column, ""), coercion(sql_type) if column in projection.columns else None)
            for column, sql_type in types.items()
        ]
        # Lists of one row describe the same tokens, but for those of the prompt.
        self._aligned = [
            (index, 1 if sql_type == "VARCHAR[]" else ELEMENT_BYTES[sql_type])
            for index, (column, sql_type) in enumerate(types.items())
            if sql_type.endswith("[]") and column != "prompt_token_ids"
        ]

    def row(self, facts: dict[str, Any], attrs: dict[str, Any], resource: dict[str, Any]) -> tuple:
        """The table's row for one item. Raises BadValue naming the attribute that does not fit."""
        values = []
        for column, key, coerce in self._columns:
            if coerce is None:
                values.append(facts[column])
                continue
            value = attrs.get(key)
            if value is None:
                value = resource.get(key)
            if value is not None:
                try:
                    value = coerce(value)
                except BadValue as error:
                    raise BadValue(f"{key}: {error}") from None
            values.append(value)
        lengths = {len(values[index]) // size for index, size in self._aligned if values[index] is not None}
        if len(lengths) > 1:
            raise BadValue(f"token arrays of different lengths: {', '.join(map(str, sorted(lengths)))}")
        return tuple(values)


ELEMENT_BYTES = {"INTEGER[]": 4, "FLOAT[]": 4, "BOOLEAN[]": 1}


def _project(
    tables: Iterable[_Table],
    facts: dict[str, Any],
    attrs: dict[str, Any],
    resource: dict[str, Any],
    problem: str | None,
    what: str,
    out: Decoded,
) -> bool:
    """Add the item's domain rows: all of them or, when a value does not fit, none. Items of no run stay raw, but
    for those of a table that knows no runs.

    True if nothing was wrong with the item.
    """
    rows = []
    try:
        if problem:
            raise BadValue(problem)
        wanted = [table for table in tables if facts["run_id"] is not None or not table.needs_run]
        rows = [(table.name, table.row(facts, attrs, resource)) for table in wanted]
    except BadValue as error:
        out.reject(f"{what}: {error}")
        return False
    for table, row in rows:
        out.add(table, row)
    return True


def _known(attrs: dict[str, Any]) -> dict[str, Any]:
    """Attributes with the known spelling of those that have one added."""
    spelled = aliases.ATTRIBUTES.keys() & attrs.keys()
    return {aliases.ATTRIBUTES[key]: attrs[key] for key in sorted(spelled)} | attrs if spelled else attrs


def _resource_detail(sent: Any) -> str | None:
    """What a resource has beyond its attributes, as JSON; None when nothing."""
    resource = sent.resource
    refs = [
        {
            "schema_url": ref.schema_url,
            "type": ref.type,
            "id_keys": list(ref.id_keys),
            "description_keys": list(ref.description_keys),
        }
        for ref in resource.entity_refs
    ]
    return _detail(
        schema_url=sent.schema_url, dropped_attributes_count=resource.dropped_attributes_count, entity_refs=refs
    )


def _detail(**facts: Any) -> str | None:
    """The facts that are set, as JSON; None when none is."""
    present = {name: value for name, value in facts.items() if value}
    return to_json(present) if present else None


def _scope(scope_items: Any, resource_items: Any) -> dict[str, Any]:
    scope = scope_items.scope
    return {
        "scope_name": scope.name or None,
        "scope_version": scope.version or None,
        "scope_detail": _detail(
            attributes=attributes(scope.attributes), dropped_attributes_count=scope.dropped_attributes_count
        ),
        "schema_url": scope_items.schema_url or resource_items.schema_url or None,
    }


def _span_event(event: Any) -> dict[str, Any]:
    facts = {"name": event.name, "time_ns": event.time_unix_nano, "attributes": attributes(event.attributes)}
    if event.dropped_attributes_count:
        facts["dropped_attributes_count"] = event.dropped_attributes_count
    return facts


def _link(link: Any) -> dict[str, Any]:
    facts = {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex(), "attributes": attributes(link.attributes)}
    rest = {
        "trace_state": link.trace_state,
        "flags": link.flags,
        "dropped_attributes_count": link.dropped_attributes_count,
    }
    return facts | {name: value for name, value in rest.items() if value}


def _outline(value: Any) -> Any:
    """What the raw row keeps of an array whose content stands in a list column."""
    if isinstance(value, list):
        return {"items": len(value)}
    return {"bytes": len(value)} if isinstance(value, bytes) else value


def _time(ns: int) -> int | None:
    """Unix nanoseconds; 0 is OTLP's unset, and what does not fit BIGINT is no time either."""
    return ns if 0 < ns <= MAX_BIGINT else None


def _tiny(value: int) -> int | None:
    """An enum number; NULL for one no OTLP version can mean (TINYINT holds them all)."""
    return value if 0 <= value < 128 else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
