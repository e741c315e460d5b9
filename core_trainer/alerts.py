"""What the controller finds wrong while it trains: events that name the rule, what was seen, and a query to show it.

The rules are functions of what the loop has in hand anyway; none reads the store. An alert is raised when its condition
begins to hold, and again only after it has ceased to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from core_trainer.rollout.hybrid import Published
from core_trainer.types import Rollout
from rlinsight import names, telemetry
from rlinsight.schema import quoted

# Between engine and trainer, in nats a token: more than rounding, so one of them is wrong. The gap is the mean
# |difference| of log-probs and tells what is off everywhere; the KL, about half its square, what is far off somewhere.
# A sound run of SmolLM2-135M was seen at 0.044 and 0.0023 in bfloat16, at 5e-6 in float32.
MISMATCH_GAP = 0.05
MISMATCH_KL = 0.01


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that is wrong."""

    rule: str
    severity: Literal["info", "warning", "critical"]
    message: str
    evidence: str  # SQL over the run's store
    subject: str = ""  # what it is about, where a rule may hold of several: a replica


class Alerts:
    """The alerts of a run."""

    def __init__(
        self,
        run_id: str,
        say: Callable[[str], object],
        compares_groups: bool = True,
        replicas: Collection[str] = (),
    ) -> None:
        """``say`` tells whoever watches the run; ``compares_groups`` false: equal rewards teach something. ``replicas``
        are those that should take every sync.
        """
        self._compares_groups = compares_groups
        self._run, self._say, self._replicas = quoted(run_id), say, frozenset(replicas)
        self._holding: set[tuple[str, str]] = set()  # rule and subject

    def synced(self, ledger: Sequence[Published]) -> list[Alert]:
        """After a weight sync: replicas whose weights are not those that were published, and those that took none.

        Returns all alerts of the former.
        """
        evidence = f"FROM sync_health({self._run}) WHERE problem IS NOT NULL"
        took = {entry.sync.replica for entry in ledger}
        lost = [
            Alert(
                "lost_replica",
                "warning",
                f"replica {name} did not take the weights; others sample in its place",
                evidence,
                name,
            )
            for name in sorted(self._replicas - took)
        ]
        self._raise("lost_replica", lost)
        stale = [
            Alert(
                "stale_engine",
                "critical",
                f"replica {entry.sync.replica} serves weights {entry.sync.checksum_served} after the sync of "
                f"policy_version {entry.policy_version}, whose checksum is {entry.checksum_trained}",
                evidence,
                entry.sync.replica,
            )
            for entry in ledger
            if entry.is_stale
        ]
        return self._raise("stale_engine", stale)

    def sampled(self, rollouts: Sequence[Rollout], failed: Sequence[Rollout], policy_version: int) -> list[Alert]:
        """After sampling: replicas that used weights from before ``policy_version``; rollouts that ``failed``.

        Returns all alerts of the former.
        """
        oldest: dict[str, int] = {}
        for turn in [turn for rollout in rollouts for turn in rollout.turns]:
            version = min(turn.policy_versions)
            if version < policy_version:
                oldest[turn.replica] = min(version, oldest.get(turn.replica, version))
        stale = [
            Alert(
                "stale_rollouts",
                "critical",
                f"replica {replica} sampled with weights of policy_version {version}, it was given {policy_version}",
                f"FROM sync_health({self._run}) WHERE problem IS NOT NULL",
                replica,
            )
            for replica, version in oldest.items()
        ]
        lost = []
        if failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(str(r.error) for r in failed).most_common())
            message = f"{len(failed)} of {len(rollouts) + len(failed)} rollouts failed: {kinds}"
            evidence = f"FROM errors WHERE run_id = {self._run} AND kind IN ('rollout', 'request')"
            lost.append(Alert("failed_rollouts", "warning", message, evidence))
        self._raise("failed_rollouts", lost)
        return self._raise("stale_rollouts", stale)

    def finished(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """After a step, from its metrics."""
        apart, silent = [], []
        gap, kl = metrics.get(names.M_ROLLOUT_ABS), metrics.get(names.M_ROLLOUT_KL)
        over = []
        if gap is not None and not gap <= MISMATCH_GAP:
            over.append(f"{gap:.2g} nats a token from those the engine sampled with, over {MISMATCH_GAP:g}")
        if kl is not None and not kl <= MISMATCH_KL:
            over.append(f"a KL of {kl:.2g} nats a token from the engine's, over {MISMATCH_KL:g}")
        if over:
            message = (
                f"in step {step} the trainer's log-probs are {' and '.join(over)}: weights that are not the same, or "
                "more than rounding between the kernels"
            )
            steps = f"first_step := {step}, last_step := {step}"
            evidence = f"FROM mismatch_by_cause({self._run}, {steps}) ORDER BY gap DESC"
            apart.append(Alert("mismatch", "warning", message, evidence))
        if self._compares_groups and metrics.get(names.M_ZERO_VARIANCE) == 1:
            message = f"in step {step} all rollouts of each group earned the same: there is nothing to learn from"
            evidence = f"FROM group_signal WHERE run_id = {self._run} AND step = {step}"
            silent.append(Alert("no_signal", "warning", message, evidence))
        self._raise("mismatch", apart)
        self._raise("no_signal", silent)

    def _raise(self, rule: str, found: list[Alert]) -> list[Alert]:
        """Record those that did not hold when ``rule`` was looked at last; returns all of them."""
        for alert in found:
            if (rule, alert.subject) not in self._holding:
                _record(alert)
                self._say(f"{alert.severity}: {alert.message}")
        self._holding = {key for key in self._holding if key[0] != rule} | {(rule, alert.subject) for alert in found}
        return found


def _record(alert: Alert) -> None:
    attributes = {
        names.ALERT_RULE: alert.rule,
        names.ALERT_SEVERITY: alert.severity,
        names.ALERT_MESSAGE: alert.message,
        names.ALERT_EVIDENCE: alert.evidence,
    }
    telemetry.event(names.ALERT, attributes)
