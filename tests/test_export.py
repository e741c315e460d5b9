"""What is exported is what the store holds: Parquet and CSV files, and traces by the rules of their format."""

from __future__ import annotations

import csv
import gzip
import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from rlinsight import perfetto, query
from rlinsight.errors import StoreError
from rlinsight.export import export
from rlinsight.perfetto import Span
from tests.collectors.live import collector
from tests.dashboards import foreign
from tests.synthetic import Run, deliver, fill, requests

FIRST, SECOND = Run("one-20250101-120000-a1b2", steps=2, groups=2), Run("it's-2", steps=1, groups=1, status=None)


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("rest") / "s.duckdb"
    fill(store, FIRST, SECOND)
    return store


@pytest.fixture(scope="module")
def live(at_rest: Path, tmp_path_factory: pytest.TempPathFactory):
    store = Path(shutil.copy(at_rest, tmp_path_factory.mktemp("live") / "s.duckdb"))
    with collector(store):
        yield store


@pytest.fixture(params=["at_rest", "live"])
def store(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def _counts(store: Path, relations: Iterable[str], run: str | None = None) -> dict[str, int]:
    """Rows of each relation, of a run or of all."""
    where = "" if run is None else " WHERE run_id = $run"
    counts = " UNION ALL ".join(f"SELECT '{name}' AS name, count(*) AS n FROM {name}{where}" for name in relations)
    found = query(counts, store=store, params=None if run is None else {"run": run})
    return dict(zip(found["name"].to_pylist(), found["n"].to_pylist(), strict=True))


# Files ---------------------------------------------------------------------------------------------------------------


def test_parquet_files_hold_every_row(store, tmp_path):
    """Every table, and the lists of tokens to the bit; the files read back equal what the store answers."""
    import pyarrow.parquet as pq

    files = {item.name: item.rows for item in export(store, tmp_path / "out", "parquet", None)}
    assert set(files) >= {
        "otel_spans",
        "otel_logs",
        "otel_metrics",
        "token_runs",
        "ingest_batches",
        "schema_meta",
        "runs",
    }
    written = {name: pq.read_metadata(tmp_path / "out" / f"{name}.parquet").num_rows for name in files}
    assert files == written == _counts(store, files)
    columns = ["rollout_id", "token_ids", "rollout_log_probs", "response_text"]
    back = pq.read_table(tmp_path / "out" / "token_runs.parquet", columns=columns).sort_by("rollout_id")
    assert back.to_pylist() == query(f"SELECT {', '.join(columns)} FROM token_runs ORDER BY 1", store=store).to_pylist()
    assert not (tmp_path / "out.partial").exists()


def test_one_run_is_exported_alone(store, tmp_path):
    """With a run, every file has that run's rows, a quote in its id included, and relations of no run are left out."""
    files = {item.name: item.rows for item in export(store, tmp_path / "out", "csv", SECOND.run_id)}
    assert "ingest_batches" not in files
    assert "schema_meta" not in files
    assert files == _counts(store, files, SECOND.run_id)
    for name, rows in files.items():
        with (tmp_path / "out" / f"{name}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == rows
        assert {line["run_id"] for line in lines} <= {SECOND.run_id}
    assert files["rollouts"] == 4


def test_nothing_is_overwritten_and_nothing_half_done_stays(at_rest, tmp_path):
    """An existing target is refused and kept, an unknown run names the known ones, and neither leaves a file."""
    kept = tmp_path / "out"
    kept.mkdir()
    with pytest.raises(StoreError, match="not overwritten"):
        list(export(at_rest, kept, "csv", None))
    with pytest.raises(StoreError, match=r"no run 'nine'.*one-20250101"):
        list(export(at_rest, tmp_path / "new", "csv", "nine"))
    (tmp_path / "trace.json").write_text("mine")
    with pytest.raises(StoreError, match="not overwritten"):
        perfetto.export(at_rest, tmp_path / "trace.json", FIRST.run_id)
    with pytest.raises(StoreError, match="no run 'nine'"):
        perfetto.export(at_rest, tmp_path / "other.json", "nine")
    with pytest.raises(StoreError, match="cannot be written"):
        list(export(at_rest, tmp_path / "trace.json" / "below", "csv", None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trace.json"]
    assert (tmp_path / "trace.json").read_text() == "mine"


def test_what_services_sent_outside_of_runs_is_exported_alone(tmp_path):
    """Their rows in files, and a trace of theirs with its links; not those of a run, nor of another service."""
    store = tmp_path / "s.duckdb"
    deliver(store, [*requests(SECOND), *foreign.traces(10**9)])
    files = {item.name: item.rows for item in export(store, tmp_path / "out", "csv", None, ["shop"])}
    assert files["otel_spans"] == 2
    assert not {"runs", "steps", "ingest_batches"} & set(files)
    with (tmp_path / "out" / "otel_spans.csv").open(newline="") as file:
        assert {(line["service_name"], line["run_id"]) for line in csv.DictReader(file)} == {("shop", "")}
    assert perfetto.export(store, tmp_path / "t.json", None, ["shop", "ledger"]) == 6
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [event["name"] for event in events if event["ph"] in "BX"]
    assert sorted(slices) == ["POST /pay", "POST /pay", "SELECT orders", "book", "book", "settle"]
    assert Counter(event["ph"] for event in events)["f"] == 2
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    with pytest.raises(StoreError, match=r"no service 'rlinsight.controller' .*: ledger, shop"):
        perfetto.export(store, tmp_path / "other.json", None, ["shop", "rlinsight.controller"])


# Traces --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("at_rest", "t.json"), ("live", "t.json.gz")])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    store = request.getfixturevalue(request.param[0])
    file = tmp_path_factory.mktemp("trace") / request.param[1]
    assert perfetto.export(store, file, FIRST.run_id) == _counts(store, ["v_spans"], FIRST.run_id)["v_spans"]
    return json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())


def test_a_trace_keeps_the_rules_of_its_format(trace):
    """Every event has the fields of its phase; slices of a thread nest; threads and processes are named once."""
    required = {"X": "name ts dur pid tid", "M": "name pid args", "C": "name ts pid args", "s": "name id ts pid tid"}
    required |= {"f": "name id ts pid tid bp"}
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == set(required)
    for event in events:
        assert set(required[event["ph"]].split()) <= set(event), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    names = Counter((event["name"], event["pid"], event.get("tid")) for event in events if event["ph"] == "M")
    assert max(names.values()) == 1
    slices = [event for event in events if event["ph"] == "X"]
    assert {("thread_name", event["pid"], event["tid"]) for event in slices} <= set(names)
    assert len({(event["pid"], event["tid"]) for event in slices}) == len({event["tid"] for event in slices})
    _assert_nested(slices)


def _assert_nested(slices: list[dict]) -> None:
    threads = defaultdict(list)
    for event in slices:
        threads[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    for spans in threads.values():
        stack: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "slices of a thread overlap without nesting"
            stack.append(end)


def test_a_trace_has_every_span_at_its_time(trace, at_rest):
    """Names, starts and durations are those of the store, to the nanosecond, since the moment otherData has."""
    origin = trace["otherData"]["start_unix_ns"]
    found = sorted(
        (event["name"], round(event["ts"] * 1000) + origin, round(event["dur"] * 1000), event["args"]["span_id"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    )
    rows = query(
        "SELECT name, start_ns, end_ns - start_ns AS dur, span_id FROM v_spans WHERE run_id = ?",
        store=at_rest,
        params=[FIRST.run_id],
    )
    assert found == sorted(tuple(row.values()) for row in rows.to_pylist())


def test_every_rollout_has_an_arrow_from_its_step(trace):
    """Flow events come in pairs; each starts inside a slice of the step and ends at the start of a rollout."""
    events = trace["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    rollouts = {(event["tid"], event["ts"]) for event in events if event.get("name") == "rl.rollout"}
    steps = [event for event in events if event.get("name") == "rl.loop" and event["ph"] == "X"]
    assert starts.keys() == ends.keys()
    assert len(starts) == 16  # 2 steps of 2 groups of 4
    assert {(event["tid"], event["ts"]) for event in ends.values()} == rollouts
    for event in starts.values():
        assert any(
            step["tid"] == event["tid"] and step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in steps
        )


def test_metrics_are_counters(trace, at_rest):
    """Each step metric has a point per step, and sampled metrics are there too."""
    counters = Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "C")
    assert counters["reward/mean"] == 2
    assert counters["process.memory"] >= 1


def test_a_running_step_is_an_open_slice(store, tmp_path):
    """A span that has begun and not ended is a B event without an E."""
    perfetto.export(store, tmp_path / "t.json", SECOND.run_id)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sorted(event["name"] for event in events if event["ph"] == "B") == ["rl.loop", "rl.sample"]


@pytest.mark.parametrize("seed", range(20))
def test_any_spans_are_placed_so_that_they_nest(seed):
    """Random trees and loose spans, overlapping at will: the spans of each thread nest, and children whose parent
    can hold them are inside it."""
    random_ = random.Random(seed)
    spans: list[Span] = []
    for number in range(60):
        parent = random_.choice(spans) if spans and random_.random() < 0.6 else None
        start = random_.randrange(100) if parent is None else random_.randrange(parent.start_ns, parent.end_ns + 1)
        end = start + random_.randrange(40)
        facts = Span(*[None] * len(Span._fields))._replace(service="s", lane="l", span_id=str(number))
        spans.append(facts._replace(start_ns=start, end_ns=end, parent_span_id=parent.span_id if parent else None))
    spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
    placed = list(perfetto.place(spans))
    assert [span for span, _ in placed] == spans
    _assert_nested(
        [{"tid": tid, "ts": span.start_ns / 1000, "dur": (span.end_ns - span.start_ns) / 1000} for span, tid in placed]
    )


def test_an_only_child_is_drawn_inside_its_parent():
    """Nested calls make one thread; a second, overlapping one makes another."""

    def span(name: str, start: int, end: int, parent: str | None = None) -> Span:
        facts = Span(*[None] * len(Span._fields))._replace(service="s", lane="l", span_id=name)
        return facts._replace(start_ns=start, end_ns=end, parent_span_id=parent)

    tree = [
        span("a", 0, 100),
        span("b", 0, 50, "a"),
        span("c", 10, 60),
        span("d", 20, 30, "b"),
        span("e", 55, 99, "a"),
    ]
    assert [thread for _, thread in perfetto.place(tree)] == [0, 0, 1, 0, 0]
