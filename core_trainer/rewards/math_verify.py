"""The math-verify verifier: whether the response's final expression is equivalent to the answer."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from core_trainer.rewards.types import RewardInput, Verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


class MathVerifyVerifier:
    """1 when math-verify finds the expressions equivalent, else 0.

    math-verify's own timeouts use SIGALRM, which works in a main thread only; they are off, since a call runs in a
    process that is killed when its time is up.
    """

    is_async = False
    required_columns = frozenset[str]()

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """Raises ValueError when the answer is no expression."""
        expected = _parse_answer(item.prompt.answer or "")
        if not expected:
            raise ValueError(f"answer {item.prompt.answer!r} is not a mathematical expression")
        found = parse(item.response, parsing_timeout=0)
        if not found:
            return [Verdict(0.0, "no_answer", f"no expression in the response; answer {expected[-1]}", answer="")]
        correct = verify(expected, found, timeout_seconds=0)
        explanation = f"found {found[-1]}, answer {expected[-1]}"
        return [Verdict(float(correct), "correct" if correct else "wrong", explanation, answer=str(found[0]))]


@lru_cache(maxsize=4096)  # every rollout of a group has the same answer
def _parse_answer(answer: str) -> list[Any]:
    # Bare LaTeX ("\frac{1}{2}") is only recognised inside an environment; text with one is parsed as it stands.
    anchored = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return parse(anchored, parsing_timeout=0) or parse(answer, parsing_timeout=0)
