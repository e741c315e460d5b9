"""The commands that look after a store: export it, and keep it small. Parses arguments; the work is done elsewhere.

Heavy imports sit inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinsight import DEFAULT_STORE
from rlinsight.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.progress import Progress

    from collectors.retention import Pruned
    from rlinsight.export import FileFormat

Store = Annotated[
    Path, typer.Option(envvar="RLINSIGHT_STORE", help="DuckDB file of all runs.", show_envvar=True, metavar="FILE")
]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN", help="That run alone; all runs when left out.")]
Services = Annotated[
    list[str] | None,
    typer.Option("--service", metavar="NAME", help="What that service sent outside of runs; repeat it for several."),
]
KeepDays = Annotated[
    float | None,
    typer.Option("--keep-days", metavar="DAYS", help="Remove runs not heard of for longer.", show_default=False),
]
KeepBytes = Annotated[
    str | None,
    typer.Option(
        "--keep-bytes",
        metavar="SIZE",
        help="Remove the oldest runs while the store uses more, e.g. 200GB.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)]

export_app = typer.Typer(
    help="Take runs out of the store: Parquet, CSV, a trace for Perfetto, or OTLP to another endpoint.",
    no_args_is_help=True,
)


@export_app.command("parquet")
def export_parquet(folder: Folder, run: Run = None, service: Services = None, store: Store = DEFAULT_STORE) -> None:
    """Write every table and the main views as Parquet files.

    \b
    rlinsight export parquet backup
    rlinsight export parquet my-run --run quickstart-20260131-101500-1f3a
    """
    _export_files(store, folder, "parquet", run, service)


@export_app.command("csv")
def export_csv(folder: Folder, run: Run = None, service: Services = None, store: Store = DEFAULT_STORE) -> None:
    """Write every table and the main views as CSV files.

    \b
    rlinsight export csv sheets --run quickstart-20260131-101500-1f3a
    """
    _export_files(store, folder, "csv", run, service)


@export_app.command("perfetto")
def export_perfetto(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; *.gz is compressed.", show_default=False)],
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run.")] = None,
    service: Services = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Write the spans of a run as a trace for https://ui.perfetto.dev or chrome://tracing.

    \b
    rlinsight export perfetto trace.json.gz --run quickstart-20260131-101500-1f3a
    rlinsight export perfetto shop.json --service checkout --service payments
    """
    from rlinsight import perfetto

    services = _services(run, service)
    if run is None and not services:
        raise ConfigError("a trace is of one run, or of services; pass --run or --service")
    spans = perfetto.export(store, file, run, services)
    typer.echo(f"{spans:,} spans of {run or ', '.join(services)} in {file}; open it in https://ui.perfetto.dev")


@export_app.command("otlp")
def export_otlp(
    endpoint: Annotated[str, typer.Argument(metavar="URL", help="Base URL of OTLP over HTTP.", show_default=False)],
    run: Run = None,
    service: Services = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="Sent with every request, e.g. Authorization=Bearer ..."),
    ] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Send everything again as OTLP, to another collector or any OpenTelemetry backend.

    \b
    rlinsight export otlp http://127.0.0.1:4318
    rlinsight export otlp https://otlp.example.org --run quickstart-20260131-101500-1f3a --header api-key=...

    Another rlinsight store takes nothing twice, however often it is repeated.
    """
    from collectors.replay import replay

    headers = dict(_header(text) for text in header or ())
    with _progress() as progress:
        bar = progress.add_task("items", total=None)
        done = replay(
            store,
            endpoint,
            run,
            headers,
            lambda items, total: progress.update(bar, completed=items, total=total),
            _services(run, service),
        )
    text = f"{done.items:,} items in {done.requests:,} requests sent to {endpoint}"
    if done.rejected:
        text += f", {done.rejected:,} refused ({done.problem})"
    if done.incomplete:
        text += f", {done.incomplete:,} without the token arrays the store had lost"
    typer.echo(text)


def _services(run: str | None, named: list[str] | None) -> list[str]:
    if run is not None and named:
        raise ConfigError("what a service sent outside of runs is of no run; pass --run or --service, not both")
    return named or []


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"--header {text!r} is not of the form NAME=VALUE")
    return name.strip(), value.strip()


def prune(
    keep_days: KeepDays = None,
    keep_bytes: KeepBytes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    store: Store = DEFAULT_STORE,
) -> None:
    """Remove old runs, whole, and never one that may be alive; also while a collector runs.

    \b
    rlinsight prune --keep-days 30 --dry-run
    rlinsight prune --keep-bytes 50GB

    The space is used again for new rows; `rlinsight compact` gives it back to the disk.
    """
    from rich.console import Console

    from collectors.pruning import prune
    from collectors.retention import Keep
    from rlinsight.output import choose_format, write

    keep = Keep(keep_days, in_bytes(keep_bytes))
    if not keep:
        raise ConfigError("nothing to go by; pass --keep-days, --keep-bytes or both")
    runs = prune(store, keep, dry_run)
    if runs:
        write(_table(runs), choose_format(None, None, sys.stdout.isatty()), None, Console())
    typer.echo(f"{len(runs)} {'to be removed' if dry_run else 'removed'}", err=True)


def in_bytes(size: str | None) -> int | None:
    """A size such as 200GB, 1.5TiB or 1000000, in bytes. Raises ConfigError."""
    if size is None:
        return None
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        number = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        number = 0
    if number <= 0:
        raise ConfigError(f"--keep-bytes {size!r} is no size; write one like 200GB or 1.5TiB")
    return number


def _table(runs: list[Pruned]) -> pa.Table:
    import pyarrow as pa

    return pa.table(
        {
            "run_id": pa.array([run.run_id for run in runs], pa.string()),
            "reason": [run.reason for run in runs],
            "last_heard": pa.array([(run.last_heard_ns or 0) // 1000 for run in runs], pa.timestamp("us")),
            "estimated_bytes": pa.array([run.bytes for run in runs], pa.int64()),
            "rows": pa.array([run.rows for run in runs], pa.int64()),
        }
    )


def compact(store: Store = DEFAULT_STORE) -> None:
    """Rewrite the store without the space of removed rows, and with each run's rows together.

    \b
    rlinsight compact

    Not while a collector runs. Needs room for a second copy; the store is replaced when that is complete and verified.
    """
    from collectors.compact import compact

    with _progress() as progress:
        bar = progress.add_task("", total=None)

        def report(table: str, done: int, total: int) -> None:
            progress.update(bar, description=table, completed=done, total=total)

        before, after = compact(store, report)
    typer.echo(f"{store}: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now")


def rebuild(store: Store = DEFAULT_STORE) -> None:
    """Make the domain tables (runs, steps, rollouts, ...) anew from the raw OpenTelemetry rows.

    \b
    rlinsight rebuild

    For a store that was written by an older version, or whose tables were edited by hand. All or nothing; not while a
    collector runs.
    """
    from collectors.rebuild import rebuild

    with _progress() as progress:
        bar = progress.add_task("raw rows", total=None)
        done = rebuild(store, lambda items, total: progress.update(bar, completed=items, total=total))
    lost = f"; {done.incomplete} of them had lost their token arrays" if done.incomplete else ""
    typer.echo(f"{done.rows:,} rows from {done.items:,} spans and log records{lost}")


def _export_files(store: Path, folder: Path, form: FileFormat, run: str | None, service: list[str] | None) -> None:
    from rlinsight.export import export

    services, written = _services(run, service), []
    with _progress() as progress:
        bar = progress.add_task("", total=None)
        for item in export(store, folder, form, run, services):
            written.append(item)
            progress.update(bar, description=item.name, completed=item.number, total=item.total)
    typer.echo(f"{len(written)} files with {sum(item.rows for item in written):,} rows in {folder}")


def _progress() -> Progress:
    """A bar on a terminal that is gone afterwards; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
