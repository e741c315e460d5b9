"""How long the dashboard's queries and the questions of docs/questions.md take on a big store.

    python benchmarks/queries.py STORE.duckdb [--rounds 5] [--only NAME]

Builds the store at that path when it is not there (a few minutes, 0.6 GB): four runs, 1,000,000 spans, 300,000 log
records, 900,000 metric points, 100,000 rollouts, 20,000,000 tokens in all, two thirds of each in the run that is asked
about. Rows go straight into the tables, in the order of steps. Prints the median and the slowest of some rounds after a
first one, in ms, asked of a real collector over HTTP, conversion to pandas included, as the dashboard does it.

Ends with an error before it builds anything when a function of the dashboard that reads is not among those asked.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from collectors import server
from dashboards import examples, metric_queries, queries, rollout_queries, trace_queries
from dashboards.metric_queries import Window
from dashboards.rollout_queries import RolloutFilter
from dashboards.trace_queries import TraceFilter
from rlinsight import names, schema, store

TOKENS = 200  # per rollout
RUNS = {"main": 521, "second": 87, "third": 87, "fourth": 87}  # steps of 128 rollouts: 100,096 in all
STEP_NS = 60 * 10**9
FIRST_NS = 1_790_000_000 * 10**9
BIG, STEP = "main", 400
STORE_SQL = (Path(__file__).parent / "big_store.sql").read_text(encoding="utf-8")


def build(path: Path) -> None:
    """Fill a new store; it stands at ``path`` only when complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    with duckdb.connect(str(unfinished)) as con:
        schema.apply(con, path)
        start = FIRST_NS
        for run, steps in RUNS.items():
            for name, value in {"run": run, "steps": steps, "start": start, "metrics": list(names.METRICS)}.items():
                con.execute(f"SET VARIABLE {name} = ?", [value])
            con.execute(STORE_SQL)
            _tokens(con, run)
            start += (steps + 10) * STEP_NS
        con.execute("CHECKPOINT")
    unfinished.rename(path)


def _tokens(con: duckdb.DuckDBPyConnection, run: str) -> None:
    """Lists of TOKENS numbers per rollout, by 2,000 rollouts."""
    random, words = np.random.default_rng(0), ["the ", "sum ", "is ", "so ", "we ", "get ", "a ", "number "]
    keys = con.execute("SELECT step, rollout_id, trace_id FROM r ORDER BY rollout_id").to_arrow_table()
    for first in range(0, keys.num_rows, 2000):
        part = keys.slice(first, 2000)
        n = part.num_rows

        def lists(values: np.ndarray, n: int = n) -> pa.Array:
            return pa.ListArray.from_arrays(np.arange(0, n * TOKENS + 1, TOKENS, dtype=np.int32), pa.array(values))

        def floats(scale: float, n: int = n) -> np.ndarray:
            return random.normal(-1, scale, n * TOKENS).astype(np.float32)

        picks = random.integers(0, len(words), (n, TOKENS))
        pieces = pa.DictionaryArray.from_arrays(pa.array(picks.ravel().astype(np.int32)), words).dictionary_decode()
        texts = ["".join(words[j] for j in row) for row in picks]
        sampled = floats(1.0)
        old = sampled + random.normal(0, 1e-3, n * TOKENS).astype(np.float32)
        batch = part.append_column("response_text", pa.array(texts)).append_column(
            "prompt_text", pa.array(["What is the sum? " * 20] * n)
        )
        columns = {
            "token_ids": random.integers(0, 49152, n * TOKENS).astype(np.int32),
            "rollout_log_probs": sampled,
            "old_log_probs": old,
            "log_probs": old + random.normal(0, 0.05, n * TOKENS).astype(np.float32),
            "entropy": np.abs(floats(0.5)),
            "advantages": np.repeat(random.normal(0, 1, n).astype(np.float32), TOKENS),
            "loss_mask": np.ones(n * TOKENS, bool),
            "clipped": random.random(n * TOKENS) < 0.01,
        }
        for name, values in columns.items():
            batch = batch.append_column(name, lists(values))
        batch = batch.append_column(
            "token_pieces", pa.ListArray.from_arrays(np.arange(0, n * TOKENS + 1, TOKENS, dtype=np.int32), pieces)
        )
        con.register("batch", batch)
        key = f"'{run}' AS run_id, 1 AS attempt, step, rollout_id, 0 AS turn_index"
        sampled_columns = "trace_id, prompt_text, response_text, token_ids, token_pieces, rollout_log_probs"
        con.execute(f"INSERT INTO token_runs BY NAME SELECT {key}, {sampled_columns} FROM batch")
        trained = "old_log_probs, log_probs, entropy, advantages, loss_mask, clipped"
        facts = "step - 1 AS policy_version, advantages[1] AS advantage"
        con.execute(f"INSERT INTO rollout_training BY NAME SELECT {key}, {facts}, {trained} FROM batch")
        con.unregister("batch")


def dashboard_queries() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Every function of the dashboard that reads, with the arguments the pages give."""
    group, rollout = f"s{STEP:06d}-g003", f"s{STEP:06d}-g003-r005"
    last, sampled = RUNS[BIG], _md5(f"{BIG}{STEP}/3/5")
    yield "runs", queries.runs, ()
    for function in (
        queries.versions, queries.run_facts, queries.attempts, queries.linkage, queries.health, queries.raised_alerts,
        queries.open_spans, queries.curves, queries.signals, queries.validation, queries.drops, queries.components,
        rollout_queries.rollout_choices,
    ):  # fmt: skip
        yield function.__name__, function, (BIG,)
    yield "phase_seconds, whole run", queries.phase_seconds, (BIG, 1, last)
    yield "step_walls", queries.step_walls, (BIG, last - 19, last)
    yield "spans, 1 step", queries.spans, (BIG, STEP, STEP)
    yield "spans, 10 steps", queries.spans, (BIG, STEP, STEP + 9)
    yield "span_totals, 10 steps", queries.span_totals, (BIG, STEP, STEP + 9)
    for label, chosen in {
        "all": RolloutFilter(),
        "one step": RolloutFilter(first=STEP, last=STEP),
        "reward, length": RolloutFilter(min_reward=1.0, finish=("length",)),
        "all pass": RolloutFilter(signal=("all_pass",)),
        "text": RolloutFilter(text="number sum the"),
        "group": RolloutFilter(group_id=group),
    }.items():
        yield f"rollout_counts, {label}", rollout_queries.rollout_counts, (BIG, chosen)
        yield f"rollout_page, {label}", rollout_queries.rollout_page, (BIG, chosen, "reward, high first", 25, 2)
    yield "rollout_page, stalest", rollout_queries.rollout_page, (BIG, RolloutFilter(), "stalest", 25, 1)
    yield "rollout", rollout_queries.rollout, (BIG, rollout)
    yield "reward_components", rollout_queries.reward_components, (BIG, rollout)
    yield "tokens", rollout_queries.tokens, (BIG, rollout, 0)
    yield "siblings", rollout_queries.siblings, (BIG, group)
    yield "trace", rollout_queries.trace, (sampled,)
    yield "catalog", queries.catalog, ()
    yield from trace_page_queries(sampled)
    yield from metric_page_queries()
    for example in examples.EXAMPLES:
        yield f"SQL example: {example.title}", _ask, (example.sql_for(BIG),)
    for relation in ("v_steps", "runs"):
        yield f"select * from {relation}", _ask, (f"SELECT * FROM {relation} WHERE run_id = '{BIG}'",)


def trace_page_queries(sampled: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """What the Traces page asks: lists of traces by each kind of filter, a rollout's trace and a step's."""
    step_trace = _md5(f"{BIG}{STEP}")
    yield "traces: version", trace_queries.version, ()
    yield "traces: services", trace_queries.services, ()
    yield "traces: extent", trace_queries.extent, ()
    for label, chosen in {
        "all": TraceFilter(),
        "run": TraceFilter(run_id=BIG),
        "last hour": TraceFilter(since_ns=FIRST_NS + (STEP - 60) * STEP_NS, until_ns=FIRST_NS + STEP * STEP_NS),
        "name, duration": TraceFilter(name="chat", min_s=10.0),
        "service, errors": TraceFilter(service=("rlinsight.policy",), errors=True),
        "text": TraceFilter(text="gsm8k"),
    }.items():
        yield f"traces: trace_count, {label}", trace_queries.trace_count, (chosen,)
        yield f"traces: trace_page, {label}", trace_queries.trace_page, (chosen, 25, 2)
    yield "traces: step_trace", trace_queries.step_trace, (BIG, STEP)
    for label, trace_id in {"rollout": sampled, "step": step_trace}.items():
        yield f"traces: spans, {label}", trace_queries.spans, (trace_id,)
        yield f"traces: linked_from, {label}", trace_queries.linked_from, (trace_id,)
        yield f"traces: logs, {label}", trace_queries.logs, (trace_id,)
    yield "traces: span", trace_queries.span, (sampled, sampled[:16])
    yield "traces: named", trace_queries.named, ([(sampled, sampled[:16]), (step_trace, _md5(f"{BIG}s{STEP}")[:16])],)


def metric_page_queries() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """What the Metrics page asks of a run as a whole, of its last hour, and of one step."""
    yield "metrics: extent, run", metric_queries.extent, (BIG,)
    yield "metrics: extent, store", metric_queries.extent, (None,)
    yield "metrics: scrape_targets", metric_queries.scrape_targets, (BIG,)
    yield "metrics: step_window", metric_queries.step_window, (BIG, STEP)
    whole = Window(FIRST_NS, FIRST_NS + RUNS[BIG] * STEP_NS, BIG)
    for label, window in {
        "whole run": whole,
        "last hour": Window(whole.until_ns - 60 * STEP_NS, whole.until_ns, BIG),
        "one step": Window(FIRST_NS + (STEP - 1) * STEP_NS, FIRST_NS + STEP * STEP_NS, BIG),
    }.items():
        for function in (metric_queries.catalog, metric_queries.phases, metric_queries.steps):
            yield f"metrics: {function.__name__}, {label}", function, (window,)
        for name, kind, is_monotonic in (
            ("vllm:kv_cache_usage_perc", "gauge", False),
            ("vllm:generation_tokens_total", "sum", True),
            ("vllm:e2e_request_latency_seconds", "histogram", False),
        ):
            yield f"metrics: series of a {kind}, {label}", metric_queries.series, (name, kind, is_monotonic, window)


def unasked() -> list[str]:
    """Functions of the dashboard's modules of queries that read and that no query above calls."""
    asked = {function for _, function, _ in dashboard_queries()}
    modules = (queries, rollout_queries, trace_queries, metric_queries)
    return [
        f"{module.__name__}.{name}"
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
        if "read" in inspect.signature(function).parameters and function not in asked
    ]


def _ask(read: queries.Read, sql: str) -> Any:
    return read(sql, {})


def _md5(text: str) -> str:
    """An id as big_store.sql makes it."""
    return hashlib.md5(text.encode()).hexdigest()


def question_queries() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Every query of docs/questions.md, of the big run."""
    text = (Path(__file__).parents[1] / "docs" / "questions.md").read_text(encoding="utf-8")
    for number, title, sql in re.findall(r"### (\d+)\. (.*?)\n.*?```sql\n(.*?)```", text, flags=re.DOTALL):
        sql = sql.replace("'my-run'", f"'{BIG}'").replace("'other-run'", "'second'")
        sql = re.sub(r"(_step := )7\b", rf"\g<1>{STEP}", sql).replace(
            f"drill_down('{BIG}', 7)", f"drill_down('{BIG}', {STEP})"
        )
        yield f"{number}. {title}", _ask, (sql,)


def reader(path: Path) -> queries.Read:
    """As the dashboard asks: the collector over HTTP, with its limits of memory and threads."""

    def read(sql: str, params: dict[str, Any]) -> Any:
        used = {name: value for name, value in params.items() if f"${name}" in sql}
        return store.query(sql, store=path, params=used or None, timeout_s=600).to_pandas()

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="queries whose name contains this")
    arguments = parser.parse_args()
    if missing := unasked():
        sys.exit(f"not measured: {', '.join(missing)}; add them to dashboard_queries")
    if not arguments.store.exists():
        began = time.perf_counter()
        build(arguments.store)
        print(f"built in {time.perf_counter() - began:.0f} s, {arguments.store.stat().st_size / 1e9:.1f} GB")
    server.start_process(arguments.store, owner_pid=os.getpid())
    read = reader(arguments.store)
    tables = {"spans": "otel_spans", "logs": "otel_logs", "points": "otel_metrics", "rollouts": "rollout_samples"}
    numbers = ", ".join(f"(SELECT count(*) FROM {table}) AS {name}" for name, table in tables.items())
    counts = read(f"SELECT {numbers}, (SELECT sum(len(token_ids)) FROM token_runs) AS tokens", {})
    print(", ".join(f"{int(counts[name][0]):,} {name}" for name in counts))
    print("\n| query | first, ms | median, ms | slowest, ms |\n|---|---|---|---|")
    for name, function, args in [*dashboard_queries(), *question_queries()]:
        if arguments.only not in name:
            continue
        times, ask = [], partial(function, read, *args)
        for _ in range(arguments.rounds + 1):
            began = time.perf_counter()
            ask()
            times.append((time.perf_counter() - began) * 1e3)
        print(f"| {name} | {times[0]:.0f} | {statistics.median(times[1:]):.0f} | {max(times[1:]):.0f} |", flush=True)


if __name__ == "__main__":
    main()
