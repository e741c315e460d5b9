"""Query results come out readable for people and exact for programs."""

from __future__ import annotations

import csv
import datetime
import io
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rlinsight import output
from rlinsight.errors import ConfigError

TABLE = pa.table(
    {
        "step": pa.array([1, 2], pa.int64()),
        "reward": pa.array([0.1 + 0.2, None], pa.float64()),
        "text": ['a, "b"\n[red]c[/red]', ""],
        "tokens": pa.array([[1, 2], None], pa.list_(pa.int32())),
    }
)


def on_terminal(table: pa.Table, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    output.show(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wanted", "file", "is_terminal", "chosen"),
    [
        (None, None, True, "table"),
        (None, None, False, "csv"),
        (None, Path("a.parquet"), True, "parquet"),
        (None, Path("a.json"), True, "json"),
        ("csv", Path("a.json"), True, "csv"),
        ("table", None, False, "table"),
    ],
)
def test_format_follows_option_then_suffix_then_terminal(
    wanted: str | None, file: Path | None, is_terminal: bool, chosen: str
) -> None:
    """The option wins, then the file's suffix, then where the output goes."""
    assert output.choose_format(wanted, file, is_terminal) == chosen


@pytest.mark.parametrize(
    ("wanted", "file", "message"),
    [
        ("xml", None, "--format xml: unknown format 'xml'; use one of table, csv, json, parquet"),
        (None, Path("a.xlsx"), "--output a.xlsx: unknown format 'xlsx'"),
        ("parquet", None, "name it with --output result.parquet"),
    ],
)
def test_impossible_formats_are_refused(wanted: str | None, file: Path | None, message: str) -> None:
    """What cannot be written is refused before the query runs."""
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        output.choose_format(wanted, file, True)


def test_csv_and_json_round_trip_exactly(tmp_path: Path) -> None:
    """Quotes, line breaks, full float precision, lists and NULL survive; NULL is empty in CSV and null in JSON."""
    output.write(TABLE, "csv", tmp_path / "t.csv", Console())
    output.write(TABLE, "json", tmp_path / "t.json", Console())
    output.write(TABLE, "parquet", tmp_path / "t.parquet", Console())
    with (tmp_path / "t.csv").open(newline="") as stream:
        rows = list(csv.reader(stream))
    assert rows == [
        ["step", "reward", "text", "tokens"],
        ["1", "0.30000000000000004", 'a, "b"\n[red]c[/red]', "[1, 2]"],
        ["2", "", "", ""],
    ]
    assert json.loads((tmp_path / "t.json").read_text()) == TABLE.to_pylist()
    assert pq.read_table(tmp_path / "t.parquet").equals(TABLE)


def test_json_holds_what_json_has_no_word_for(tmp_path: Path) -> None:
    """NaN is null, times are ISO 8601, bytes are hex, and no rows are an empty list."""
    moment = datetime.datetime(2026, 1, 31, 10, 15, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "nan": [float("nan")],
            "at": [moment],
            "raw": [b"\x00\xff"],
            "money": [Decimal("1.50")],
            "nested": [{"a": [moment]}],
        }
    )
    output.write(table, "json", tmp_path / "t.json", Console())
    iso = "2026-01-31T10:15:00+00:00"
    expected = {"nan": None, "at": iso, "raw": "00ff", "money": "1.50", "nested": {"a": [iso]}}
    assert json.loads((tmp_path / "t.json").read_text()) == [expected]
    output.write(table.slice(0, 0), "json", tmp_path / "t.json", Console())
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_terminal_table_shows_cells_on_one_line_and_as_they_are() -> None:
    """Control characters are spelled out, markup is not interpreted, NULL differs from the empty string."""
    shown = on_terminal(TABLE)
    assert r'a, "b"\n[red]c[/red]' in shown
    assert shown.count("NULL") == 2
    assert "2 rows" in shown


def test_wide_tables_turn_into_records_with_nothing_cut() -> None:
    """Where columns do not fit side by side, every name and every value is still there in full."""
    wide = pa.table({f"column_{i}": [f"value_{i}"] for i in range(30)})
    shown = on_terminal(wide, width=80)
    assert "-- row 1" in shown
    assert all(f"column_{i}" in shown and f"value_{i}" in shown for i in range(30))
    assert max(map(len, shown.splitlines())) <= 80


def test_long_tables_say_what_they_leave_out() -> None:
    """A terminal gets the first rows and the true count; a file gets all of them."""
    table = pa.table({"n": list(range(1000))})
    shown = on_terminal(table)
    assert "1,000 rows, the first 200 shown" in shown
    assert "999" not in shown


def test_no_rows_still_name_the_columns() -> None:
    """An empty result is told apart from a silent failure."""
    assert on_terminal(TABLE.slice(0, 0)) == "0 rows of step, reward, text, tokens\n"


def test_unwritable_output_is_one_clear_error(tmp_path: Path) -> None:
    """A file that cannot be written is named, with the reason."""
    with pytest.raises(ConfigError, match=r"missing/t.csv: No such file or directory"):
        output.write(TABLE, "csv", tmp_path / "missing" / "t.csv", Console())
