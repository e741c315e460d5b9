from __future__ import annotations

import pandas as pd
import pytest

from dashboards import charts, panels, queries

NOTHING = float("nan")
BESIDE = ("kl_coef", "kl_reward", "sampling_", "correction_", "critic_", "grad_norm_")  # what not every run records
VALIDATION = pd.DataFrame(columns=["dataset", "metric", "step", "value", "std_error"])
DROPS = pd.DataFrame(columns=["reason", "step", "groups"])


def curves(steps: int = 4, **columns: list | float) -> pd.DataFrame:
    blank = {name: NOTHING if name.startswith(BESIDE) else 0.5 for name in queries.METRICS}
    return pd.DataFrame({"step": range(1, steps + 1), "steps": 1} | blank | columns, dtype=float)


def overview(frame: pd.DataFrame, validation=VALIDATION, drops=DROPS, **options):
    signals = pd.DataFrame({"step": frame["step"], "all_pass": 0.25, "mixed": 0.5, "all_fail": 0.25})
    components = pd.DataFrame({"component": ["numeric", "numeric"], "step": [1, 2], "value": [0.1, 0.2]})
    return charts.overview(frame, signals, components, validation, drops, **options)


def validated(*rows: tuple) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=VALIDATION.columns)


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


def test_each_dataset_has_a_panel_of_its_metrics_with_their_error() -> None:
    """Of pass@1 and pass@4 the latter is drawn; the band is one standard error; step 0 is on the axis."""
    rows = [("sums", "mean@4", 0, 0.2, 0.1), ("sums", "mean@4", 4, 0.6, 0.05), ("sums", "pass@1", 4, 0.6, 0.05)]
    rows += [("sums", "pass@4", 4, 0.9, 0.02), ("<b>all", "loss", 4, 2.5, None), ("all", "mean@4", 4, 0.3, 0.1)]
    figure = overview(curves(), validation=validated(*rows))
    found = titles(figure)
    assert [name for name in found if name.startswith("Validation")] == [
        "Validation: all", "Validation: &lt;b&gt;all", "Validation: sums",
    ]  # fmt: skip
    assert "mean@4 0.6" in found["Validation: sums"]
    assert "pass@4 0.9" in found["Validation: sums"]
    assert "pass@1" not in found["Validation: sums"]
    (band,) = [trace for trace in figure.data if trace.fill == "toself" and list(trace.x) == [0, 4, 4, 0]]
    assert list(band.y) == pytest.approx([0.3, 0.65, 0.55, 0.1])
    assert figure.layout.xaxis.range[0] == -0.5


def test_datasets_beyond_a_handful_are_left_to_the_sql_page() -> None:
    """Ten datasets: as many panels as there is room for, that of all of them first."""
    rows = [(f"d{i}", "mean@1", 1, 0.5, None) for i in range(9)] + [("all", "mean@1", 1, 0.5, None)]
    found = [name for name in titles(overview(curves(), validation=validated(*rows))) if name.startswith("Validation")]
    assert len(found) == panels.MAX_DATASETS
    assert found[0] == "Validation: all"


def test_what_a_run_recorded_beside_has_panels() -> None:
    """A critic three, correction three, a KL controller one, KL in the reward one, gradients by module one."""
    beside = {name: [0.1, 0.2, 0.3, 0.4] for name in queries.METRICS if name.startswith(BESIDE)}
    found = titles(overview(curves(**beside)))
    assert set(found) - set(titles(overview(curves()))) == {
        "Critic: explained variance", "Critic: value loss", "Critic", "Engine to trainer", "Effective sample size",
        "Correction", "KL coefficient", "KL off the reward, nat/rollout", "Gradient norm of",
    }  # fmt: skip
    assert "weights 40%" in found["Effective sample size"]
    assert "value 0.4" in found["Critic"]
    assert "attention" in found["Gradient norm of"]


def test_axes_are_logarithmic_where_values_span_decades() -> None:
    """k3 of 1e-6 beside chi2 of 0.1 needs one; gradients between 0.1 and 0.4 do not. Only there 0 is not drawn."""
    apart = overview(curves(correction_k3=[0, 1e-6, 1e-6, 1e-6], correction_chi2_token=0.1))
    k3 = next(trace for trace in apart.data if trace.name == "k3")
    assert apart.layout["yaxis" + k3.yaxis[1:]].type == "log"
    assert list(k3.y[1:]) == [1e-6] * 3
    assert k3.y[0] != k3.y[0]
    near = overview(curves(grad_norm_mlp=[0.1, 0, 0.1, 0.1], grad_norm_attention=0.4))
    mlp = next(trace for trace in near.data if trace.name == "mlp")
    assert near.layout["yaxis" + mlp.yaxis[1:]].type is None
    assert list(mlp.y) == [0.1, 0, 0.1, 0.1]


def test_a_coefficient_nobody_moves_is_a_number_not_a_curve() -> None:
    """A fixed KL coefficient stands in the title of the KL."""
    found = titles(overview(curves(kl_coef=0.02)))
    assert "coefficient 0.02" in found["KL, nat/token"]
    assert "KL coefficient" not in found


def test_dropped_groups_are_stacked_by_reason() -> None:
    """A bar of each reason, and the rounds of sampling where there was more than one."""
    drops = pd.DataFrame([("too_hard", 2, 1), ("zero_variance", 1, 3), ("zero_variance", 2, 2)], columns=DROPS.columns)
    figure = overview(curves(sampling_rounds=[1, 2, 1, 1]), drops=drops)
    bars = {bar.name: list(bar.y) for bar in figure.data if bar.type == "bar"}
    assert bars == {"too_hard": [1], "zero_variance": [3, 2]}
    assert figure.layout.barmode == "stack"
    assert "sampling rounds 1" in titles(figure)["Groups dropped"]
    assert "sampling rounds" not in titles(overview(curves(sampling_rounds=1.0), drops=drops))["Groups dropped"]


def test_a_useless_critic_stays_on_the_axis() -> None:
    """Explained variance of -40 is in the title; the axis ends at -1, so that what comes later can be read."""
    figure = overview(curves(critic_value_loss=1.0, critic_explained_variance=[-40, -0.5, 0.1, 0.4]))
    assert [axis.range for axis in figure.select_yaxes() if axis.range and axis.range[1] == 1.05] == [(-1.05, 1.05)]


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
