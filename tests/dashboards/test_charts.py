from __future__ import annotations

import pandas as pd

from dashboards import charts, queries


def curves(steps: int = 4, **columns: list | float) -> pd.DataFrame:
    blank = dict.fromkeys(queries.METRICS, 0.5)
    return pd.DataFrame({"step": range(1, steps + 1), "steps": 1} | blank | columns, dtype=float)


def overview(frame: pd.DataFrame, **options):
    signals = pd.DataFrame({"step": frame["step"], "all_pass": 0.25, "mixed": 0.5, "all_fail": 0.25})
    components = pd.DataFrame({"component": ["numeric", "numeric"], "step": [1, 2], "value": [0.1, 0.2]})
    return charts.overview(frame, signals, components, **options)


def titles(figure) -> dict[str, str]:
    found = {}
    for note in figure.layout.annotations:
        name, _, reading = note.text.removeprefix("<b>").partition("</b>")
        found[name] = reading
    return found


def test_every_panel_has_a_title_and_its_latest_value() -> None:
    """Twelve panels; the title reads the last step, so a glance needs no hover."""
    found = titles(overview(curves(reward_mean=[0.1, 0.2, 0.3, 0.75])))
    assert len(found) == 12
    assert "0.75 ± 0.5" in found["Reward"]


def test_equal_log_probs_are_said_to_be_equal() -> None:
    """A gap of exactly 0 in every step is reported in words: a log axis cannot show it."""
    found = titles(overview(curves(rollout_log_prob_gap=0.0, rollout_log_prob_gap_max=0.0, rollout_kl=0.0)))
    assert "equal bit for bit" in found["Rollout vs training log-probs"]


def test_a_metric_nobody_recorded_is_not_drawn_as_zero() -> None:
    """NULL columns leave an empty panel that says so."""
    figure = overview(curves(ref_kl=float("nan"), policy_kl=float("nan"), grad_norm=float("nan")))
    assert "not recorded" in titles(figure)["KL, nat/token"]
    assert "not recorded" in titles(figure)["Gradient norm"]


def test_resumes_and_the_selected_step_are_ruled_off_in_every_panel() -> None:
    """Each panel has one line per resume and one at the selected step."""
    bare = len(overview(curves()).layout.shapes)
    marked = overview(curves(), resumed=[3], step=2)
    assert len(marked.layout.shapes) - bare == 2 * 12


def test_shares_add_up_to_one() -> None:
    """With share chosen the bars of a step sum to 1, the unattributed rest included."""
    phases = pd.DataFrame(
        {
            "step": [1, 1, 1, 2, 2],
            "phase": ["sample", "train", "unattributed", "sample", "train"],
            "seconds": [6, 3, 1, 5, 5],
        }
    )
    figure = charts.phase_shares(phases, share=True)
    for i in range(2):
        assert abs(sum(bar.y[i] for bar in figure.data) - 1) < 1e-12
    assert {bar.name for bar in figure.data} == {"sample", "train", "unattributed"}
