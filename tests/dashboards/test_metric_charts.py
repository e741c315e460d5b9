from __future__ import annotations

import json

import pandas as pd

from dashboards import metric_charts, palette
from dashboards.metric_charts import LEGEND, Panel

SECOND = 10**9
NOTHING = pd.DataFrame(columns=["phase", "step", "start_ns", "end_ns"])


def lines(*rows: dict) -> pd.DataFrame:
    """One series per row of facts, each with two points: value, and high one above."""
    plain = {"service_name": "svc", "service_instance_id": "i", "rank": None, "host": "node", "attributes": "{}"}
    frames = [
        pd.DataFrame({"time_ns": [0, SECOND], "value": [0.25, 0.5], "high": [1.25, 1.5]}).assign(
            series=i, total=row.get("total", len(rows)), **plain | {k: v for k, v in row.items() if k in plain}
        )
        for i, row in enumerate(rows)
    ]
    return pd.concat(frames, ignore_index=True)


def metric(name: str = "m", kind: str = "gauge", unit: str | None = None, monotonic: bool = False) -> pd.Series:
    return pd.Series({"name": name, "kind": kind, "unit": unit, "is_monotonic": monotonic})


def draw(series: pd.DataFrame, of: pd.Series | None = None, phases=NOTHING, steps=NOTHING):
    return metric_charts.figure([Panel(metric() if of is None else of, series)], phases, steps, 0, 10 * SECOND)


def title(series: pd.DataFrame, of: pd.Series | None = None) -> str:
    return draw(series, of).layout.annotations[0].text


def test_labels_hold_only_what_differs() -> None:
    """Constant facts are left out; without any difference the service stands for the series."""
    modes = lines({"attributes": '{"cpu.mode":"user","x":1}'}, {"attributes": '{"cpu.mode":"system","x":1}'})
    assert metric_charts.labels(modes) == {0: "user", 1: "system"}
    assert metric_charts.labels(lines({"service_name": "rlinsight.policy"})) == {0: "policy"}
    assert metric_charts.labels(lines({"service_name": None})) == {0: "all"}


def test_labels_name_ranks_hosts_and_services() -> None:
    """Two ranks on two hosts beside another service are three different names."""
    series = lines(
        {"service_name": "rlinsight.policy", "rank": 0, "host": "a"},
        {"service_name": "rlinsight.policy", "rank": 1, "host": "b"},
        {"service_name": "engine", "host": "b"},
    )
    assert metric_charts.labels(series) == {0: "policy 0 a", 1: "policy 1 b", 2: "engine b"}


def test_instances_tell_apart_what_nothing_else_does() -> None:
    """Two processes alike in all else are called by their instance."""
    assert metric_charts.labels(lines({"service_instance_id": "p1"}, {"service_instance_id": "p2"})) == {
        0: "p1",
        1: "p2",
    }


def test_what_is_left_out_is_said() -> None:
    """2 of 40 series are so named over the panel; labels end when there is no more room."""
    assert "2 of 40 series" in title(lines({"total": 40, "host": "a"}, {"total": 40, "host": "b"}))
    assert "series" not in title(lines({"host": "a"}, {"host": "b"}))
    wide = title(lines(*[{"host": f"{i}-" + "h" * (LEGEND // 3)} for i in range(6)]))
    assert "more" in wide


def test_units_are_written_for_people() -> None:
    """Shares in percent, bytes with a prefix, rates in a second, times as durations."""
    assert "50%" in title(lines({}), metric("system.cpu.utilization", unit="1"))
    assert "0.5 B/s" in title(lines({}), metric("system.disk.io", "sum", "By", True))
    assert "token/s" in title(lines({}), metric("t", "sum", "{token}", True))
    assert "500 ms" in title(lines({}), metric("wait", "histogram", "s"))
    big = lines({}).assign(value=2.5e9)
    assert "2.5 GB" in title(big, metric("process.memory.usage", unit="By"))


def test_histograms_have_two_lines_and_others_one() -> None:
    """The median is drawn solid, the 0.99 quantile dotted."""
    drawn = draw(lines({}), metric(kind="histogram")).data
    assert [(list(line.y), line.line.dash) for line in drawn] == [([1.25, 1.5], "dot"), ([0.25, 0.5], None)]
    assert [list(line.y) for line in draw(lines({})).data] == [[0.25, 0.5]]


def test_phases_and_steps_stand_behind_every_panel() -> None:
    """Bands in their phase's colour and lines at step starts in each of three panels; numbers in the upper row."""
    phases = pd.DataFrame({"phase": ["sample", "sample"], "start_ns": [0, 2 * SECOND], "end_ns": [SECOND, 3 * SECOND]})
    steps = pd.DataFrame({"step": [7, 8], "start_ns": [0, 2 * SECOND]})
    panels = [Panel(metric(name), lines({})) for name in "abc"]
    layout = metric_charts.figure(panels, phases, steps, 0, SECOND).layout
    assert [shape.xref for shape in layout.shapes] == ["x", "x", "x2", "x2", "x3", "x3"]
    bands, starts = layout.shapes[:2]
    assert bands.fillcolor == palette.PHASE["sample"]
    assert bands.path.count("M") == bands.path.count("Z") == 2
    assert "M1970-01-01_00:00:02.000000,0 L1970-01-01_00:00:02.000000,1 L1970-01-01_00:00:03" in bands.path
    assert starts.path == "M1970-01-01_00:00:00.000000,0 L1970-01-01_00:00:00.000000,1 " + (
        "M1970-01-01_00:00:02.000000,0 L1970-01-01_00:00:02.000000,1"
    )
    assert [note.xref for note in layout.annotations if note.text in ("7", "8")] == ["x", "x", "x2", "x2"]


def test_names_and_labels_are_text() -> None:
    """Markup in a metric's name or a label is shown as typed."""
    series = lines({"attributes": json.dumps({"a": "<b>x</b>"})}, {"attributes": json.dumps({"a": "y"})})
    shown = title(series, metric("<i>m</i>"))
    assert "&lt;i&gt;" in shown
    assert "&lt;b&gt;" in shown
    assert "&lt;b&gt;" in draw(series).data[0].name


def test_a_metric_without_a_change_yet_says_so() -> None:
    """A counter with a single point has no rate: its panel is there, with a sentence."""
    assert "a first point alone" in title(lines({}).iloc[:0], metric("t", "sum", None, True))
