"""What a Prometheus or OpenMetrics endpoint answered, as OTLP metrics. Pure, but for ``Resets``.

Names stay as exposed. Counters are monotonic cumulative sums, histograms explicit-bucket histograms, summaries
summaries, infos and state sets sums as the OpenTelemetry compatibility specification has it, the rest gauges. Does not
fetch (scrape.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Exemplar, Sample

OPENMETRICS = "application/openmetrics-text"
MAX_SAMPLES = 50_000
CUMULATIVE = pb.AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
WITH_START = frozenset({"counter", "histogram", "summary"})  # kinds that know when they began

Labels = tuple[tuple[str, str], ...]  # sorted: the identity of a series within its metric


class Malformed(ValueError):
    """An answer that is not in the format it says it is, or too large."""


@dataclass(slots=True)
class Answer:
    """One scrape as OTLP. ``resource`` is what the target says of itself in ``target_info``."""

    metrics: list[pb.Metric] = field(default_factory=list)
    resource: dict[str, str] = field(default_factory=dict)
    num_samples: int = 0


class Resets:
    """When each cumulative series of one target began, which moves when the target counts from zero again.

    What the target says (``_created``, then process_start_time_seconds) is best; a value that falls says that it began
    after the scrape before. Otherwise it is unknown, 0.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, Labels], tuple[float, int]] = {}
        self._now: dict[tuple[str, Labels], tuple[float, int]] = {}
        self._scraped_ns = 0

    def start_ns(self, name: str, labels: Labels, value: float, told_ns: int) -> int:
        """Start of the series, given its value now and what the target told of its start (0: nothing)."""
        last, start = self._before.get((name, labels), (0.0, 0))
        if value < last:
            start = self._scraped_ns
        start = max(start, told_ns)
        self._now[name, labels] = value, start
        return start

    def finish(self, time_ns: int) -> None:
        """The scrape is complete; a series that was not in it is forgotten."""
        self._before, self._now, self._scraped_ns = self._now, {}, time_ns


def parse(text: str, content_type: str, time_ns: int, resets: Resets) -> Answer:
    """The answer of a target, scraped at ``time_ns``. Raises Malformed."""
    families, num_samples = [], 0
    parser = parse_openmetrics if content_type.startswith(OPENMETRICS) else parse_text
    try:
        for family in parser(text):
            num_samples += len(family.samples)
            if num_samples > MAX_SAMPLES:
                raise Malformed(f"more than {MAX_SAMPLES} samples")
            families.append(family)
        return _Translation(families, time_ns, resets).answer(num_samples)
    except Malformed:
        raise
    except Exception as error:  # the parsers raise what they stumble over; numbers may not fit OTLP
        raise Malformed(f"not in the format {content_type or 'text/plain'!r}: {str(error)[:200]}") from None


class _Translation:
    """One scrape on its way to OTLP."""

    def __init__(self, families: list[Family], time_ns: int, resets: Resets) -> None:
        self._families = families
        self._time_ns = time_ns
        self._resets = resets
        kinds = {family.name: family.type for family in families}
        # The text format has no place for _created: clients give it as a gauge of its own.
        self._created_of = {
            f"{name}_created": name for name, kind in kinds.items() if kind in WITH_START and f"{name}_created" in kinds
        }
        self._created: dict[tuple[str, Labels], int] = {}
        self._process_start_ns = 0
        for family in families:
            for sample in family.samples:
                if sample.name == "process_start_time_seconds":
                    self._process_start_ns = _nanoseconds(sample.value)
                elif sample.name.endswith("_created") and (
                    family.type in WITH_START or family.name in self._created_of
                ):
                    base = self._created_of.get(family.name, family.name)
                    self._created[base, _labels(sample.labels)] = _nanoseconds(sample.value)

    def answer(self, num_samples: int) -> Answer:
        answer = Answer(num_samples=num_samples)
        for family in self._families:
            if (family.name == "target" and family.type == "info") or family.name == "target_info":
                for sample in family.samples:
                    answer.resource.update(sample.labels)
            elif family.name not in self._created_of:
                answer.metrics.extend(self._metrics(family))
        self._resets.finish(self._time_ns)
        return answer

    def _metrics(self, family: Family) -> Iterator[pb.Metric]:
        samples = [sample for sample in family.samples if not _is_created(family, sample)]
        if family.type == "counter":
            yield from self._numbers(family, samples, monotonic=True)
        elif family.type in ("info", "stateset"):
            yield from self._numbers(family, samples, monotonic=False)
        elif family.type in ("histogram", "summary"):
            yield from self._distributions(family, samples)
        else:
            yield from self._gauges(family, samples)

    def _distributions(self, family: Family, samples: list[Sample]) -> Iterator[pb.Metric]:
        metric, rest = _metric(family, family.name), []
        is_histogram = family.type == "histogram"
        add = self._add_histogram if is_histogram else self._add_summary
        for labels, group in _group(samples, "le" if is_histogram else "quantile").items():
            if not add(metric, labels, group):  # no valid one: what was exposed is kept as it is
                rest.extend(group)
        if metric.WhichOneof("data"):
            yield metric
        yield from self._gauges(family, rest)

    def _numbers(self, family: Family, samples: list[Sample], monotonic: bool) -> Iterator[pb.Metric]:
        for name, group in _by_name(samples):
            metric = _metric(family, name)
            metric.sum.aggregation_temporality, metric.sum.is_monotonic = CUMULATIVE, monotonic
            for sample in group:
                labels = _labels(sample.labels)
                start_ns = self._start_ns(family.name, labels, sample.value) if monotonic else 0
                metric.sum.data_points.append(self._number_point(sample, start_ns))
            yield metric

    def _gauges(self, family: Family, samples: list[Sample]) -> Iterator[pb.Metric]:
        for name, group in _by_name(samples):
            metric = _metric(family, name)
            metric.gauge.data_points.extend(self._number_point(sample, 0) for sample in group)
            yield metric

    def _number_point(self, sample: Sample, start_ns: int) -> pb.NumberDataPoint:
        exemplars = [_exemplar(sample.exemplar, self._time_ns)] if sample.exemplar else []
        return pb.NumberDataPoint(
            attributes=attributes(sample.labels),
            time_unix_nano=self._when(sample),
            start_time_unix_nano=start_ns,
            as_double=sample.value,
            exemplars=exemplars,
        )

    def _add_histogram(self, metric: pb.Metric, labels: Labels, samples: list[Sample]) -> bool:
        name = metric.name
        buckets = sorted((_bound(s.labels["le"]), s.value) for s in samples if s.name == f"{name}_bucket")
        cumulative = [value for _, value in buckets]
        counts = [now - before for now, before in zip(cumulative, [0.0, *cumulative], strict=False)]
        if not buckets or buckets[-1][0] != math.inf or any(math.isnan(bound) for bound, _ in buckets):
            return False
        if not all(math.isfinite(count) and count >= 0 and count == int(count) for count in counts):
            return False
        metric.histogram.aggregation_temporality = CUMULATIVE
        point = metric.histogram.data_points.add(
            attributes=attributes(dict(labels)),
            time_unix_nano=self._when(samples[0]),
            start_time_unix_nano=self._start_ns(name, labels, cumulative[-1]),
            count=int(cumulative[-1]),
            explicit_bounds=[bound for bound, _ in buckets[:-1]],
            bucket_counts=[int(count) for count in counts],
            exemplars=[_exemplar(sample.exemplar, self._time_ns) for sample in samples if sample.exemplar],
        )
        for sample in samples:
            if sample.name == f"{name}_sum":
                point.sum = sample.value
        return True

    def _add_summary(self, metric: pb.Metric, labels: Labels, samples: list[Sample]) -> bool:
        totals = {sample.name: sample.value for sample in samples if "quantile" not in sample.labels}
        count = totals.get(f"{metric.name}_count", 0.0)
        if not (math.isfinite(count) and 0 <= count < 2**63):
            return False
        point = metric.summary.data_points.add(
            attributes=attributes(dict(labels)),
            time_unix_nano=self._when(samples[0]),
            start_time_unix_nano=self._start_ns(metric.name, labels, count),
            count=int(count),
            sum=totals.get(f"{metric.name}_sum", 0.0),
        )
        for sample in samples:
            if "quantile" in sample.labels:
                point.quantile_values.add(quantile=_bound(sample.labels["quantile"]), value=sample.value)
        return True

    def _start_ns(self, name: str, labels: Labels, value: float) -> int:
        told_ns = self._created.get((name, labels)) or self._process_start_ns
        return self._resets.start_ns(name, labels, value, told_ns)

    def _when(self, sample: Sample) -> int:
        """The sample's own time, if it has one."""
        return (sample.timestamp is not None and _nanoseconds(float(sample.timestamp))) or self._time_ns


def attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    """OTLP attributes; integers stay integers, the rest is text."""
    return [
        KeyValue(
            key=key, value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=str(value))
        )
        for key, value in values.items()
    ]


def gauge(name: str, unit: str, description: str, value: float, time_ns: int) -> pb.Metric:
    """A gauge without labels."""
    metric = pb.Metric(name=name, unit=unit, description=description)
    metric.gauge.data_points.add(time_unix_nano=time_ns, as_double=value)
    return metric


def _metric(family: Family, name: str) -> pb.Metric:
    return pb.Metric(name=name, unit=family.unit, description=family.documentation)


def _is_created(family: Family, sample: Sample) -> bool:
    return family.type in WITH_START and sample.name == f"{family.name}_created"


def _by_name(samples: Iterable[Sample]) -> Iterable[tuple[str, list[Sample]]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.name, []).append(sample)
    return groups.items()


def _group(samples: Iterable[Sample], without: str) -> dict[Labels, list[Sample]]:
    """Samples of the same labels but one."""
    groups: dict[Labels, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(_labels(sample.labels, without), []).append(sample)
    return groups


def _labels(labels: Mapping[str, str], without: str = "") -> Labels:
    return tuple(sorted((key, value) for key, value in labels.items() if key != without))


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _nanoseconds(seconds: float) -> int:
    """Unix time of the present, in nanoseconds; 0 for what is none."""
    return round(seconds * 1e6) * 1000 if 0 < seconds < 9e9 else 0  # floats are good for microseconds


def _exemplar(exemplar: Exemplar, time_ns: int) -> pb.Exemplar:
    labels = dict(exemplar.labels)
    trace_id, span_id = _id(labels, "trace_id", 16), _id(labels, "span_id", 8)
    return pb.Exemplar(
        as_double=exemplar.value,
        time_unix_nano=(exemplar.timestamp is not None and _nanoseconds(float(exemplar.timestamp))) or time_ns,
        trace_id=trace_id,
        span_id=span_id,
        filtered_attributes=attributes(labels),
    )


def _id(labels: dict[str, str], key: str, size: int) -> bytes:
    """The id taken out of the labels; one that is none stays a label."""
    try:
        value = bytes.fromhex(labels.get(key, ""))
    except ValueError:
        return b""
    if len(value) != size:
        return b""
    del labels[key]
    return value
