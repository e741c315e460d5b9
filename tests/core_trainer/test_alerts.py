"""Alerts: when a rule fires, that it does so once, and that its evidence is a query the store answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from core_trainer import alerts
from core_trainer.alerts import Alert, Alerts
from core_trainer.rollout.engine import GenerateRequest, WeightSync
from core_trainer.rollout.hybrid import Published
from core_trainer.types import Prompt, Rollout, SamplingParams
from rlinsight import names
from tests.core_trainer.scripted_engine import turn
from tests.core_trainer.stored import Store, recording
from tests.synthetic import Run, fill

PROMPT = Prompt("p/0", "p", "text", (1, 2), None)


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[Alert]:
    seen: list[Alert] = []
    monkeypatch.setattr(alerts, "_record", seen.append)
    return seen


def rollout(replica: str, versions: list[int]) -> Rollout:
    request = GenerateRequest("t", PROMPT.token_ids, SamplingParams(3))
    answer = turn(request, 3, policy_version=versions[-1], token_policy_versions=versions, replica=replica)
    return Rollout("r", "g", 0, PROMPT, [answer], {})


def lost(kind: str) -> Rollout:
    return Rollout("r", "g", 0, PROMPT, [], {}, error=kind)


def entry(replica: str, served: str | None) -> Published:
    return Published(3, "a" * 16, WeightSync(replica, 0, 0, checksum_served=served))


def test_a_stale_replica_is_told_once_and_again_after_it_was_well(raised: list[Alert]) -> None:
    """By replica; what is returned is what holds, whether it is new or not."""
    found = Alerts("r", print)
    assert [a.subject for a in found.synced([entry("a", "b" * 16), entry("b", "a" * 16), entry("c", None)])] == ["a"]
    assert [a.subject for a in found.synced([entry("a", "b" * 16), entry("b", "c" * 16)])] == ["a", "b"]
    assert found.synced([entry("a", "a" * 16), entry("b", "a" * 16)]) == []
    assert len(found.synced([entry("a", "b" * 16)])) == 1
    stale = [alert for alert in raised if alert.rule == "stale_engine"]
    assert [(a.rule, a.severity, a.subject) for a in stale] == [
        ("stale_engine", "critical", "a"),
        ("stale_engine", "critical", "b"),
        ("stale_engine", "critical", "a"),
    ]
    assert raised[0].message.startswith("replica a serves weights bbbbbbbbbbbbbbbb after the sync of policy_version 3")


def test_a_replica_that_takes_no_weights_is_missed(raised: list[Alert]) -> None:
    """At the first sync as at any other; once, until it is back; nothing is stale for it."""
    found = Alerts("r", print, replicas=["a", "b"])
    for replicas in ("b", "b", "ab", "a"):
        assert found.synced([entry(replica, None) for replica in replicas]) == []
    assert [(alert.rule, alert.severity, alert.subject) for alert in raised] == [
        ("lost_replica", "warning", "a"),
        ("lost_replica", "warning", "b"),
    ]


def test_a_token_of_older_weights_is_found(raised: list[Alert]) -> None:
    """The oldest of each replica, whichever rollout it is in; weights as new as given, or newer, are none."""
    found = Alerts("r", print)
    rollouts = [rollout("a", [3, 3]), rollout("b", [2, 3]), rollout("b", [1, 3]), rollout("c", [4, 4])]
    assert [a.subject for a in found.sampled(rollouts, [], 3)] == ["b"]
    assert raised[0].message == "replica b sampled with weights of policy_version 1, it was given 3"
    assert raised[0].rule == "stale_rollouts"


def test_failed_rollouts_are_counted_by_class(raised: list[Alert]) -> None:
    """The most frequent first; they stop nothing."""
    failed = [lost("EngineError"), lost("RequestTimeout"), lost("RequestTimeout")]
    assert Alerts("r", print).sampled([rollout("a", [0, 0])], failed, 0) == []
    assert [a.message for a in raised] == ["3 of 4 rollouts failed: 2 RequestTimeout, 1 EngineError"]


@pytest.mark.parametrize(
    ("metrics", "rules"),
    [
        ({}, []),
        ({names.M_ROLLOUT_KL: None, names.M_ZERO_VARIANCE: None}, []),
        ({names.M_ROLLOUT_KL: 0.01, names.M_ZERO_VARIANCE: 0.99}, []),
        ({names.M_ROLLOUT_KL: 0.011}, ["mismatch"]),
        ({names.M_ROLLOUT_KL: math.nan}, ["mismatch"]),
        ({names.M_ROLLOUT_ABS: 0.05, names.M_ROLLOUT_KL: 0.01}, []),
        ({names.M_ROLLOUT_ABS: 0.1, names.M_ROLLOUT_KL: 0.005}, ["mismatch"]),  # each token 0.1 off
        ({names.M_ROLLOUT_ABS: 0.015, names.M_ROLLOUT_KL: 0.02}, ["mismatch"]),  # one of a hundred 1.5 off
        ({names.M_ROLLOUT_ABS: 0.044, names.M_ROLLOUT_KL: 0.0023}, []),  # as seen in bfloat16
        ({names.M_ROLLOUT_ABS: math.nan}, ["mismatch"]),
        ({names.M_ZERO_VARIANCE: 1.0}, ["no_signal"]),
    ],
)
def test_metrics_of_a_step(raised: list[Alert], metrics: dict[str, float | None], rules: list[str]) -> None:
    """Thresholds; what holds for two steps is one alert."""
    found = Alerts("r", print)
    found.finished(1, metrics)
    found.finished(2, metrics)
    assert [alert.rule for alert in raised] == rules


def test_a_mismatch_says_which_of_the_two_it_is(raised: list[Alert]) -> None:
    """The gap in nats a token, the KL by its name; both where both are over."""
    for metrics in (
        {names.M_ROLLOUT_ABS: 0.1},
        {names.M_ROLLOUT_KL: 0.02},
        {names.M_ROLLOUT_ABS: 0.2, names.M_ROLLOUT_KL: 0.02},
    ):
        Alerts("r", print).finished(4, metrics)
    gap, kl, both = (alert.message for alert in raised)
    assert gap.startswith(
        "in step 4 the trainer's log-probs are 0.1 nats a token from those the engine sampled with, over 0.05:"
    )
    assert kl.startswith(
        "in step 4 the trainer's log-probs are a KL of 0.02 nats a token from the engine's, over 0.01:"
    )
    assert "0.2 nats a token from those the engine sampled with, over 0.05 and a KL of 0.02 nats" in both


def test_equal_rewards_are_no_alert_where_groups_are_not_compared(raised: list[Alert]) -> None:
    """A critic judges each rollout by itself, in groups of one as well."""
    Alerts("r", print, compares_groups=False).finished(1, {names.M_ZERO_VARIANCE: 1.0})
    assert raised == []


def test_every_evidence_is_a_query_that_runs(raised: list[Alert], tmp_path: Path) -> None:
    """Over a store with a run that has each of these faults, it shows them; a run id is quoted."""
    faults = ("wrong_checksum", "stale_rollouts", "request_error", "mismatch", "zero_variance", "always_off")
    run = Run("it's", steps=8, replicas=2, serving=True, faults=faults, fault_step=7)
    fill(tmp_path / "s.duckdb", run)
    found = Alerts(run.run_id, print, replicas=["a", "b"])
    found.synced([entry("a", "b" * 16)])
    found.sampled([rollout("a", [0, 0])], [lost("RequestTimeout")], 1)
    found.finished(7, {names.M_ROLLOUT_KL: 1.0, names.M_ZERO_VARIANCE: 1.0})
    assert len({alert.rule for alert in raised}) == 6
    store = Store(tmp_path / "s.duckdb")
    for alert in raised:
        assert store.rows(alert.evidence), alert
    (stale,) = [alert for alert in raised if alert.rule == "stale_rollouts"]
    assert ("served_old",) in store.rows(f"SELECT problem FROM ({stale.evidence})")


def test_an_alert_is_a_row(tmp_path: Path) -> None:
    """With the rule, the message and the query."""
    with recording(tmp_path) as store:
        Alerts("r", print).sampled([rollout("a", [1, 1])], [], 2)
    ((run, rule, severity, message, evidence),) = store.rows(
        "SELECT run_id, rule, severity, message, evidence_sql FROM alerts"
    )
    assert (run, rule, severity) == ("r", "stale_rollouts", "critical")
    assert "policy_version 1" in message
    assert evidence == "FROM sync_health('r') WHERE problem IS NOT NULL"
