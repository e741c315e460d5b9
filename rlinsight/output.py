"""Query results for people and programs: a terminal table, CSV, JSON, Parquet.

Takes an Arrow table and writes it; runs no query and knows no schema.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from rlinsight.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

Format = Literal["table", "csv", "json", "parquet"]
FORMATS: tuple[str, ...] = get_args(Format)

# Past these a terminal scrolls more than it shows; the files formats write everything.
MAX_TABLE_ROWS = 200
MAX_CELL_WIDTH = 60


def choose_format(wanted: str | None, file: Path | None, is_terminal: bool) -> Format:
    """The format asked for, else the output file's suffix, else a table on a terminal and CSV in a pipe.

    Raises ConfigError for an unknown format or suffix, and for Parquet without a file.
    """
    chosen = wanted or (file.suffix.removeprefix(".") if file else "table" if is_terminal else "csv")
    if chosen not in FORMATS:
        source = f"--format {wanted}" if wanted else f"--output {file}"
        raise ConfigError(f"{source}: unknown format {chosen!r}; use one of {', '.join(FORMATS)}")
    if chosen == "parquet" and file is None:
        raise ConfigError("--format parquet writes a binary file; name it with --output result.parquet")
    return chosen  # type: ignore[return-value]


def write(table: pa.Table, form: Format, file: Path | None, console: Console) -> None:
    """Write ``table`` to ``file``, or to standard output (a table: to ``console``). Raises ConfigError if it cannot."""
    if form == "table" and file is None:
        show(table, console)
        return
    try:
        if form == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(table, file)
            return
        if file is None:
            _write_text(table, form, sys.stdout)
            return
        with file.open("w", encoding="utf-8", newline="") as stream:
            _write_text(table, form, stream)
    except OSError as error:
        if file is None:
            raise
        raise ConfigError(f"--output {file}: {error.strerror}; name a file in a folder you can write") from None


def _write_text(table: pa.Table, form: Format, stream: TextIO) -> None:
    if form == "table":
        from rich.console import Console

        show(table, Console(file=stream, width=10_000))
    elif form == "csv":
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table.column_names)
        for row in _rows(table):
            writer.writerow(["" if value is None else _plain(value) for value in row])
    else:
        names = table.column_names
        stream.write("[")
        for i, row in enumerate(_rows(table)):
            record = dict(zip(names, map(_jsonable, row), strict=True))
            stream.write(("\n" if i == 0 else ",\n") + json.dumps(record, ensure_ascii=False, allow_nan=False))
        stream.write("\n]\n" if table.num_rows else "]\n")


def show(table: pa.Table, console: Console) -> None:
    """Print a table; where that is wider than the terminal, one block per row instead of cut columns."""
    from rich.cells import cell_len
    from rich.markup import escape

    if table.num_rows == 0:
        console.print(f"0 rows of {', '.join(table.column_names)}", markup=False, highlight=False, style="dim")
        return
    shown = table.slice(0, MAX_TABLE_ROWS)
    rows = [[_cell(value) for value in row] for row in _rows(shown)]
    widths = [max(cell_len(text) for text in column) for column in zip(table.column_names, *rows, strict=True)]
    if sum(widths) + 3 * len(widths) <= console.width:
        _show_grid(table, rows, console)
    else:
        _show_records(table.column_names, rows, console)
    count = f"{table.num_rows:,} row" + ("" if table.num_rows == 1 else "s")
    if table.num_rows > MAX_TABLE_ROWS:
        count += f", the first {MAX_TABLE_ROWS} shown; --format csv or --output FILE has them all"
    console.print(f"[dim]{escape(count)}[/dim]")


def _show_grid(table: pa.Table, rows: list[list[str]], console: Console) -> None:
    import pyarrow.types as types
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        grid.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(cell, style="dim" if cell == "NULL" else "") for cell in row))
    console.print(grid)


def _show_records(names: list[str], rows: list[list[str]], console: Console) -> None:
    from rich.text import Text

    margin = max(map(len, names))
    for number, row in enumerate(rows, start=1):
        console.print(Text(f"-- row {number} ".ljust(min(console.width, margin + MAX_CELL_WIDTH), "-"), style="dim"))
        for name, cell in zip(names, row, strict=True):
            console.print(Text.assemble((name.ljust(margin), "bold"), "  ", cell), no_wrap=True, overflow="ellipsis")


def _rows(table: pa.Table) -> Any:
    """Rows as tuples of Python values, a record batch at a time."""
    for batch in table.to_batches(max_chunksize=4096):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _cell(value: Any) -> str:
    """One line of at most MAX_CELL_WIDTH characters; NULL spelled out, since an empty string is a value."""
    if value is None:
        return "NULL"
    text = f"{value:.6g}" if isinstance(value, float) else _plain(value)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: MAX_CELL_WIDTH + 1])
    return text if len(text) <= MAX_CELL_WIDTH else text[: MAX_CELL_WIDTH - 1] + "…"


def _plain(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(_jsonable(value), ensure_ascii=False)
    return str(value)


def _jsonable(value: Any) -> Any:
    """JSON has no NaN, time, bytes or decimal: null, ISO 8601, hex and a number stand for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
