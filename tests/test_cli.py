"""The command line teaches, answers in the asked-for format, and fails in one line with an exit code."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
import yaml

from rlinsight import cli, schema, store_cli

SCRIPT = Path(sys.executable).with_name("rlinsight")
QUICKSTART = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
COMMANDS = [
    *(command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback),
    "config show",
    "config schema",
    *(f"export {command.name}" for command in store_cli.export_app.registered_commands),
]


def rlinsight(*arguments: str, cwd: Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed script; standard input and output are pipes."""
    env = {key: value for key, value in os.environ.items() if key != "RLINSIGHT_STORE"} | environment
    return subprocess.run(
        [SCRIPT, *arguments], cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=60
    )


def refused(result: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    """One line on standard error, nothing on standard output, no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store at rest with one run of two steps."""
    path = tmp_path_factory.mktemp("store") / "s.duckdb"
    with duckdb.connect(str(path)) as con:
        schema.apply(con, path)
        con.execute("INSERT INTO run_starts (run_id, attempt, time_ns, name) VALUES ('r-1', 1, 1000000000, 'r')")
        con.execute(
            "INSERT INTO step_metrics (run_id, attempt, step, time_ns, name, value) "
            "VALUES ('r-1', 1, 1, 1, 'reward/mean', 0.25), ('r-1', 1, 2, 2, 'reward/mean', NULL)"
        )
    return path


# Help ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str, tmp_path: Path) -> None:
    """--help of every command says what it does and shows a line to paste."""
    result = rlinsight(*command.split(), "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert re.search(rf"(?m)^\s+rlinsight {command}", result.stdout)


def test_wrong_usage_exits_2(tmp_path: Path) -> None:
    """An unknown command or option is told apart from a run that failed."""
    for arguments in (["trian"], ["sql", "--stroe", "x"]):
        result = rlinsight(*arguments, cwd=tmp_path)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


# Config --------------------------------------------------------------------------------------------------------------


def test_config_show_resolves_defaults_overrides_and_the_store(tmp_path: Path) -> None:
    """The output is a config again, with overrides applied and RLINSIGHT_STORE where the file names no store."""
    result = rlinsight(
        "config", "show", QUICKSTART, "trainer.total_steps=5", cwd=tmp_path, RLINSIGHT_STORE="x/y.duckdb"
    )
    shown = yaml.safe_load(result.stdout)
    assert shown["trainer"]["total_steps"] == 5
    assert shown["trainer"]["weight_decay"] == 0
    assert shown["telemetry"]["store"] == "x/y.duckdb"


def test_config_schema_describes_every_option(tmp_path: Path) -> None:
    """The schema is JSON and no option of it lacks a description."""
    described = json.loads(rlinsight("config", "schema", cwd=tmp_path).stdout)
    options = [option for section in described["$defs"].values() for option in section["properties"].items()]
    undescribed = [name for name, option in options if "description" not in option and name != "type"]
    assert undescribed == []


def test_a_typo_in_the_config_is_one_line(tmp_path: Path) -> None:
    """The refusal of the config reaches the terminal with exit code 2."""
    result = rlinsight("train", QUICKSTART, "trainer.total_step=5", cwd=tmp_path)
    refused(result, 2, "trainer.total_step: unknown key; did you mean 'total_steps'?")
    refused(rlinsight("train", "missing.yaml", cwd=tmp_path), 2, "missing.yaml does not exist")


# Train ---------------------------------------------------------------------------------------------------------------


def test_train_refuses_at_once_what_cannot_work(tmp_path: Path) -> None:
    """A missing dataset and a run that is not there are said before anything is started or written."""
    train = ["train", QUICKSTART]
    refused(
        rlinsight(*train, "data.train=no.jsonl", "data.task_args={}", cwd=tmp_path), 1, "data.train=no.jsonl: no such"
    )
    refused(rlinsight(*train, "model.source=package:no_such", cwd=tmp_path), 1, "'no_such' is not installed")
    refused(rlinsight(*train, "--resume", "model.source=a/b", cwd=tmp_path), 1, "no run called 'quickstart' under runs")
    refused(rlinsight(*train, "--resume", "r-1", "model.source=a/b", cwd=tmp_path), 1, "no run 'r-1' under runs")
    refused(rlinsight(*train, "--resume", "r-1", "r-2", cwd=tmp_path), 2, "--resume takes one run, not 2")
    refused(rlinsight(*train, "r-1", cwd=tmp_path), 2, "override 'r-1'")
    assert list(tmp_path.iterdir()) == []


# SQL -----------------------------------------------------------------------------------------------------------------


def test_sql_in_a_pipe_is_csv(store: Path, tmp_path: Path) -> None:
    """A program reads every row and column; RLINSIGHT_STORE and --store name the store alike."""
    query = "select step, reward_mean from train_metrics order by step"
    result = rlinsight("sql", query, "--store", str(store), cwd=tmp_path)
    assert list(csv.reader(io.StringIO(result.stdout))) == [["step", "reward_mean"], ["1", "0.25"], ["2", ""]]
    assert rlinsight("sql", query, cwd=tmp_path, RLINSIGHT_STORE=str(store)).stdout == result.stdout
    assert rlinsight("sql", "-", "--store", str(store), cwd=tmp_path, stdin=query).stdout == result.stdout
    assert rlinsight("sql", "--store", str(store), cwd=tmp_path, stdin=query).stdout == result.stdout


def test_sql_writes_the_format_asked_for(store: Path, tmp_path: Path) -> None:
    """JSON, a table, and Parquet by the file's suffix hold the same rows."""
    sql = ["sql", "select step, reward_mean from train_metrics order by step", "--store", str(store)]
    rows = [{"step": 1, "reward_mean": 0.25}, {"step": 2, "reward_mean": None}]
    assert json.loads(rlinsight(*sql, "--format", "json", cwd=tmp_path).stdout) == rows
    assert "2 rows" in rlinsight(*sql, "--format", "table", cwd=tmp_path).stdout
    assert rlinsight(*sql, "-o", "t.parquet", cwd=tmp_path).stdout == ""
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == rows


def test_sql_failures_are_one_line(store: Path, tmp_path: Path) -> None:
    """No store, no query, a bad query, a write and a bad format: each says what fixes it, and changes nothing."""
    at = ["--store", str(store)]
    before = store.read_bytes()
    refused(rlinsight("sql", "select 1", cwd=tmp_path), 1, "rlinsight train")
    refused(rlinsight("sql", "", *at, cwd=tmp_path), 2, "the query is empty")
    refused(rlinsight("sql", "select nonsense from runs", *at, cwd=tmp_path), 1, "nonsense")
    refused(rlinsight("sql", "drop table steps", *at, cwd=tmp_path), 1, "")
    refused(rlinsight("sql", "select 1", "-f", "xml", *at, cwd=tmp_path), 2, "unknown format 'xml'")
    assert store.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_runs_lists_every_run(store: Path, tmp_path: Path) -> None:
    """One line per run with how far it got."""
    [run] = json.loads(rlinsight("runs", "--store", str(store), "-f", "json", cwd=tmp_path).stdout)
    assert (run["run_id"], run["last_reward"]) == ("r-1", 0.25)


def test_a_reader_that_leaves_early_is_no_error(store: Path, tmp_path: Path) -> None:
    """`| head -1` ends the command quietly."""
    line = f"{SCRIPT} sql 'select range from range(1000000)' --store {store} | head -1"
    result = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("range\n", "")


# Processes -----------------------------------------------------------------------------------------------------------


def test_a_taken_dashboard_port_is_one_line(store: Path, tmp_path: Path) -> None:
    """The port and the option that changes it are named before Streamlit starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = rlinsight("dashboard", "--store", str(store), "--port", str(port), cwd=tmp_path)
    refused(result, 2, f"cannot serve on 127.0.0.1:{port}: Address already in use; pass another --port")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_dashboard_others_can_reach_warns(host: str, store: Path, tmp_path: Path) -> None:
    """Beyond loopback one line on stderr says that there is no login; on loopback there is none."""
    with socket.socket() as free:
        free.bind((host, 0))
        port = str(free.getsockname()[1])
    script = Path(sys.executable).with_name("rlinsight")
    command = [script, "dashboard", "--store", str(store), "--host", host, "--port", port]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex((host, int(port))) == 0:
                break
        time.sleep(0.1)
    process.kill()
    err = process.communicate()[1]
    assert err.count("has no login") == (host == "0.0.0.0"), err


def test_ingest_wants_a_folder(tmp_path: Path) -> None:
    """A wrong folder is refused before a collector starts."""
    refused(rlinsight("ingest", "missing", cwd=tmp_path), 2, "missing is not a directory")
    assert list(tmp_path.iterdir()) == []


# Life of a store -----------------------------------------------------------------------------------------------------


def test_prune_says_what_would_go(store: Path, tmp_path: Path) -> None:
    """A dry run lists the runs, as CSV in a pipe; without a limit, or with one that is none, it is refused."""
    dry = ["prune", "--store", str(store), "--dry-run"]
    result = rlinsight(*dry, "--keep-days", "30", cwd=tmp_path)
    (line,) = csv.DictReader(io.StringIO(result.stdout))
    assert (line["run_id"], line["reason"], line["rows"]) == ("r-1", "age", "")
    assert result.stderr == "1 to be removed\n"
    refused(rlinsight(*dry, cwd=tmp_path), 2, "pass --keep-days")
    refused(rlinsight(*dry, "--keep-days", "0", cwd=tmp_path), 2, "keep-days 0")
    refused(rlinsight("collect", "--store", str(store), "--keep-days", "-1", cwd=tmp_path), 2, "keep-days -1")
    refused(rlinsight(*dry, "--keep-bytes", "much", cwd=tmp_path), 2, "'much' is no size")


def test_a_store_is_compacted_and_rebuilt(store: Path, tmp_path: Path) -> None:
    """One line each says what was done."""
    copy = Path(shutil.copy(store, tmp_path / "s.duckdb"))
    result = rlinsight("compact", "--store", str(copy), cwd=tmp_path)
    assert re.fullmatch(r".*s\.duckdb: \d+\.\d MB before, \d+\.\d MB now\n", result.stdout), result.stderr
    result = rlinsight("rebuild", "--store", str(copy), cwd=tmp_path)
    assert result.stdout == "0 rows from 0 spans and log records\n"
    refused(rlinsight("rebuild", "--store", str(tmp_path / "none.duckdb"), cwd=tmp_path), 1, "no store at")


def test_exports_say_what_they_wrote(store: Path, tmp_path: Path) -> None:
    """Files, a trace, and refusals of what cannot be."""
    result = rlinsight("export", "csv", "out", "--run", "r-1", "--store", str(store), cwd=tmp_path)
    assert re.fullmatch(r"\d+ files with \d+ rows in out\n", result.stdout), result.stderr
    refused(rlinsight("export", "csv", "out", "--store", str(store), cwd=tmp_path), 1, "not overwritten")
    result = rlinsight("export", "perfetto", "t.json", "--run", "r-1", "--store", str(store), cwd=tmp_path)
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["run_id"] == "r-1", result.stderr
    perfetto = ["export", "perfetto", "u.json", "--store", str(store)]
    refused(rlinsight(*perfetto, cwd=tmp_path), 2, "pass --run or --service")
    refused(rlinsight(*perfetto, "--run", "r-1", "--service", "shop", cwd=tmp_path), 2, "not both")
    refused(rlinsight(*perfetto, "--service", "shop", cwd=tmp_path), 1, "no service 'shop'")
    otlp = ["export", "otlp", "http://127.0.0.1:1", "--store", str(store)]
    refused(rlinsight(*otlp, "--header", "key", cwd=tmp_path), 2, "NAME=VALUE")
    assert rlinsight(*otlp, cwd=tmp_path).stdout == "0 items in 0 requests sent to http://127.0.0.1:1\n"
