"""What the Rollouts page asks: which rollouts of a run there are, and one of them down to its tokens.

As in ``queries``, a function takes ``read`` first and every answer is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.queries import Frame, Read

MAX_TOKENS = 2000  # tokens of one strip
MAX_SIBLINGS = 16


@dataclass(frozen=True)
class RolloutFilter:
    """What the Rollouts page keeps. None or empty means no restriction."""

    first: int | None = None
    last: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    finish: tuple[str, ...] = ()
    signal: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    split: str | None = None
    text: str = ""
    group_id: str | None = None

    def where(self) -> tuple[str, dict[str, Any]]:
        """Conditions on ``rollouts r`` and ``groups g``, with their parameters."""
        tests, params = ["r.run_id = $run"], {}
        bounds = [("r.step >= $first", "first", self.first), ("r.step <= $last", "last", self.last)]
        bounds += [("r.reward >= $low", "low", self.min_reward), ("r.reward <= $high", "high", self.max_reward)]
        bounds += [("r.group_id = $group", "group", self.group_id), ("r.split = $split", "split", self.split)]
        for test, key, value in bounds:
            if value is not None:
                tests.append(test)
                params[key] = value
        chosen = [("r.finish_reason", "finish", self.finish), ("r.data_source", "source", self.source)]
        for column, key, values in [*chosen, ("g.signal", "signal", self.signal)]:
            if values:
                slots = [f"{key}{i}" for i in range(len(values))]
                tests.append(f"{column} IN ({', '.join('$' + slot for slot in slots)})")
                params |= dict(zip(slots, values, strict=True))
        if self.text:
            # By turn and straight from the texts: the view would first put every rollout's turns together.
            tests.append(
                """EXISTS (FROM token_runs k
                   WHERE k.run_id = $run AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id
                     AND (contains(lower(k.response_text), lower($text))
                          OR contains(lower(k.prompt_text), lower($text))))"""
            )
            params["text"] = self.text
        return " AND ".join(tests), params


SORTS = {
    "newest": "r.step DESC, r.group_id, r.sample_index",
    "reward, low first": "r.reward ASC NULLS LAST, r.step DESC, r.rollout_id",
    "reward, high first": "r.reward DESC NULLS LAST, r.step DESC, r.rollout_id",
    "longest": "r.response_tokens DESC NULLS LAST, r.step DESC, r.rollout_id",
    "shortest": "r.response_tokens ASC NULLS LAST, r.step DESC, r.rollout_id",
    "largest |advantage|": "abs(r.advantage) DESC NULLS LAST, r.step DESC, r.rollout_id",
    "stalest": "r.staleness DESC NULLS LAST, r.step DESC, r.rollout_id",
}


def rollout_counts(read: Read, run_id: str, chosen: RolloutFilter) -> Frame:
    """How many rollouts the filter keeps, and their mean reward and length."""
    where, params = chosen.where()
    return read(
        f"""SELECT count(*) AS n, avg(r.reward) AS reward, avg(r.response_tokens) AS tokens,
                   avg((r.finish_reason = 'length')::INT) AS truncated
            FROM rollouts r LEFT JOIN groups g USING (run_id, attempt, group_id) WHERE {where}""",
        {"run": run_id} | params,
    )


def rollout_page(read: Read, run_id: str, chosen: RolloutFilter, sort: str, size: int, page: int) -> Frame:
    """One page (from 1) of the filtered rollouts, with the prompt's end and the response's beginning.

    Two reads: which rollouts, then their texts by id. Joined, the texts of the whole run would be put together first.
    """
    where, params = chosen.where()
    found = read(
        f"""SELECT r.attempt, r.rollout_id, r.step, r.reward, r.advantage, r.response_tokens, r.finish_reason,
                   g.signal, r.staleness, r.data_source
            FROM rollouts r LEFT JOIN groups g USING (run_id, attempt, group_id) WHERE {where}
            ORDER BY {SORTS[sort]} LIMIT {int(size)} OFFSET {int(size) * (int(page) - 1)}""",
        {"run": run_id} | params,
    )
    return _texts(read, run_id, found, 400)


def _texts(read: Read, run_id: str, found: Frame, length: int) -> Frame:
    """``found`` with the last ``length`` characters of each prompt and the first of each response."""
    slots = {f"id{i}": rollout_id for i, rollout_id in enumerate(found["rollout_id"])}
    names = ", ".join(f"${slot}" for slot in slots) or "NULL"
    texts = read(
        f"""SELECT attempt, rollout_id, right(arg_min(prompt_text, turn_index), {length}) AS prompt,
                   left(string_agg(response_text, '' ORDER BY turn_index), {length}) AS response
            FROM token_runs WHERE run_id = $run AND rollout_id IN ({names}) GROUP BY attempt, rollout_id""",
        {"run": run_id} | slots,
    )
    return found.merge(texts, on=["attempt", "rollout_id"], how="left")


def rollout_choices(read: Read, run_id: str) -> Frame:
    """Values the filters offer: finish reasons, data sources, the first and last step, what the rollouts were for."""
    return read(
        """SELECT list_sort(list(DISTINCT finish_reason) FILTER (finish_reason IS NOT NULL)) AS finish,
                  min(step) AS first, max(step) AS last, list(DISTINCT coalesce(split, 'train')) AS splits,
                  (SELECT list_sort(list(DISTINCT data_source) FILTER (data_source IS NOT NULL)) FROM group_prompts
                   WHERE run_id = $run) AS sources
           FROM rollout_samples WHERE run_id = $run""",
        {"run": run_id},
    )


def rollout(read: Read, run_id: str, rollout_id: str) -> Frame:
    """Everything about one rollout but its tokens."""
    return read(
        """SELECT r.*, g.signal FROM rollouts r LEFT JOIN groups g USING (run_id, attempt, group_id)
           WHERE r.run_id = $run AND r.rollout_id = $rollout LIMIT 1""",
        {"run": run_id, "rollout": rollout_id},
    )


def reward_components(read: Read, run_id: str, rollout_id: str) -> Frame:
    """Components of one rollout's reward and what each contributed."""
    return read(
        """SELECT component, value, weight, value * weight AS contribution, label, explanation, latency_s * 1e3 AS ms
           FROM rewards WHERE run_id = $run AND rollout_id = $rollout ORDER BY abs(value * weight) DESC, component""",
        {"run": run_id, "rollout": rollout_id},
    )


def tokens(read: Read, run_id: str, rollout_id: str, start: int, limit: int = MAX_TOKENS) -> Frame:
    """At most ``limit`` tokens of a rollout from position ``start``; ``total`` is how many it has."""
    return read(
        f"""SELECT turn_index, pos, token_id, piece, rollout_log_prob, old_log_prob, log_prob, ref_log_prob, entropy,
                   advantage, weight, value, value_target, ratio, in_loss, clipped, count(*) OVER () AS total
            FROM tokens WHERE run_id = $run AND rollout_id = $rollout
            ORDER BY turn_index, pos LIMIT {int(limit)} OFFSET $start""",
        {"run": run_id, "rollout": rollout_id, "start": start},
    )


def siblings(read: Read, run_id: str, group_id: str) -> Frame:
    """At most MAX_SIBLINGS rollouts of the group, best reward first; ``total`` is how many it has."""
    found = read(
        f"""SELECT attempt, rollout_id, sample_index, reward, advantage, response_tokens, finish_reason,
                   count(*) OVER () AS total
            FROM rollouts WHERE run_id = $run AND group_id = $group
            ORDER BY reward DESC NULLS LAST, sample_index LIMIT {MAX_SIBLINGS}""",
        {"run": run_id, "group": group_id},
    )
    return _texts(read, run_id, found, 2000)


def trace(read: Read, trace_id: str) -> Frame:
    """Spans of one trace in order of their start."""
    return read(
        """SELECT name, lane, start_ns, (end_ns - start_ns) / 1e9 AS seconds, status_message, span_id, parent_span_id
           FROM v_spans WHERE trace_id = $trace ORDER BY start_ns, end_ns DESC LIMIT 200""",
        {"trace": trace_id},
    )
