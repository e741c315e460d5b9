"""The task verifier: the score the reasoning_gym task itself gives the response."""

from __future__ import annotations

from reasoning_gym.utils import extract_answer

from core_trainer import tasks
from core_trainer.rewards.types import RewardInput, Verdict
from rlinsight.config import DataSection


class TaskVerifier:
    """The task's score in [0, 1] of the text inside <answer> tags, or of the whole response when it has none."""

    is_async = False
    required_columns = frozenset({"question", "metadata"})

    def __init__(self, data: DataSection) -> None:
        # Some tasks score by their own arguments; no score depends on the seed.
        self._task = tasks.make(data, seed=0)

    def __call__(self, item: RewardInput) -> list[Verdict]:
        """Score one response against the generated item."""
        entry = {
            "question": item.prompt.columns["question"],
            "answer": item.prompt.answer,
            "metadata": item.prompt.columns["metadata"],
        }
        tagged = extract_answer(item.response)
        score = float(self._task.score_answer(item.response.strip() if tagged is None else tagged, entry))
        label = "correct" if score >= 1 else "partial" if score > 0 else "wrong"
        return [Verdict(score, label, "scored the text in <answer> tags" if tagged is not None else None)]
