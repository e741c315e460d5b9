from __future__ import annotations

import itertools

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards.palette import RED
from dashboards.waterfall import NAMES, colours, tree, waterfall

SECOND = 10**9


def spans(*rows: tuple) -> pd.DataFrame:
    """Rows of (span_id, parent, start s, end s or None), of service svc."""
    frame = pd.DataFrame(rows, columns=["span_id", "parent_span_id", "start", "end"])
    return frame.assign(
        name=frame["span_id"], service_name="svc", lane=None, phase=None, method=None, step=None, rollout_id=None,
        failed=False, start_ns=[int(s * SECOND) for s in frame["start"]],
        end_ns=pd.array([None if pd.isna(e) else int(e * SECOND) for e in frame["end"]], dtype="Int64"),
    )  # fmt: skip


def placed(frame: pd.DataFrame) -> list[tuple[str, int]]:
    rows = tree(frame)
    return list(zip(rows["span_id"], rows["depth"], strict=True))


def test_children_follow_their_parent_in_order_of_start() -> None:
    """Depth first, siblings by start, whatever order the spans came in."""
    frame = spans(("b", "r", 5, 9), ("a2", "a", 3, 4), ("r", None, 0, 10), ("a", "r", 1, 4), ("a1", "a", 2, 3))
    assert placed(frame) == [("r", 0), ("a", 1), ("a1", 2), ("a2", 2), ("b", 1)]


def test_a_span_without_its_parent_is_a_root() -> None:
    """A parent that is not among the spans leaves its children at the top."""
    assert placed(spans(("x", "gone", 2, 3), ("y", "gone", 1, 3), ("z", "x", 2, 3))) == [("y", 0), ("x", 0), ("z", 1)]


def test_circles_are_drawn_once() -> None:
    """Spans that are each other's parent, or their own, are there, each once."""
    assert sorted(placed(spans(("a", "b", 1, 3), ("b", "a", 2, 3), ("c", "c", 0, 3)))) == [("a", 0), ("b", 1), ("c", 0)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=12))
def test_every_span_is_placed_exactly_once(rows: list[tuple[int, int]]) -> None:
    """Whatever the parents, no span is lost or doubled, and none stands more than a level under the row before it."""
    frame = spans(*[(str(i), str(parent), start, start + 1) for i, (parent, start) in enumerate(rows)])
    found = placed(frame)
    assert sorted(one for one, _ in found) == sorted(str(i) for i in range(len(rows)))
    depths = [depth for _, depth in found]
    assert depths[0] == 0
    assert all(after <= before + 1 for before, after in itertools.pairwise(depths))


def test_rows_names_and_selection() -> None:
    """One row per span from top to bottom; deeper names stand further right; the selected row is marked."""
    figure = waterfall(tree(spans(("r", None, 0, 10), ("a", "r", 1, 4))), 0, "a")
    bars = {span: (base, length, y) for bar in figure.data
            for span, base, length, y in zip(bar.customdata, bar.base, bar.x, bar.y, strict=True)}  # fmt: skip
    assert bars["r"][:2] == (0, 10)
    assert bars["a"][:2] == (1, 3)
    assert bars["r"][2] < bars["a"][2]
    root, child = figure.layout.annotations
    assert -NAMES < root.xshift < child.xshift < 0
    assert "10.0 s" in root.text
    assert figure.layout.shapes[0].y0 < bars["a"][2] < figure.layout.shapes[0].y1


def test_open_spans_reach_now_and_failed_ones_are_red() -> None:
    """An open span is hatched to the present; a failed one has a red name and border."""
    frame = spans(("r", None, 0, None), ("a", "r", 1, 4)).assign(failed=[False, True])
    figure = waterfall(tree(frame), 20 * SECOND, None)
    assert {bar.marker.pattern.shape: list(bar.x) for bar in figure.data} == {"/": [20.0], None: [3.0]}
    assert "open" in figure.layout.annotations[0].text
    assert RED in figure.layout.annotations[1].text


def test_names_are_text() -> None:
    """Markup in a span's name is shown as typed."""
    frame = spans(("r", None, 0, 1)).assign(name="<b>x</b>")
    figure = waterfall(tree(frame), 0, None)
    assert "&lt;b&gt;" in figure.layout.annotations[0].text
    assert "<b><b>" not in figure.data[0].hovertext[0]


def test_each_service_has_its_colour() -> None:
    """Services in order of appearance; one without a name is called so."""
    frame = spans(("r", None, 0, 1), ("a", "r", 0, 1), ("b", "r", 0, 1)).assign(service_name=["one", None, "one"])
    assert list(colours(frame)) == ["one", "no service name"]
    assert len(set(colours(frame).values())) == 2


def test_spans_of_a_run_have_the_colours_of_the_timeline() -> None:
    """A phase is drawn as on the Timeline page, whatever the service."""
    frame = spans(("r", None, 0, 1)).assign(name="rl.sample", phase="sample")
    assert waterfall(tree(frame), 0, None).data[0].marker.color == "#3d85c6"
