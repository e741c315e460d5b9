"""Validation: sampling on prompts that are never trained on, and what it says about the policy.

Owns: loading the validation prompts, the phase that samples and scores them, its metrics, which one decides the best
checkpoint. Does not own: when it runs (the controller), how rollouts are sampled and scored (the worker groups).

Everything is per prompt first and then a mean over prompts, each counting once. A prompt whose scores are s_1..s_n,
of which c pass, has: mean@n, their mean; pass@k = 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374), best@k, the expected
maximum, and maj@k, the expected score of the majority's answer, all over the k-subsets of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from core_trainer.data import check_lengths, load_prompts
from core_trainer.rewards import RewardResult
from core_trainer.rollout.sample import Group, sample_seed, time_limit_s
from core_trainer.types import Prompt, Rollout, SamplingParams
from rlinsight import names, telemetry
from rlinsight.config import Config, RolloutSection, ValidationSection
from rlinsight.config.validation import ALL
from rlinsight.errors import ConfigError, DataError, EngineError, RewardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from core_trainer.workers.worker_group import WorkerGroup

TASK_SEED = 7_654_321  # of generated prompts: away from any run's seed, and the same in all runs, so that they compare
SUBSETS = 1000  # more k-subsets than this are drawn at random rather than all visited


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored answer to a validation prompt."""

    prompt_id: str
    source: str
    score: float
    vote: str  # answers that are equal count as one in a majority; no answer is a vote too


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of one validation."""

    source: str
    name: str
    value: float
    std_error: float | None  # of the mean over prompts, as if they were drawn from many more; None of one prompt
    num_samples: int


# Metrics -------------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples without replacement, of which c pass, hold one that does; 1 <= k <= n."""
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_at_k(scores: np.ndarray, k: int) -> float:
    """Expected maximum of k of the scores [n] without replacement: the i-th smallest has C(i-1, k-1) / C(n, k)."""
    n = len(scores)
    weights = np.zeros(n)
    weights[n - 1] = k / n
    for i in range(n - 1, k - 1, -1):  # C(i-1, k-1) = C(i, k-1) (i - k + 1) / i
        weights[i - 1] = weights[i] * (i - k + 1) / i
    return float(np.sort(scores) @ weights)


def maj_at_k(scores: np.ndarray, votes: Sequence[str], k: int) -> float:
    """Expected score of the answer most of k samples give, over k-subsets; scores [n].

    An answer's score is the mean over its samples in the subset; answers with equally many votes count equally. Beyond
    ``SUBSETS`` subsets it is an estimate over as many, drawn with a fixed seed.
    """
    chosen = _subsets(len(scores), k)  # [S, n]
    of = np.unique(np.asarray(votes, dtype=object).astype(str), return_inverse=True)[1]
    cast = np.eye(of.max() + 1)[of]  # [n, V]
    counts = chosen @ cast
    means = np.divide(chosen @ (cast * scores[:, None]), counts, out=np.zeros_like(counts), where=counts > 0)
    winners = counts == counts.max(axis=1, keepdims=True)
    return float(((means * winners).sum(axis=1) / winners.sum(axis=1)).mean())


def _subsets(n: int, k: int) -> np.ndarray:
    """k-subsets of n as rows of zeros and ones, float64 [S, n]."""
    if math.comb(n, k) <= SUBSETS:
        rows = np.array(list(combinations(range(n), k)))
    else:
        rows = np.random.default_rng(0).random((SUBSETS, n)).argpartition(k - 1, axis=1)[:, :k]
    chosen = np.zeros((len(rows), n))
    np.put_along_axis(chosen, rows, 1.0, axis=1)
    return chosen


def measure(samples: Sequence[Sample], section: ValidationSection) -> list[Metric]:
    """Metrics of each source in alphabetical order, then of all sources together when there are several.

    A prompt of which fewer than k samples could be scored counts in no metric of k; a metric of no prompt is left out.
    """
    prompts: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        prompts.setdefault((sample.source, sample.prompt_id), []).append(sample)
    values = {key: _of_prompt(answers, section) for key, answers in prompts.items()}
    sources = sorted({source for source, _ in prompts})
    metrics = []
    for source in [*sources, ALL] if len(sources) > 1 else sources:
        mine = [key for key in prompts if source in (ALL, key[0])]
        for name in section.metrics:
            counted = [key for key in mine if name in values[key]]
            if counted:
                column = np.array([values[key][name] for key in counted])
                error = float(column.std(ddof=1) / math.sqrt(len(column))) if len(column) > 1 else None
                size = sum(len(prompts[key]) for key in counted)
                metrics.append(Metric(source, name, float(column.mean()), error, size))
    return metrics


def _of_prompt(samples: Sequence[Sample], section: ValidationSection) -> dict[str, float]:
    scores, votes = np.array([sample.score for sample in samples]), [sample.vote for sample in samples]
    passed = int((scores >= section.pass_score).sum())
    values = {f"mean@{section.n}": float(scores.mean())}
    for k in section.ks:
        if k <= len(samples):
            values[f"pass@{k}"] = pass_at_k(len(samples), passed, k)
            values[f"best@{k}"] = best_at_k(scores, k)
            values[f"maj@{k}"] = maj_at_k(scores, votes, k)
    return values


def best_metric(metrics: Sequence[Metric], section: ValidationSection) -> float | None:
    """The value that decides the best checkpoint, negated unless ``maximize``: more is better.

    None when this validation did not make it, as too few samples could be scored.
    """
    source, name = section.best
    sources = sorted({metric.source for metric in metrics})
    if source == ALL and len(sources) == 1:
        source = sources[0]
    for metric in metrics:
        if (metric.source, metric.name) == (source, name):
            return metric.value if section.maximize else -metric.value
    return None


# Prompts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """The prompts of one dataset; ``sources[i]`` is what the metrics of ``prompts[i]`` stand under."""

    prompts: list[Prompt]
    sources: list[str]


def load_sets(config: Config, tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[ValidationSet]:
    """All validation prompts, checked and tokenised; empty without validation. Raises DataError or ConfigError."""
    section = config.validation
    if section is None:
        return []
    sets = list[ValidationSet]()
    owners: dict[str, str] = {}
    for dataset in section.datasets:
        try:
            prompts = load_prompts(dataset.as_data(config.data), tokenizer, TASK_SEED)
            check_lengths(prompts, context, sampling_params(section, config.rollout).max_new_tokens)
        except (DataError, ConfigError) as error:
            raise type(error)(f"validation dataset {dataset.name or dataset.source}: {error}") from None
        sources = [dataset.name or prompt.data_source for prompt in prompts]
        for source in dict.fromkeys(sources):
            if source == ALL or source in owners:
                raise ConfigError(
                    f"validation datasets {owners.get(source, 'of all sources')} and {dataset.source} are both called "
                    f"{source!r}; give {dataset.source} a name of its own"
                )
            owners[source] = dataset.source
        named = [
            replace(prompt, prompt_id=f"validation/{source}/{prompt.prompt_id.rpartition('/')[2]}")
            for prompt, source in zip(prompts, sources, strict=True)
        ]
        sets.append(ValidationSet(named, sources))
    if section.best[0] not in (ALL, *owners):
        raise ConfigError(
            f"validation.best_metric={section.best_metric!r} names no source of the data; known: "
            f"{', '.join(sorted(owners))}"
        )
    return sets


def sampling_params(section: ValidationSection, rollout: RolloutSection) -> SamplingParams:
    """How validation samples."""
    new_tokens = section.max_new_tokens or rollout.max_new_tokens
    return SamplingParams(new_tokens, section.temperature, section.top_p, section.top_k, stop=tuple(rollout.stop))


# The phase -----------------------------------------------------------------------------------------------------------


def is_due(section: ValidationSection | None, step: int, total_steps: int) -> bool:
    """Whether to validate the weights that ``step`` steps made; step 0 is before training."""
    if section is None:
        return False
    return section.before_training if step == 0 else step % section.every == 0 or step == total_steps


def validate(
    policy: WorkerGroup, reward: WorkerGroup, sets: Sequence[ValidationSet], config: Config, step: int, attempt: int
) -> list[Metric]:
    """Sample and score every validation prompt with the weights the engines serve; records and returns the metrics.

    The seed of a sample depends on the run's seed, the prompt and the sample, not on the step: two steps are compared
    on the same random numbers, and training's are not touched.
    """
    section = config.validation
    assert section is not None, "validation is configured"
    groups = [
        Group(
            f"a{attempt}-s{step:06d}-v{i:02d}-g{j:05d}",
            prompt,
            section.n,
            tuple(sample_seed(f"{config.run.seed}/validation/{i}/{j}/{sample}") for sample in range(section.n)),
            "eval",
        )
        for i, dataset in enumerate(sets)
        for j, prompt in enumerate(dataset.prompts)
    ]
    params = sampling_params(section, config.rollout)
    attributes = {names.STEP_INDEX: step, names.NUM_PROMPTS: len(groups), names.BATCH_SIZE: len(groups) * section.n}
    with telemetry.step_context(step), telemetry.span(names.VALIDATE, attributes, root=True, announce=True):
        limit_s = time_limit_s(config.rollout)
        parts = policy.scatter("sample", policy.split(groups), params, step=step, timeout_s=limit_s)
        sampled = [rollout for part in parts for rollout in part]
        policy_version, rollouts = _policy_version(sampled), iter(sampled)
        samples: list[Sample] = []
        for i, dataset in enumerate(sets):
            mine = [next(rollouts) for _ in range(len(dataset.prompts) * section.n)]
            mine = [rollout for rollout in mine if not rollout.error]
            results = reward.call("score", mine, i + 1, step=step)[0]
            samples += scored_samples(mine, results, dataset, section)
        metrics = measure(samples, section)
        _record(metrics, policy_version)
    return metrics


def _policy_version(rollouts: Sequence[Rollout]) -> int:
    """Of the weights that are validated. Raises EngineError when no rollout came back."""
    whole = [rollout for rollout in rollouts if not rollout.error]
    if not whole:
        raise EngineError(f"all {len(rollouts)} rollouts of a validation failed ({rollouts[0].error}); see view errors")
    return whole[0].policy_version


def scored_samples(
    rollouts: Sequence[Rollout], results: Sequence[RewardResult], dataset: ValidationSet, section: ValidationSection
) -> list[Sample]:
    """The rollouts that have a score. Raises RewardError when ``component`` is none of those that scored."""
    sources = {prompt.prompt_id: source for prompt, source in zip(dataset.prompts, dataset.sources, strict=True)}
    samples = []
    for rollout, result in zip(rollouts, results, strict=True):
        score = _score(result, section.component)
        if score is not None:
            prompt_id = rollout.prompt.prompt_id
            vote = result.answer if result.answer is not None else " ".join(rollout.response_text.split()).casefold()
            samples.append(Sample(prompt_id, sources[prompt_id], score, vote))
    return samples


def _score(result: RewardResult, component: str | None) -> float | None:
    if component is None or result.reward is None:
        return result.reward
    found = [c for c in result.components if c.name == component]
    if found:
        return found[0].value if found[0].value is not None else 0.0  # reward.on_error: zero
    if result.error is not None:  # a function that failed has no parts
        return 0.0
    known = ", ".join(c.name for c in result.components)
    raise RewardError(f"validation.component={component!r} did not score {result.rollout_id}; known: {known}")


def _record(metrics: Sequence[Metric], policy_version: int) -> None:
    for metric in metrics:
        attributes: dict[str, Any] = {
            names.EVAL_DATASET: metric.source,
            names.EVAL_METRIC: metric.name,
            names.EVAL_VALUE: metric.value,
            names.EVAL_SAMPLES: metric.num_samples,
            names.POLICY_VERSION: policy_version,
        }
        if metric.std_error is not None:
            attributes[names.EVAL_STD_ERROR] = metric.std_error
        telemetry.event(names.EVAL, attributes)
