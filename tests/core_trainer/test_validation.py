"""Validation's numbers are exact expectations over subsets; its phase samples, scores and records without training."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_trainer import models
from core_trainer.job import Job
from core_trainer.validation import (
    SUBSETS,
    Metric,
    Sample,
    best_at_k,
    best_metric,
    is_due,
    load_sets,
    maj_at_k,
    measure,
    pass_at_k,
    validate,
)
from core_trainer.workers import policy as policy_worker
from core_trainer.workers.base import Place
from core_trainer.workers.policy import PolicyWorker
from core_trainer.workers.reward import RewardWorker
from rlinsight import config, names, telemetry
from rlinsight.config import Config, ValidationSection
from rlinsight.errors import ConfigError, EngineError, RewardError

RNG = random.Random(5)


def section(**options: Any) -> ValidationSection:
    return ValidationSection.model_validate({"datasets": [{"source": "a.jsonl"}], **options})


def report(metrics: Sequence[Metric]) -> dict[str, float]:
    return {f"val/{metric.source}/{metric.name}": metric.value for metric in metrics}


# Metrics --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 2, 3, 1.0),
        (4, 0, 4, 0.0),
        (5, 5, 1, 1.0),
        (10, 3, 5, 11 / 12),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, value: float) -> None:
    """1 - C(n-c, k) / C(n, k); for 10, 3, 5: 1 - 21/252."""
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_and_best_at_k_equal_visiting_every_subset(n: int) -> None:
    """The closed forms are the mean over all k-subsets, for every c and k."""
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        for c in range(n + 1):
            naive = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(naive, abs=1e-12)
        scores = [RNG.choice([0.0, 0.5, RNG.gauss(0, 1)]) for _ in range(n)]
        naive = sum(max(scores[i] for i in subset) for subset in subsets) / len(subsets)
        assert best_at_k(np.array(scores), k) == pytest.approx(naive, abs=1e-12)


def test_pass_and_best_at_k_stay_exact_for_many_samples() -> None:
    """C(2000, 1000) overflows a float; the products do not."""
    exact = 1 - math.comb(1990, 1000) / math.comb(2000, 1000)
    assert pass_at_k(2000, 10, 1000) == pytest.approx(exact, abs=1e-12)
    scores = np.repeat([1.0, 0.0], [10, 1990])
    assert best_at_k(scores, 1000) == pytest.approx(exact, abs=1e-12)


def test_majority_by_hand() -> None:
    """Three votes, then pairs, where equally many votes share the win."""
    scores, votes = np.array([1.0, 0.0, 0.0]), ["7", "8", "8"]
    assert maj_at_k(scores, votes, 3) == 0.0  # 8 wins
    # {7, 8} twice: a draw, 1/2 each; {8, 8}: 0
    assert maj_at_k(scores, votes, 2) == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert maj_at_k(np.array([1.0, 0.5, 0.0]), ["7", "7", "8"], 3) == 0.75  # the mean score of those who say 7


def test_majority_equals_a_naive_loop() -> None:
    """Over every k-subset: the mean score of each answer with most votes, draws averaged."""
    for n in (1, 2, 5, 7):
        for k in range(1, n + 1):
            votes = [RNG.choice("abc") for _ in range(n)]
            scores = [RNG.random() for _ in range(n)]
            total = 0.0
            for subset in combinations(range(n), k):
                counts = Counter(votes[i] for i in subset)
                most = [vote for vote, count in counts.items() if count == max(counts.values())]
                wins = [[scores[i] for i in subset if votes[i] == vote] for vote in most]
                total += sum(sum(win) / len(win) for win in wins) / len(wins)
            assert maj_at_k(np.array(scores), votes, k) == pytest.approx(total / math.comb(n, k), abs=1e-12)


def test_majority_of_many_subsets_is_a_seeded_estimate() -> None:
    """C(24, 8) subsets are sampled: the same value each time, near the exact one of a two-answer case."""
    n, k, right = 24, 8, 14
    assert math.comb(n, k) > SUBSETS
    scores, votes = np.repeat([1.0, 0.0], [right, n - right]), ["a"] * right + ["b"] * (n - right)
    hits = {h: math.comb(right, h) * math.comb(n - right, k - h) / math.comb(n, k) for h in range(k + 1)}
    exact = sum(p for h, p in hits.items() if h > k / 2) + hits[k // 2] / 2
    value = maj_at_k(scores, votes, k)
    assert value == maj_at_k(scores, votes, k)
    assert value == pytest.approx(exact, abs=4 * math.sqrt(0.25 / SUBSETS))


def test_measure_is_per_prompt_then_over_prompts() -> None:
    """By hand: two sources, three prompts of two samples; each prompt counts once."""
    samples = [
        Sample("p", "x", 1.0, "1"),
        Sample("p", "x", 0.0, "2"),
        Sample("q", "x", 0.0, "1"),
        Sample("q", "x", 0.0, "1"),
        Sample("p", "y", 1.0, "1"),
        Sample("p", "y", 0.5, "1"),
    ]
    metrics = measure(samples, section(n=2, temperature=1))
    values = report(metrics)
    assert [values[f"val/{s}/mean@2"] for s in ("x", "y", "all")] == [0.25, 0.75, pytest.approx((0.5 + 0 + 0.75) / 3)]
    assert [values[f"val/{s}/pass@1"] for s in ("x", "y")] == [0.25, 0.5]
    assert [values[f"val/{s}/pass@2"] for s in ("x", "y")] == [0.5, 1.0]
    assert [values[f"val/{s}/best@2"] for s in ("x", "y")] == [0.5, 1.0]
    assert [values[f"val/{s}/maj@2"] for s in ("x", "y")] == [0.25, 0.75]
    first, *_ = metrics
    assert (first.name, first.num_samples) == ("mean@2", 4)
    assert first.std_error == pytest.approx(0.25)  # values 0.5 and 0: std 0.3536 over sqrt(2)
    assert next(m for m in metrics if m.source == "y").std_error is None
    shuffled = samples[:]
    RNG.shuffle(shuffled)
    assert report(measure(shuffled, section(n=2, temperature=1))) == pytest.approx(values)


def test_prompts_with_too_few_samples_count_in_no_metric_of_k() -> None:
    """A dropped rollout leaves its prompt out of pass@2, not out of the mean."""
    samples = [Sample("p", "x", 1.0, "1"), Sample("q", "x", 0.0, "1"), Sample("q", "x", 0.0, "1")]
    metrics = {m.name: (m.value, m.num_samples) for m in measure(samples, section(n=2, temperature=1))}
    assert metrics["mean@2"] == (0.5, 3)
    assert metrics["pass@2"] == (0.0, 2)
    assert measure([], section()) == []


def test_the_best_metric_is_one_number_of_which_more_is_better() -> None:
    """Over all sources by default; a lone source stands for all; less is better when told so."""
    samples = [Sample("p", "x", 1.0, "1"), Sample("p", "y", 0.0, "1")]
    assert best_metric(measure(samples, section()), section()) == 0.5
    assert best_metric(measure(samples[:1], section()), section()) == 1.0
    named = section(best_metric="x/pass@1", maximize=False)
    assert best_metric(measure(samples, named), named) == -1.0
    assert best_metric(measure(samples, section()), section(best_metric="z/mean@1")) is None
    assert best_metric([], section()) is None


def test_when_it_is_due() -> None:
    """Before the first step, every so many, and after the last."""
    assert [step for step in range(9) if is_due(section(every=3), step, 8)] == [0, 3, 6, 8]
    assert [step for step in range(9) if is_due(section(every=3, before_training=False), step, 8)] == [3, 6, 8]
    assert not is_due(None, 0, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4}, "n=4 has no effect with temperature 0"),
        ({"top_p": 0.5}, "top_p=0.5 has no effect with temperature 0"),
        ({"top_k": 5}, "top_k=5 has no effect with temperature 0"),
        ({"n": 4, "temperature": 1, "k": [8]}, "each k must be there once, from 1 to n=4"),
        ({"n": 4, "temperature": 1, "k": [2, 2]}, "each k must be there once, from 1 to n=4"),
        ({"best_metric": "pass@2"}, "best_metric='pass@2' is not made here; known: mean@1, pass@1"),
        ({"datasets": [{"source": "a", "name": "x"}], "best_metric": "y/mean@1"}, "names no dataset; known: x"),
        ({"datasets": [{"source": "a", "name": "x"}] * 2}, "two datasets are called 'x'"),
        ({"datasets": [{"source": "a", "name": "all"}]}, "stands for all sources together"),
        ({"datasets": [{"source": "a.jsonl", "task_args": {"x": 1}}]}, "task_args only apply to reasoning_gym"),
        ({"datasets": [{"source": "reasoning_gym:t", "answer_column": "a"}]}, "answer_column has no effect"),
        ({"datasets": []}, "validation.datasets"),
        ({"component": "format"}, "validation.component='format' is no reward component; known: numeric"),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], message: str) -> None:
    """Naming the option, its value and what is known."""
    with pytest.raises(ConfigError) as caught:
        make_config(Path("m"), validation={"datasets": [{"source": "a.jsonl"}], **options})
    assert message in str(caught.value)


def test_datasets_are_written_as_the_training_data_unless_told_otherwise() -> None:
    """Columns, system prompt, suffix and limits come from data; a generated task takes no columns."""
    data = config.DataSection(
        train="t.jsonl", prompt_column="q", answer_column="a", prompt_suffix=" Think.", max_prompt_tokens=9, size=3
    )
    file, task = (
        config.ValidationDataset(source="v.jsonl", answer_column="b"),
        config.ValidationDataset(source="reasoning_gym:chain_sum", prompt_suffix=" Go."),
    )
    loaded = file.as_data(data)
    assert (loaded.train, loaded.prompt_column, loaded.answer_column) == ("v.jsonl", "q", "b")
    assert (loaded.prompt_suffix, loaded.max_prompt_tokens, loaded.size) == (" Think.", 9, None)
    assert (task.as_data(data).prompt_column, task.as_data(data).prompt_suffix) == ("prompt", " Go.")


KEEP = {"keep_best": True}


def test_a_best_metric_that_decides_nothing_is_refused(tiny_model: Path) -> None:
    """Which validation is best matters to the checkpoint that is kept, and to nothing else."""
    datasets = [{"source": "reasoning_gym:basic_arithmetic", "name": "sums", "size": 2}]
    for option in ({"best_metric": "sums/mean@1"}, {"maximize": False}):
        with pytest.raises(
            ConfigError, match=rf"validation.{next(iter(option))} has no effect without trainer.keep_best"
        ):
            make_config(tiny_model, validation={"datasets": datasets, **option})
        make_config(tiny_model, validation={"datasets": datasets, **option}, trainer=KEEP)


def test_a_best_metric_of_no_source_is_refused_at_the_start(tiny_model: Path) -> None:
    """The sources of unnamed datasets are known once they are loaded."""
    datasets = [{"source": "reasoning_gym:chain_sum", "size": 2}]
    tokenizer = models.load_tokenizer(tiny_model)
    wrong = make_config(tiny_model, validation={"datasets": datasets, "best_metric": "sums/mean@1"}, trainer=KEEP)
    with pytest.raises(ConfigError, match=r"best_metric='sums/mean@1' names no source of the data; known: "):
        load_sets(wrong, tokenizer, None)
    (made,) = load_sets(make_config(tiny_model, validation={"datasets": datasets}), tokenizer, None)
    right = make_config(
        tiny_model, validation={"datasets": datasets, "best_metric": f"{made.sources[0]}/mean@1"}, trainer=KEEP
    )
    assert load_sets(right, tokenizer, None) == [made]


# The phase ------------------------------------------------------------------------------------------------------------


def make_config(model: Path, **sections: Any) -> Config:
    tree = {
        "model": {"source": str(model), "compute_dtype": "float32"},
        "data": {"train": "reasoning_gym:chain_sum", "size": 8},
        "reward": {"functions": [{"type": "numeric"}]},
        "rollout": {"max_new_tokens": 6},
        **sections,
    }
    return config.parse(tree)


class Here:
    """A worker group of one worker in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def split(self, items: list[Any]) -> list[list[Any]]:
        return [items]

    def scatter(
        self, method: str, parts: list[Any], *args: Any, step: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        assert (timeout_s is not None) == (method == "sample")
        return [getattr(self.worker, method)(parts[0], *args)]

    def call(self, method: str, *args: Any, step: int | None = None) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every event and finished span, by name."""
    seen: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(telemetry, "event", lambda name, attributes, **_: seen.append((name, dict(attributes))))

    def record_span(name: str, start_ns: int, end_ns: int, attributes: dict[str, Any], **_: Any) -> dict[str, str]:
        seen.append((name, dict(attributes)))
        return {}

    monkeypatch.setattr(telemetry, "record_span", record_span)
    return seen


@pytest.fixture
def phase(tmp_path: Path, tiny_model: Path) -> Any:
    """Builds policy, reward and datasets of a config, and runs its validation at a step."""
    job = Job(run_id="r", attempt=1, run_dir=tmp_path, spool_dir=tmp_path / "spool", collector=None)
    workers: list[Any] = []

    def build(step: int = 0, **sections: Any) -> Any:
        made = make_config(tiny_model, telemetry={"enabled": False}, **sections)
        policy = PolicyWorker(Place("policy", 0, 1), job, made, {})
        reward = RewardWorker(Place("reward", 0, 1), job, made, {})
        workers.append(reward)
        policy.start(tiny_model, None, None)
        policy.sync_weights()
        sets = load_sets(made, policy.tokenizer, models.context_length(tiny_model))
        reward.start([prompt for each in sets for prompt in each.prompts])
        return lambda step=step: validate(Here(policy), Here(reward), sets, made, step, 1)  # type: ignore[arg-type]

    yield build
    for worker in workers:
        worker.close()


SUMS = {"source": "reasoning_gym:chain_sum", "size": 3, "name": "sums"}
LETTERS = {"source": "reasoning_gym:spell_backward", "size": 2}
HAS_E = {"type": "regex", "pattern": "e", "name": "has_e"}
TASK = {"type": "reasoning_gym", "weight": 3}


@pytest.mark.slow
def test_validation_samples_scores_and_records(phase: Any, recorded: list[tuple[str, dict[str, Any]]]) -> None:
    """Metrics equal those of the recorded rewards; its rollouts are marked, and repeat at the next step."""
    validation = {"datasets": [SUMS, LETTERS], "n": 4, "temperature": 1.0, "max_new_tokens": 5, "pass_score": 0.5}
    run = phase(validation=validation, reward={"functions": [HAS_E, TASK]})
    metrics = report(run(0))
    events = list(recorded)
    rollouts = [attributes for name, attributes in events if name == names.ROLLOUT]
    assert len(rollouts) == 5 * 4
    assert {attributes[names.SPLIT] for attributes in rollouts} == {"eval"}
    assert max(attributes[names.OUTPUT_TOKENS] for attributes in rollouts) <= 5
    assert rollouts[0][names.PROMPT_ID] == "validation/sums/0"
    assert rollouts[-1][names.PROMPT_ID] == "validation/spell_backward/1"
    scores = {a[names.ROLLOUT_ID]: a[names.REWARD_VALUE] for name, a in events if name == names.ROLLOUT_SCORED}
    mine = [scores[a[names.ROLLOUT_ID]] for a in rollouts]
    assert 0 < np.mean(mine[:12]) < 4
    assert metrics["val/sums/mean@4"] == pytest.approx(np.mean(mine[:12]))
    assert metrics["val/spell_backward/mean@4"] == pytest.approx(np.mean(mine[12:]))
    assert metrics["val/all/mean@4"] == pytest.approx(np.mean(mine))
    passed = [sum(score >= 0.5 for score in mine[i : i + 4]) for i in range(0, 20, 4)]
    assert metrics["val/all/pass@2"] == pytest.approx(np.mean([pass_at_k(4, c, 2) for c in passed]))
    evals = [attributes for name, attributes in events if name == names.EVAL]
    stored = {f"val/{a[names.EVAL_DATASET]}/{a[names.EVAL_METRIC]}": a[names.EVAL_VALUE] for a in evals}
    assert stored == metrics
    assert {a[names.POLICY_VERSION] for a in evals} == {0}
    assert report(run(7)) == metrics


@pytest.mark.slow
def test_a_component_is_validated_alone_and_greedy_sampling_is_one_sample(phase: Any) -> None:
    """component takes one component's value, and a name that nothing scored under is refused."""
    functions = {"functions": [HAS_E, {"type": "length", "target": 1, "max": 100}]}
    whole = report(phase(validation={"datasets": [SUMS]}, reward=functions)())
    part = report(phase(validation={"datasets": [SUMS], "component": "has_e"}, reward=functions)())
    assert set(whole) == {"val/sums/mean@1", "val/sums/pass@1"}
    assert part["val/sums/mean@1"] in (0, 1 / 3, 2 / 3, 1)
    assert whole["val/sums/mean@1"] < part["val/sums/mean@1"]
    with pytest.raises(RewardError, match=r"validation.component='has_e/x' did not score .*; known: has_e, length"):
        phase(validation={"datasets": [SUMS], "component": "has_e/x"}, reward=functions)()


def test_datasets_of_one_name_are_told_apart(phase: Any) -> None:
    """Two files of the same task need names, and the error of a dataset says whose it is."""
    with pytest.raises(ConfigError, match=r"are both called 'spell_backward'; give reasoning_gym:spell_backw"):
        phase(validation={"datasets": [LETTERS, LETTERS]})
    with pytest.raises(ConfigError, match=r"validation dataset reasoning_gym:nope: .*no task 'nope'"):
        phase(validation={"datasets": [{"source": "reasoning_gym:nope"}]})


def failing(engine: Any, fails: Any) -> Any:
    """The engine, but for requests of which ``fails`` holds by id."""
    plain = engine.generate

    async def generate(request: Any) -> Any:
        if fails(request.request_id):
            raise EngineError("gone")
        return await plain(request)

    engine.generate = generate
    return engine


@pytest.mark.slow
def test_rollouts_that_failed_are_in_no_metric(phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt has two of three samples left, the second none; when nothing comes back the run ends."""
    lost = ("a1-s000000-v00-g00000-r000", "a1-s000000-v00-g00001", "a1-s000001")
    build = policy_worker.build_engine

    def build_failing(*args: Any, **options: Any) -> Any:
        return failing(build(*args, **options), lambda name: name.startswith(lost))

    monkeypatch.setattr(policy_worker, "build_engine", build_failing)
    run = phase(
        validation={"datasets": [SUMS], "n": 3, "temperature": 1.0},
        reward={"functions": [{"type": "length", "target": 1, "max": 100}]},
        rollout={"on_error": "drop", "max_new_tokens": 4},
    )
    assert {metric.name: metric.num_samples for metric in run(0)}["mean@3"] == 2 + 3
    with pytest.raises(EngineError, match=r"all 9 rollouts of a validation failed \(EngineError\); see view errors"):
        run(1)


@pytest.mark.slow
def test_a_failure_that_ends_the_run_is_recorded_first(
    phase: Any, recorded: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """on_error fail: the failed component's event and the rollout's status are out before the error is."""
    (tmp_path / "slow.py").write_text("import time\n\n\ndef slow(response):\n    time.sleep(30)\n    return 0.0\n")
    function = f"{tmp_path / 'slow.py'}:slow"
    judge = {"type": "function", "function": function, "timeout_s": 0.5, "name": "slow"}
    run = phase(validation={"datasets": [SUMS]}, reward={"functions": [HAS_E, judge], "concurrency": 1})
    with pytest.raises(RewardError, match=r"reward 'slow' on rollout a1-s000003-v00-g0000\d-r000: timed out"):
        run(3)
    failed = [a for name, a in recorded if name == names.REWARD_COMPONENT and names.COMPONENT_VALUE not in a]
    assert [(a[names.COMPONENT], a[names.COMPONENT_LABEL]) for a in failed] == [("slow", "error")]
    assert failed[0][names.COMPONENT_EXPLANATION].startswith("timed out")
    scored = [a for name, a in recorded if name == names.ROLLOUT_SCORED and a[names.STATUS] != "ok"]
    assert [(a[names.STATUS], a[names.REASON][:4], names.REWARD_VALUE in a) for a in scored] == [
        ("error", "slow", False)
    ]
