"""How long the dashboard's queries and the questions of docs/questions.md take on a big store.

    python benchmarks/queries.py STORE.duckdb [--rounds 5] [--only NAME]

Builds the store at that path when it is not there (a minute or two, 0.5 GB): four runs, 1,000,000 spans,
100,000 rollouts, 20,000,000 tokens in all, two thirds of each in the run that is asked about. Rows go straight into the
tables, in the order of steps. Prints the median and the slowest of some rounds after a first one, in ms, asked of
a real collector over HTTP, conversion to pandas included, as the dashboard does it.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from collectors import server
from dashboards import queries, rollout_queries
from dashboards.rollout_queries import RolloutFilter
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


def dashboard_queries(read: queries.Read) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every function of dashboards/queries.py with the arguments the pages give."""
    group, rollout = f"s{STEP:06d}-g003", f"s{STEP:06d}-g003-r005"
    last = RUNS[BIG]
    yield "runs", lambda: queries.runs(read)
    for function in (
        queries.versions, queries.run_facts, queries.attempts, queries.linkage, queries.health, queries.open_spans,
        queries.curves, queries.signals, queries.components, rollout_queries.rollout_choices,
    ):  # fmt: skip
        yield function.__name__, lambda function=function: function(read, BIG)
    yield "phase_seconds, whole run", lambda: queries.phase_seconds(read, BIG, 1, last)
    yield "step_walls", lambda: queries.step_walls(read, BIG, last - 19, last)
    yield "spans, 1 step", lambda: queries.spans(read, BIG, STEP, STEP)
    yield "spans, 10 steps", lambda: queries.spans(read, BIG, STEP, STEP + 9)
    yield "span_totals, 10 steps", lambda: queries.span_totals(read, BIG, STEP, STEP + 9)
    for label, chosen in {
        "all": RolloutFilter(),
        "one step": RolloutFilter(first=STEP, last=STEP),
        "reward, length": RolloutFilter(min_reward=1.0, finish=("length",)),
        "all pass": RolloutFilter(signal=("all_pass",)),
        "text": RolloutFilter(text="number sum the"),
        "group": RolloutFilter(group_id=group),
    }.items():
        yield f"rollout_counts, {label}", lambda chosen=chosen: rollout_queries.rollout_counts(read, BIG, chosen)
        yield (
            f"rollout_page, {label}",
            lambda chosen=chosen: rollout_queries.rollout_page(read, BIG, chosen, "reward, high first", 25, 2),
        )
    yield "rollout_page, stalest", lambda: rollout_queries.rollout_page(read, BIG, RolloutFilter(), "stalest", 25, 1)
    yield "rollout", lambda: rollout_queries.rollout(read, BIG, rollout)
    yield "reward_components", lambda: rollout_queries.reward_components(read, BIG, rollout)
    yield "tokens", lambda: rollout_queries.tokens(read, BIG, rollout, 0)
    yield "siblings", lambda: rollout_queries.siblings(read, BIG, group)
    trace_id = read("SELECT trace_id FROM rollout_samples WHERE run_id = $run LIMIT 1", {"run": BIG})["trace_id"][0]
    yield "trace", lambda: rollout_queries.trace(read, trace_id)
    yield "catalog", lambda: queries.catalog(read)
    yield "select * from v_steps", lambda: read("SELECT * FROM v_steps WHERE run_id = $run", {"run": BIG})
    yield "select * from runs", lambda: read("SELECT * FROM runs", {})


def question_queries(read: queries.Read) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every query of docs/questions.md, of the big run."""
    text = (Path(__file__).parents[1] / "docs" / "questions.md").read_text(encoding="utf-8")
    for number, title, sql in re.findall(r"### (\d+)\. (.*?)\n.*?```sql\n(.*?)```", text, flags=re.DOTALL):
        sql = sql.replace("'my-run'", f"'{BIG}'").replace("'other-run'", "'second'")
        sql = re.sub(r"(_step := )7\b", rf"\g<1>{STEP}", sql).replace(
            f"drill_down('{BIG}', 7)", f"drill_down('{BIG}', {STEP})"
        )
        yield f"{number}. {title}", lambda sql=sql: read(sql, {})


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
    if not arguments.store.exists():
        began = time.perf_counter()
        build(arguments.store)
        print(f"built in {time.perf_counter() - began:.0f} s, {arguments.store.stat().st_size / 1e9:.1f} GB")
    server.start_process(arguments.store, owner_pid=os.getpid())
    read = reader(arguments.store)
    spans, rollouts = (f"(SELECT count(*) FROM {table})" for table in ("otel_spans", "rollout_samples"))
    tokens = "(SELECT sum(len(token_ids)) FROM token_runs)"
    counts = read(f"SELECT {spans} AS spans, {rollouts} AS rollouts, {tokens} AS tokens", {})
    print(", ".join(f"{int(counts[name][0]):,} {name}" for name in counts))
    print("\n| query | first, ms | median, ms | slowest, ms |\n|---|---|---|---|")
    for name, ask in [*dashboard_queries(read), *question_queries(read)]:
        if arguments.only not in name:
            continue
        times = []
        for _ in range(arguments.rounds + 1):
            began = time.perf_counter()
            ask()
            times.append((time.perf_counter() - began) * 1e3)
        print(f"| {name} | {times[0]:.0f} | {statistics.median(times[1:]):.0f} | {max(times[1:]):.0f} |", flush=True)


if __name__ == "__main__":
    main()
