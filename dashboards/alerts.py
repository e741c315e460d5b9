"""What is wrong with a run, in sentences: what its processes said, and rules over the frames the overview has read.

Pure. A rule says what, how much, and where to look; it stays silent when its number is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.queries import Frame, Row
from dashboards.text import duration, missing, number, percent

WINDOW = 5  # steps a rule about the present looks back


@dataclass(frozen=True)
class Alert:
    """``level`` is bad (results or data are being lost) or warn (look when convenient)."""

    level: str
    text: str


def find(run: Row, curves: Frame, opened: Frame, raised: Frame, linked: float | None, dropped: int) -> list[Alert]:
    """Alerts of a run, worst first. ``linked`` is the share of joins that hold, ``dropped`` counts lost items."""
    training = _training(curves.tail(WINDOW))
    found = [*_run(run), *_stuck(opened), *_raised(raised), *_delivery(linked, dropped), *training]
    return sorted(found, key=lambda alert: alert.level != "bad")


def _run(run: Row) -> list[Alert]:
    if run["status"] == "failed":
        return [Alert("bad", "The run failed" + ("." if missing(run["reason"]) else f": {run['reason']}"))]
    if run["status"] == "lost":
        return [Alert("bad", "The run stopped reporting and never said it ended. Resume it with --resume.")]
    return []


def _stuck(opened: Frame) -> list[Alert]:
    """A span is late when open for three times its usual length, or five minutes when there is no usual."""
    found = []
    for span in opened.itertuples():
        usual = None if missing(span.usual_s) else float(span.usual_s)
        limit = max(10.0, 3 * usual) if usual is not None else 300.0
        if span.age_s > limit:
            what = span.name if missing(span.method) else f"{span.name} {span.method}"
            where = f" on {span.lane}" if not missing(span.lane) else ""
            at = f" of step {span.step}" if not missing(span.step) else ""
            compare = f"; usually {duration(usual)}" if usual is not None else ""
            found.append(Alert("bad", f"{what}{at}{where} has been open for {duration(span.age_s)}{compare}."))
    return found[:5]


def _raised(raised: Frame) -> list[Alert]:
    """What the run itself found wrong."""
    found = []
    for alert in raised.itertuples():
        at = "" if missing(alert.step) else f"Step {int(alert.step)}: "  # none for the sync before the first
        found.append(Alert("bad" if alert.severity == "critical" else "warn", f"{at}{alert.message}."))
    return found


def _delivery(linked: float | None, dropped: int) -> list[Alert]:
    found = []
    if dropped:
        found.append(Alert("bad", f"{dropped:,} telemetry items were dropped; views of this run have holes."))
    if linked is not None and linked < 0.999:
        found.append(Alert("warn", f"Only {percent(linked)} of joins found their partner; see Completeness."))
    return found


def _training(recent: Frame) -> list[Alert]:
    if recent.empty:
        return []
    mean = recent.mean(numeric_only=True)
    rules = [
        (
            "weights_changed",
            lambda v: v < 0.01 and mean.get("grad_norm") != 0,  # without a gradient there is nothing to round
            "bad",
            lambda v: (
                f"Updates change only {percent(v)} of the weights: they are rounded away. Use fp32 master weights."
            ),
        ),
        (
            "response_length_truncated",
            lambda v: v > 0.5,
            "warn",
            lambda v: f"{percent(v)} of responses hit max_new_tokens",
        ),
        (
            "reward_zero_variance_groups",
            lambda v: v > 0.8,
            "warn",
            lambda v: f"{percent(v)} of groups have equal rewards and teach nothing",
        ),
        ("clip_fraction", lambda v: v > 0.3, "warn", lambda v: f"{percent(v)} of loss tokens are clipped"),
        (
            "rollout_kl",
            lambda v: v > 0.01,
            "warn",
            lambda v: f"Rollout and training log-probs disagree: KL {number(v)} nat",
        ),
        (
            "critic_explained_variance",
            lambda v: v < 0,
            "warn",
            lambda v: f"The critic is worse than a constant: explained variance {number(v)}",
        ),
        (
            "correction_rejected_token_fraction",
            lambda v: v > 0.3,
            "warn",
            lambda v: f"Rollout correction rejects {percent(v)} of loss tokens",
        ),
    ]
    return [
        Alert(level, f"{sentence(mean[name])} (last {len(recent)} steps).")
        for name, holds, level, sentence in rules
        if name in mean and not missing(mean[name]) and holds(mean[name])
    ]
