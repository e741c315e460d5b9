"""Metrics of this process: every instrument of any library, collected by a clock into the exporter.

Points are cumulative: a batch that is lost costs resolution, not counts, and emitting takes no lock that collecting
holds. Owns what a series may look like (ids and texts are no labels, a bounded number of series) and the collecting
thread. Does not own the providers (providers.py), encoding (points.py, otlp.py) or the instruments (system_metrics.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import (
    AlignedHistogramBucketExemplarReservoir,
    Exemplar,
    ExemplarReservoir,
    MeterProvider,
)
from opentelemetry.sdk.metrics.export import MetricReader, MetricsData
from opentelemetry.sdk.metrics.view import View

from rlinsight import names
from rlinsight.exporter import BATCH_S, Exporter
from rlinsight.otlp import TOKEN_KEYS, is_text
from rlinsight.points import Point, split
from rlinsight.priority import yield_processors

SERIES = 1000  # attribute sets per instrument; the rest is summed up in one series marked otel.metric.overflow
START_TIMEOUT_S = 1.0
NO_LABELS = TOKEN_KEYS | frozenset(
    {names.RUN_ID, names.ROLLOUT_ID, names.GROUP_ID, names.REQUEST_ID, names.PROMPT_ID, names.CONVERSATION_ID}
    | {names.STEP_INDEX, names.TURN_INDEX, names.SAMPLE_INDEX, "gen_ai.response.id"}
)

_log = logging.getLogger(__name__)


class Meters:
    """Collects from ``providers`` every ``interval_s`` seconds, until told to stop.

    By the wall clock and one write early, so that at the usual interval the points of all processes, their reports of
    health and what the collector scrapes share one delivery.
    In a thread of its own: observable instruments call other people's code, which may hang. Then this process has no
    more metrics; nothing else waits for it.
    """

    def __init__(self, providers: Sequence[MeterProvider], exporter: Exporter, interval_s: float) -> None:
        self._exporter = exporter
        self._interval_s = interval_s
        self._readers = [(provider, _Reader(self._receive)) for provider in providers]
        self._complained = False
        self._overflowing: set[tuple[str, str]] = set()  # scope and name of instruments
        self._asked: queue.SimpleQueue[tuple[threading.Event, bool]] = queue.SimpleQueue()  # and whether it is the last
        self._ready = threading.Event()
        threading.Thread(target=self._run, name="rlinsight-metrics", daemon=True).start()
        self._ready.wait(START_TIMEOUT_S)  # so that what is measured from here on is counted

    def collect(self, timeout_s: float, *, last: bool = False) -> bool:
        """Collect now, and stop if it is the ``last`` time; False if that took longer than ``timeout_s`` seconds."""
        done = threading.Event()
        self._asked.put((done, last))
        return done.wait(timeout_s)

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist and its locks may be held: measure nothing."""
        ours = {reader for _, reader in self._readers}
        for provider, _ in self._readers:
            with suppress(AttributeError):  # the SDK has no public way to leave a lock behind
                consumer = provider._measurement_consumer
                kept = {reader: storage for reader, storage in consumer._reader_storages.items() if reader not in ours}
                consumer._reader_storages, consumer._lock = kept, threading.Lock()

    def _run(self) -> None:
        yield_processors()
        try:
            self._register()
        except Exception:  # it reaches into the SDK; training goes on without metrics
            _log.warning("no metrics are recorded: the OpenTelemetry SDK is not as expected", exc_info=True)
            self._readers = []
        self._ready.set()
        last = False
        while not last:
            done, last = self._wait()
            self._collect()
            done.set()
        for provider, reader in self._readers:
            provider.remove_metric_reader(reader)

    def _register(self) -> None:
        """Waits for the providers' locks, which a hung callback of an earlier recording keeps."""
        for provider, reader in self._readers:
            provider.add_metric_reader(reader)
            _limit_series(provider, reader, View(
                instrument_name="*",
                attribute_keys=_Labels(self._exporter.label_dropped),
                exemplar_reservoir_factory=_reservoir,
                aggregation_cardinality_limit=SERIES,
            ))  # fmt: skip

    def _wait(self) -> tuple[threading.Event, bool]:
        try:
            return self._asked.get(timeout=self._interval_s - (time.time() + BATCH_S) % self._interval_s)
        except queue.Empty:
            return threading.Event(), False

    def _collect(self) -> None:
        for _, reader in self._readers:
            try:
                reader.collect()
            except Exception:  # of an instrument's callback, which is other people's code
                level = logging.DEBUG if self._complained else logging.WARNING
                _log.log(level, "metrics could not be collected; this is told once", exc_info=True)
                self._complained = True

    def _receive(self, data: MetricsData) -> None:
        for point in split(data):
            if point.overflows:
                self._note_overflow(point)
            self._exporter.put("metrics", point)

    def _note_overflow(self, point: Point) -> None:
        key = point.instrumentation_scope.name, point.metric.name
        if key not in self._overflowing:
            self._overflowing.add(key)
            self._exporter.counts.overflowing = len(self._overflowing)
            _log.warning(
                "metric %r of %r has more than %d attribute sets; the rest is summed up in the series marked "
                "otel.metric.overflow: use fewer labels", point.metric.name, point.instrumentation_scope.name, SERIES,
            )  # fmt: skip


def _limit_series(provider: MeterProvider, reader: MetricReader, view: View) -> None:
    """Let the reader alone see streams as ``view`` shapes them, also where the provider is the program's own."""
    storage = provider._measurement_consumer._reader_storages[reader]  # views are a provider's in the SDK's public API
    config = storage._sdk_config
    storage._sdk_config = type(config)(exemplar_filter=config.exemplar_filter, resource=config.resource, views=[view])


class _Reader(MetricReader):
    """Hands what is collected to ``receive``."""

    def __init__(self, receive: Callable[[MetricsData], None]) -> None:
        super().__init__()
        self._receive = receive

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        self._receive(metrics_data)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Nothing: a library that shuts the global provider down does not end our recording."""


class _Labels(set[str]):
    """The attribute keys that make a series: all but ids and texts, each left out one counted by ``dropped``."""

    def __init__(self, dropped: Callable[[], None]) -> None:
        super().__init__()
        self._dropped = dropped

    def __contains__(self, key: object) -> bool:
        if key in NO_LABELS or is_text(str(key)):
            self._dropped()
            return False
        return True


class _Latest(ExemplarReservoir):
    """The latest measurement made inside a span.

    The SDK's own choice for sums and gauges draws from the global random generator, which training seeds and uses.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._latest: tuple[Any, ...] | None = None

    def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Context) -> None:
        """Keep it. One reference is replaced by another, so that no lock is needed."""
        self._latest = value, time_unix_nano, attributes, trace.get_current_span(context).get_span_context()

    def collect(self, point_attributes: Any) -> list[Exemplar]:
        """The one of this period, if there was any."""
        latest, self._latest = self._latest, None
        if latest is None:
            return []
        value, time_ns, attributes, span = latest
        rest = {key: value for key, value in (attributes or {}).items() if key not in (point_attributes or {})}
        return [Exemplar(rest, value, time_ns, span.span_id or None, span.trace_id or None)]


def _reservoir(_aggregation: type) -> Callable[..., ExemplarReservoir]:
    return lambda **kwargs: (
        AlignedHistogramBucketExemplarReservoir(**kwargs) if "boundaries" in kwargs else _Latest(**kwargs)
    )
