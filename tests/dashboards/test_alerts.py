from __future__ import annotations

import pandas as pd
import pytest

from dashboards import alerts

RUNNING = pd.Series({"status": "running", "reason": None})
NOTHING = pd.DataFrame(columns=["name", "method", "lane", "step", "age_s", "usual_s"])
SILENT = pd.DataFrame(columns=["step", "severity", "message"])


def curves(**columns: float) -> pd.DataFrame:
    return pd.DataFrame({name: [value] * 6 for name, value in columns.items()})


def texts(run=RUNNING, frame=None, opened=NOTHING, linked=1.0, dropped=0) -> list[str]:
    frame = curves() if frame is None else frame
    return [alert.text for alert in alerts.find(run, frame, opened, SILENT, linked, dropped)]


def test_a_healthy_run_has_no_alert() -> None:
    """Ordinary numbers stay silent."""
    healthy = curves(
        weights_changed=0.6,
        response_length_truncated=0.1,
        reward_zero_variance_groups=0.3,
        clip_fraction=0.02,
        rollout_kl=1e-6,
        critic_explained_variance=0.4,
        correction_rejected_token_fraction=0.01,
    )
    assert texts(frame=healthy) == []


@pytest.mark.parametrize(
    ("metric", "value", "word"),
    [
        ("weights_changed", 0.0001, "rounded away"),
        ("response_length_truncated", 0.8, "max_new_tokens"),
        ("reward_zero_variance_groups", 0.95, "teach nothing"),
        ("clip_fraction", 0.5, "clipped"),
        ("rollout_kl", 0.2, "disagree"),
        ("critic_explained_variance", -0.3, "worse than a constant"),
        ("correction_rejected_token_fraction", 0.6, "rejects 60% of"),
    ],
)
def test_training_rules(metric: str, value: float, word: str) -> None:
    """Each rule speaks beyond its limit, and is silent when its metric is unknown."""
    assert [word in text for text in texts(frame=curves(**{metric: value}))] == [True]
    assert texts(frame=curves(**{metric: float("nan")})) == []


def test_no_gradient_is_not_blamed_on_rounding() -> None:
    """Weights that stay put because every reward was equal raise no alert about precision."""
    assert texts(frame=curves(weights_changed=0.0, grad_norm=0.0)) == []
    assert texts(frame=curves(weights_changed=0.0, grad_norm=0.4)) != []


def test_a_span_is_late_after_three_times_its_usual() -> None:
    """Late spans are named with their age; unknown usual length waits five minutes."""
    opened = pd.DataFrame(
        {
            "name": ["rl.train", "rl.sample", "rl.setup", "rl.sync"],
            "method": [None] * 4,
            "lane": ["controller"] * 4,
            "step": [4, 4, None, 4],
            "age_s": [40.0, 20.0, 200.0, 301.0],
            "usual_s": [10.0, 10.0, None, None],
        }
    )
    found = texts(opened=opened)
    assert ["rl.train" in found[0], "rl.sync" in found[1], len(found)] == [True, True, 2]


def test_a_late_call_is_named_with_its_method() -> None:
    """The name of the span alone would be that of every call."""
    call = {"name": "rl.worker.call", "method": "update", "lane": "policy/1", "step": 4, "age_s": 40.0, "usual_s": 4.0}
    (text,) = texts(opened=pd.DataFrame([call]))
    assert text == "rl.worker.call update of step 4 on policy/1 has been open for 40.0 s; usually 4.0 s."


def test_losses_and_holes_are_alerts() -> None:
    """Dropped items and unlinked rows are told, the dropped ones first."""
    found = alerts.find(RUNNING, curves(), NOTHING, SILENT, 0.95, 12)
    assert [(alert.level, alert.text[:2]) for alert in found] == [("bad", "12"), ("warn", "On")]


def test_a_failed_run_says_why() -> None:
    """The reason the run gave is in the alert."""
    assert "KeyError" in texts(run=pd.Series({"status": "failed", "reason": "raised KeyError"}))[0]


def test_what_the_run_said_itself_is_told() -> None:
    """Critical ones first, each with its step."""
    raised = pd.DataFrame(
        [(3, "warning", "2 of 8 rollouts failed"), (2, "critical", "replica a is stale")],
        columns=["step", "severity", "message"],
    )
    found = alerts.find(RUNNING, curves(), NOTHING, raised, 1.0, 0)
    assert [(alert.level, alert.text) for alert in found] == [
        ("bad", "Step 2: replica a is stale."),
        ("warn", "Step 3: 2 of 8 rollouts failed."),
    ]
