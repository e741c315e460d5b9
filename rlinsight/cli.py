"""The ``rlinsight`` command. Parses arguments and turns errors into one line and an exit code.

Heavy imports sit inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rlinsight import DEFAULT_STORE
from rlinsight.errors import ConfigError, RlinsightError
from rlinsight.store_cli import KeepBytes, KeepDays, Store, compact, export_app, in_bytes, prune, rebuild

if TYPE_CHECKING:
    from rlinsight.config import Config

app = typer.Typer(
    name="rlinsight",
    help="RL post-training for language models, built observability-first.\n\n"
    "Start with: rlinsight train configs/quickstart.yaml",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,  # what is left is a bug, and a plain traceback reads better in a report
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show what a config resolves to, or every option there is.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(export_app, name="export")
for _command in (prune, compact, rebuild):
    app.command()(_command)

# Columns people scan first; `select * from runs` has the rest.
RUNS = """
SELECT run_id, status, model, algorithm, steps_done AS step, total_steps, last_reward, attempts, started
FROM runs ORDER BY started DESC
"""

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the file, e.g. trainer.total_steps=3", show_default=False),
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE | RUN",
            help="Changes to the file; with --resume also the id or folder of the run to continue.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint of RUN, or of the newest run.")
    ] = False,
) -> None:
    """Train a model with the run described in CONFIG.

    \b
    rlinsight train configs/quickstart.yaml
    rlinsight train configs/quickstart.yaml trainer.total_steps=5 rollout.group_size=4
    rlinsight train configs/quickstart.yaml --resume
    rlinsight train configs/quickstart.yaml --resume quickstart-20260131-101500-1f3a

    Ctrl-C finishes an update that has begun, drops a step whose update has not, and leaves a checkpoint; twice stops at
    once.
    """
    from rich.console import Console

    words = overrides or []
    runs = [word for word in words if "=" not in word] if resume else []
    if len(runs) > 1:
        raise ConfigError(f"--resume takes one run, not {len(runs)}: {', '.join(runs)}")
    loaded = _load(config, [word for word in words if word not in runs])

    from rlinsight import launch

    raise typer.Exit(launch.train(loaded, Console(), resume=resume, wanted=runs[0] if runs else None))


@app.command()
def dashboard(
    store: Store = DEFAULT_STORE,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 8501,
    host: Annotated[str, typer.Option(help="Address to serve on; it has no login, so keep it local.")] = "127.0.0.1",
) -> None:
    """Serve the dashboard, also while a run is training.

    \b
    rlinsight dashboard
    rlinsight dashboard --store /data/team.duckdb --port 8600
    """
    import importlib.util

    from dashboards.launch import command
    from rlinsight.store import is_loopback

    if importlib.util.find_spec("streamlit") is None:
        raise ConfigError("the dashboard needs streamlit; run: pip install 'rlinsight[dash]'")
    _require_free(host, port)
    if not is_loopback(host):
        print(
            f"warning: {host}:{port} has no login: whoever reaches it reads every prompt and response of {store} and "
            "can run any query; serve on 127.0.0.1 and reach it by 'ssh -L', or put a proxy with a login in front",
            file=sys.stderr,
        )
    _replace_process(command(store, port, host))


@app.command()
def sql(
    query: Annotated[
        str | None,
        typer.Argument(metavar="QUERY", help="One SELECT; - reads it from standard input.", show_default=False),
    ] = None,
    store: Store = DEFAULT_STORE,
    format: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", metavar="table|csv|json|parquet", help="Default: table on a terminal, csv in a pipe."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there; the suffix picks the format.")
    ] = None,
) -> None:
    """Query the store in SQL: read-only, live or at rest.

    \b
    rlinsight sql "select * from runs"
    rlinsight sql "select step, reward_mean, entropy from train_metrics order by step" -o curve.csv
    rlinsight sql "select rollout_id, reward, response_text from rollouts order by reward limit 5"
    rlinsight sql "show tables"
    rlinsight sql - < question.sql
    """
    from rich.console import Console

    from rlinsight.output import choose_format, write
    from rlinsight.store import query as run_query

    if query is None and sys.stdin.isatty():
        raise ConfigError('no query; for example: rlinsight sql "select * from runs"')
    text = sys.stdin.read() if query in (None, "-") else query
    if not text or not text.strip():
        raise ConfigError("the query is empty; pass one SELECT as an argument or on standard input")
    form = choose_format(format, output, sys.stdout.isatty())
    write(run_query(text, store=store), form, output, Console())


@app.command()
def runs(
    store: Store = DEFAULT_STORE,
    format: Annotated[str | None, typer.Option("--format", "-f", metavar="table|csv|json")] = None,
) -> None:
    """List the runs of the store, newest first.

    \b
    rlinsight runs
    rlinsight runs --format json
    """
    from rich.console import Console

    from rlinsight.output import choose_format, write
    from rlinsight.store import query as run_query

    form = choose_format(format, None, sys.stdout.isatty())
    write(run_query(RUNS, store=store), form, None, Console())


@app.command()
def collect(
    store: Store = DEFAULT_STORE,
    listen: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; beyond loopback senders need the token.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keeps the token across restarts; made, for you alone, when missing.",
            show_default=False,
        ),
    ] = None,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="OTLP over HTTP; 0 picks a free port.")] = 4318,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="OTLP over gRPC; 0 picks a free port.")] = 4317,
    sql_port: Annotated[int, typer.Option(min=0, max=65535, help="Live SQL; 0 picks a free port.")] = 0,
    keep_days: KeepDays = None,
    keep_bytes: KeepBytes = None,
) -> None:
    """Run a collector: the one process that writes a store.

    It runs until it is stopped. `rlinsight train` starts one by itself when none runs for its store.

    \b
    rlinsight collect
    rlinsight collect --store /data/team.duckdb --http-port 0 --grpc-port 0
    rlinsight collect --store /data/team.duckdb --listen 0.0.0.0 --token-file /data/team.token
    rlinsight collect --keep-days 90 --keep-bytes 200GB
    """
    # It owns itself, so that a training run that joins it does not take it along when it leaves.
    owner = ["--owner-pid", str(os.getpid())]
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--sql-port", str(sql_port)]
    token = ["--token-file", str(token_file)] if token_file else []
    # -P: a queue.py in the working directory is not the standard library's.
    command = [sys.executable, "-P", "-m", "collectors", "--store", str(store), "--listen", listen]
    keep = ["--keep-days", str(keep_days)] if keep_days is not None else []
    keep += ["--keep-bytes", str(in_bytes(keep_bytes))] if keep_bytes is not None else []
    _replace_process([*command, *token, *owner, *ports, *keep])


@app.command()
def ingest(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or the spool in it.", show_default=False)
    ],
    store: Store = DEFAULT_STORE,
) -> None:
    """Deliver telemetry recorded while no collector ran.

    \b
    rlinsight ingest runs/quickstart-20260131-101500-1f3a

    What the store already holds is recognised and not stored twice.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name the spool folder of a run")

    from rlinsight import launch

    typer.echo(launch.ingest(directory, store))


@app.command()
def docs(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the pages.")] = Path(
        "docs/reference"
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail when a page in DIR is not as it would be.")
    ] = False,
) -> None:
    """Write the reference of the store: its tables, views, macros, and all names that are emitted.

    \b
    rlinsight docs
    rlinsight docs -o /tmp/reference
    rlinsight docs --check
    """
    from collectors.reference import pages

    for name, text in pages().items():
        path = output / name
        if not check:
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{path} is not what the schema and the names say now; run: rlinsight docs -o {output}")


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print CONFIG with every default and override filled in.

    \b
    rlinsight config show configs/quickstart.yaml trainer.total_steps=5
    """
    import yaml

    typer.echo(yaml.safe_dump(_load(config, overrides or []).model_dump(mode="json"), sort_keys=False), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of CONFIG: every option, its default and its meaning.

    \b
    rlinsight config schema > rlinsight.schema.json
    """
    import json

    from rlinsight.config import schema

    typer.echo(json.dumps(schema(), indent=2))


def main() -> None:
    """Entry point of the ``rlinsight`` script."""
    try:
        app()
    except RlinsightError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _load(file: Path, overrides: list[str]) -> Config:
    """The config with RLINSIGHT_STORE as its store unless it names one: training writes where the readers look."""
    import json

    from rlinsight.config import load

    loaded = load(file, overrides)
    store = os.environ.get("RLINSIGHT_STORE")
    if store and "store" not in loaded.telemetry.model_fields_set:
        loaded = load(file, [*overrides, f"telemetry.store={json.dumps(store)}"])
    return loaded


def _require_free(host: str, port: int) -> None:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot serve on {host}:{port}: {error.strerror}; pass another --port") from None


def _replace_process(command: list[str]) -> NoReturn:
    """Become ``command``, so that it gets our signals and its exit code is ours."""
    sys.stdout.flush()
    os.execv(command[0], command)
