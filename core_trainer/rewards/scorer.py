"""The reward of a rollout: its components, weighted and summed.

Owns: calling the verifiers, what a failed one does (``on_error``), early checks of the dataset against them.
Does not own: the verifiers, nor the processes that the ones which could hang run in (pool.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from core_trainer.rewards.length import LengthVerifier
from core_trainer.rewards.messages import Call, Setup
from core_trainer.rewards.numeric import NumericVerifier, answer_number
from core_trainer.rewards.pool import ProcessPool
from core_trainer.rewards.types import Component, ComponentFailed, Outcome, RewardInput, RewardResult
from core_trainer.tasks import hint
from core_trainer.types import Prompt
from rlinsight.config import (
    ClassifierReward,
    DataSection,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathVerifyReward,
    NumericReward,
    RegexReward,
    RewardFunction,
    RewardSection,
    TaskReward,
    component_name,
)
from rlinsight.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from core_trainer.rewards.classifier import Classifier
    from core_trainer.rewards.judge import Judge

Pooled = MathVerifyReward | RegexReward | TaskReward | FunctionReward | JudgeReward
Scored = tuple[Outcome, float]  # what became of one function on one response, and the seconds it took


class RewardScorer:
    """Scores rollouts in batches. Holds processes: close it, or use it in a ``with``."""

    def __init__(self, section: RewardSection, datasets: Sequence[DataSection]) -> None:
        """Loads every function and model. ``datasets`` are those prompts come from, by ``RewardInput.dataset``.

        Raises ConfigError or ModelError when one cannot be used as configured.
        """
        self._section = section
        self._here: dict[int, NumericVerifier | LengthVerifier] = {}
        self._classifiers: dict[int, Classifier] = {}
        self._judges: dict[int, Judge] = {}
        self._pooled: dict[int, Pooled] = {}  # functions that run in processes, in the order the pool knows them by
        for index, function in enumerate(section.functions):
            match function:
                case NumericReward():
                    self._here[index] = NumericVerifier(function)
                case LengthReward():
                    self._here[index] = LengthVerifier(function)
                case ClassifierReward():
                    self._classifiers[index] = _make_classifier(function)
                case JudgeReward():
                    self._judges[index] = _make_judge(function)
                    self._pooled[index] = function
                case _:
                    self._pooled[index] = function
        setup = Setup(tuple(self._pooled.values()), tuple(datasets))
        self._pool = ProcessPool(setup, section.concurrency) if self._pooled else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the verifier processes."""
        if self._pool is not None:
            self._pool.close()

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise DataError for the first prompt a function could not score whatever the response."""
        functions = self._section.functions
        needs_answer = [component_name(function) for function in functions if _needs_answer(function)]
        has_numeric = any(isinstance(function, NumericReward) for function in functions)
        traits = self._pool.traits if self._pool is not None else ()
        for prompt in prompts:
            if needs_answer and prompt.answer is None:
                raise DataError(f"prompt {prompt.prompt_id} has no answer to score against; set data.answer_column")
            if has_numeric:
                try:
                    answer_number(prompt.answer)
                except ValueError as error:
                    raise DataError(f"prompt {prompt.prompt_id}: {error}; reward numeric needs one") from None
            for function, trait in zip(self._pooled.values(), traits, strict=True):
                for column in sorted(trait.required_columns - prompt.columns.keys()):
                    raise DataError(
                        f"prompt {prompt.prompt_id} has no column {column!r}, which reward "
                        f"{component_name(function)!r} takes; {hint(column, prompt.columns)}"
                    )

    def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per item, in order. Raises ComponentFailed when a component failed and ``on_error`` is fail."""
        scored: dict[tuple[int, int], Scored] = {}  # by position of the item and index of the function
        stops = self._section.on_error == "fail"
        for function, part in self._outcomes(items):
            scored.update(((position, function), outcome) for position, outcome in part.items())
            if stops and any(outcome.error is not None for outcome, _ in part.values()):
                break
        results = [self._result(position, item, scored) for position, item in enumerate(items)]
        failed = [result for result in results if result.error is not None]
        if stops and failed:
            component = next(c for c in failed[0].components if c.error is not None)
            raise ComponentFailed(
                f"reward {component.name!r} on rollout {failed[0].rollout_id}: {component.error}; fix it, or set "
                "reward.on_error: drop to leave such rollouts out of the update, or zero to count them as 0",
                [result for result in results if result.components],
            )
        return results

    def _outcomes(self, items: Sequence[RewardInput]) -> Iterator[tuple[int, dict[int, Scored]]]:
        """Function by function, quick ones first: its index, and what became of it by position of the item."""
        for index, verifier in self._here.items():
            yield index, {position: _score_here(verifier, item) for position, item in enumerate(items)}
        for index, classifier in self._classifiers.items():
            yield index, dict(enumerate(classifier.score(items)))
        asked: dict[int, dict[int, RewardInput]] = {index: dict(enumerate(items)) for index in self._pooled}
        spent: dict[int, float] = {}
        for index, judge in self._judges.items():
            began = time.perf_counter()
            said = judge.ask(items)
            spent[index] = (time.perf_counter() - began) / max(len(items), 1)
            failed = {position: (text, spent[index]) for position, text in enumerate(said) if isinstance(text, Outcome)}
            asked[index] = {
                position: replace(items[position], response=text)
                for position, text in enumerate(said)
                if isinstance(text, str)
            }
            yield index, failed
        yield from self._ask_pool(asked, spent)

    def _ask_pool(
        self, asked: dict[int, dict[int, RewardInput]], spent: dict[int, float]
    ) -> Iterator[tuple[int, dict[int, Scored]]]:
        """What the processes say about the items ``asked`` of each function, by position."""
        if self._pool is None:
            return
        one_by_one = [index for index, function in self._pooled.items() if not _is_batched(function)]
        by_item = sorted({position for index in one_by_one for position in asked[index]})
        parts = [(index, tuple(asked[index])) for index in self._pooled if index not in one_by_one and asked[index]]
        parts += [(index, (position,)) for position in by_item for index in one_by_one if position in asked[index]]
        pooled = list(self._pooled)
        calls = [
            Call(i, pooled.index(index), tuple(asked[index][p] for p in part), self._pooled[index].timeout_s)
            for i, (index, part) in enumerate(parts)
        ]
        replies = self._pool.run(calls, stop_on_error=self._section.on_error == "fail")
        for call_id, reply in replies.items():
            index, part = parts[call_id]
            seconds = reply.latency_s / len(reply.outcomes) + spent.get(index, 0.0)
            yield index, {p: (outcome, seconds) for p, outcome in zip(part, reply.outcomes, strict=True)}

    def _result(self, position: int, item: RewardInput, scored: dict[tuple[int, int], Scored]) -> RewardResult:
        """The components there are; a reward only when every function has spoken, or a failure counts as 0."""
        components: list[Component] = []
        complete = True
        for index, function in enumerate(self._section.functions):
            if (position, index) not in scored:
                complete = False
                continue
            outcome, seconds = scored[position, index]
            components += _components(function, outcome, seconds)
            complete &= outcome.error is None or self._section.on_error == "zero"
        reward = sum((c.weight * c.value for c in components if c.value is not None), 0.0)
        return RewardResult(item.rollout_id, reward if complete else None, tuple(components))


def _make_classifier(section: ClassifierReward) -> Classifier:
    from core_trainer.rewards.classifier import Classifier

    try:
        return Classifier(section)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"reward {component_name(section)!r}: {error}") from None


def _make_judge(section: JudgeReward) -> Judge:
    from core_trainer.rewards.judge import Judge

    try:
        return Judge(section)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"reward {component_name(section)!r}: {error}") from None


def _needs_answer(function: RewardFunction) -> bool:
    if isinstance(function, ClassifierReward | JudgeReward):
        return function.needs_answer
    return isinstance(function, NumericReward | MathVerifyReward)


def _is_batched(function: RewardFunction) -> bool:
    return isinstance(function, FunctionReward) and function.batched


def _score_here(verifier: NumericVerifier | LengthVerifier, item: RewardInput) -> Scored:
    began = time.perf_counter()
    try:
        outcome = Outcome(tuple(verifier(item)))
    except ValueError as error:
        outcome = Outcome(error=str(error))
    return outcome, time.perf_counter() - began


def _components(function: RewardFunction, outcome: Outcome, seconds: float) -> list[Component]:
    """A function that scores several things gives a component for each, named function/part."""
    name, weight = component_name(function), function.weight
    if outcome.error is not None:
        return [Component(name, weight, None, "error", None, seconds, outcome.error)]
    return [
        Component(
            f"{name}/{v.part}" if v.part else name, weight, v.value, v.label, v.explanation, seconds, None, v.answer
        )
        for v in outcome.verdicts
    ]
