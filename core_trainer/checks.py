"""What a check of a model measures and how it is judged. Pure numbers: no torch, no model, no clock.

``check_model.py`` measures in a process of its own for every part, so that a part that crashes takes no other along;
what it is asked and what it found travel as JSON of these classes. The command imports this module; numpy loads with
the first measurement, in the part's process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Status = Literal["ok", "mismatch", "refused", "failed", "not installed"]
ENGINES = ("native", "vllm")  # those that can be built over a model in this process
PERCENTILES = (50, 90, 99)

# The largest |log-prob difference| that rounding explains, in nats. Two orders of the same sums differ by 1e-5 to 1e-4
# in float32 and by up to 0.1 in bfloat16, on models of a hundred million to some billion weights.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


@dataclass(frozen=True, slots=True)
class Answer:
    """What transformers' generate writes greedily after one prompt."""

    prompt: list[int]  # [P]
    token_ids: list[int]  # [T]
    log_probs: list[float]  # [T]
    leads: list[float]  # [T] log-prob of the token minus that of the second likeliest; near 0, rounding decides


@dataclass(frozen=True, slots=True)
class Spec:
    """What one part's process is asked."""

    source: str  # as in model.source
    dtype: Literal["auto", "float32", "bfloat16"]
    num_prompts: int
    new_tokens: int
    concurrency: list[int]
    part: str = "training"  # or an engine
    reference: list[Answer] | None = None  # what the training part brought back; None when it brought nothing

    @classmethod
    def parse(cls, tree: dict[str, Any]) -> Spec:
        """From ``asdict`` through JSON."""
        spec = cls(**tree)
        return spec if spec.reference is None else replace(spec, reference=[Answer(**a) for a in tree["reference"]])


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where greedy decoding left transformers' tokens. An id is None where one of the two had ended."""

    prompt: int  # index
    position: int  # of the token in the response
    expected_id: int | None
    found_id: int | None
    expected_log_prob: float | None  # of transformers' token, under transformers
    found_log_prob: float | None  # of the engine's token, under the engine
    lead: float | None  # by how much transformers preferred its token to the second likeliest
    expected_piece: str | None = None  # the two tokens as text
    found_piece: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed request as its caller saw it, in seconds of one clock."""

    start: float
    arrivals: list[float]  # of each chunk that brought tokens
    counts: list[int]  # tokens of each


@dataclass(frozen=True, slots=True)
class Latency:
    """One step of the latency ladder: ``concurrency`` callers that ask one request after the other."""

    concurrency: int
    num_requests: int
    output_tokens: int
    tokens_per_s: float
    seconds: dict[str, float | None]  # ttft_p50_s ... inter_token_p99_s, as in names.CHECK_LATENCY


@dataclass(slots=True)
class Report:
    """How one part took the model."""

    part: str
    status: Status
    reason: str | None = None
    architecture: str | None = None  # class of the model
    num_parameters: int | None = None
    dtype: str | None = None
    load_s: float | None = None  # training: read the weights; an engine: start over them and take them
    num_prompts: int | None = None
    num_tokens: int | None = None  # whose log-probs were compared
    parity: float | None = None  # share of prompts with transformers' greedy tokens, every one
    divergence: Divergence | None = None
    max_log_prob_gap: float | None = None  # training: its forward and transformers'; an engine: it and training's
    mean_log_prob_gap: float | None = None
    tokens_per_s: float | None = None  # sampled, all prompts at once
    latency: list[Latency] = field(default_factory=list)

    @classmethod
    def parse(cls, tree: dict[str, Any]) -> Report:
        """From ``asdict`` through JSON."""
        divergence = tree["divergence"] and Divergence(**tree["divergence"])
        return cls(**tree | {"divergence": divergence, "latency": [Latency(**step) for step in tree["latency"]]})


def compare(
    expected: Sequence[Answer], found: Sequence[tuple[Sequence[int], Sequence[float]]]
) -> tuple[float, Divergence | None]:
    """Share of the prompts whose tokens are transformers', and the divergence that rounding explains least.

    ``found`` holds token ids and log-probs of each prompt.
    """
    parted = []
    for i, (answer, (token_ids, log_probs)) in enumerate(zip(expected, found, strict=True)):
        if list(token_ids) == answer.token_ids:
            continue
        pairs = enumerate(zip(answer.token_ids, token_ids, strict=False))
        at = next((j for j, (a, b) in pairs if a != b), min(len(token_ids), len(answer.token_ids)))
        theirs, mine = at < len(answer.token_ids), at < len(token_ids)
        parted.append(
            Divergence(
                prompt=i,
                position=at,
                expected_id=answer.token_ids[at] if theirs else None,
                found_id=token_ids[at] if mine else None,
                expected_log_prob=answer.log_probs[at] if theirs else None,
                found_log_prob=log_probs[at] if mine else None,
                lead=answer.leads[at] if theirs and mine else None,
            )
        )
    worst = max(parted, key=lambda divergence: math.inf if divergence.lead is None else divergence.lead, default=None)
    return 1 - len(parted) / len(expected), worst


def gaps(expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Largest and mean |difference| of ragged lists of log-probs, infinite where one is not finite; and how many."""
    import numpy as np

    a, b = (np.concatenate([np.asarray(row, np.float64) for row in rows]) for rows in (expected, found))
    both = np.isfinite(a) & np.isfinite(b)
    difference = np.abs(np.where(both, a, np.inf) - np.where(both, b, 0.0))
    return float(difference.max()), float(difference.mean()), len(difference)


def judge(report: Report) -> None:
    """Set status and reason from the report's numbers."""
    tolerance = TOLERANCE[str(report.dtype)]
    report.status, report.reason = "ok", None
    other = "transformers'" if report.part == "training" else "training's"
    gap, parted = report.max_log_prob_gap, report.divergence
    if gap is None and report.parity is None:
        report.status = "failed"
        report.reason = "there was nothing to compare it with: the training part brought no answers"
    elif gap is not None and gap > tolerance:
        report.status = "mismatch"
        report.reason = f"a log-prob is {gap:.2g} off {other}; rounding in {report.dtype} explains {tolerance:g}"
    elif parted is not None and (parted.lead is None or parted.lead > tolerance):
        report.status = "mismatch"
        if parted.lead is None:
            ended = report.part if parted.found_id is None else "transformers"
            report.reason = f"prompt {parted.prompt}: {ended} ends at token {parted.position}, the other goes on"
        else:
            report.reason = (
                f"prompt {parted.prompt}: another greedy token at {parted.position}, where transformers prefers its "
                f"own by {parted.lead:.2g}; rounding in {report.dtype} explains {tolerance:g}"
            )
    elif parted is not None and report.parity is not None and report.num_prompts is not None:
        count = round((1 - report.parity) * report.num_prompts)
        report.reason = f"greedy tokens of {count} prompts part where two are equally likely: rounding"


def latency(concurrency: int, timings: Sequence[Timing], wall_s: float) -> Latency:
    """Percentiles (linear interpolation) over requests of TTFT and TPOT, and over tokens of the inter-token gap.

    TPOT is (last - first arrival) / (tokens - tokens of the first chunk). Tokens that come in one chunk share its gap.
    """
    import numpy as np

    answered = [timing for timing in timings if timing.arrivals]
    values: dict[str, list[float]] = {"ttft": [], "tpot": [], "inter_token": []}
    for timing in answered:
        values["ttft"].append(timing.arrivals[0] - timing.start)
        later = sum(timing.counts[1:])
        if later:
            values["tpot"].append((timing.arrivals[-1] - timing.arrivals[0]) / later)
        for i, count in enumerate(timing.counts[1:], start=1):
            values["inter_token"] += [(timing.arrivals[i] - timing.arrivals[i - 1]) / count] * count
    seconds = {
        f"{what}_p{p}_s": float(np.percentile(found, p)) if found else None
        for what, found in values.items()
        for p in PERCENTILES
    }
    tokens = sum(sum(timing.counts) for timing in answered)
    return Latency(concurrency, len(timings), tokens, tokens / wall_s, seconds)
