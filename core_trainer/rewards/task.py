"""The task verifier: the score the reasoning_gym task itself gives the response."""

from __future__ import annotations

from collections.abc import Sequence

from reasoning_gym.utils import extract_answer

from core_trainer import tasks
from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import DataSection


class TaskVerifier:
    """The task's score in [0, 1] of the text inside <answer> tags, or of the whole response when it has none."""

    is_async = False
    required_columns = frozenset({"question", "metadata"})

    def __init__(self, datasets: Sequence[DataSection]) -> None:
        # Some tasks score by their own arguments; no score depends on the seed.
        self._tasks = [tasks.make(data, seed=0) for data in datasets]

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """Score one response against the generated item."""
        entry = {
            "question": item.prompt.columns["question"],
            "answer": item.prompt.answer,
            "metadata": item.prompt.columns["metadata"],
        }
        tagged = extract_answer(item.response)
        answer = item.response.strip() if tagged is None else tagged
        score = float(self._tasks[item.dataset].score_answer(answer, entry))
        label = "correct" if score >= 1 else "partial" if score > 0 else "wrong"
        seen = None if tagged is None else "scored the text in <answer> tags"
        return [Verdict(score, label, seen, answer=answer)]
