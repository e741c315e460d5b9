"""Rewards are weighted sums of named components; what raises, hangs, dies or returns no number is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from core_trainer.rewards import ComponentFailed, RewardInput, RewardScorer
from core_trainer.types import Prompt
from rlinsight.config import DataSection, RewardSection
from rlinsight.errors import ConfigError, DataError, RewardError

FUNCTIONS = """
import asyncio, os, time
import numpy

def length(response): return len(response)
def columns(response, answer, level, data_source, factor=1): return factor * (level + (answer == response))
def everything(**columns): return len(columns)
def parts(response): return {"short": len(response) < 3, "digits": numpy.float32(response.isdigit())}
def raises(response): raise ValueError("no idea\\nwhat this is")
def raises_on_b(response):
    if response == "b":
        raise ValueError("no b")
    return 1
def exits(response): raise SystemExit(3)
def dies(response): os._exit(9)
def hangs_on_b(response):
    if response == "b":
        time.sleep(60)
    return 1
def nan(response): return float("nan")
def nothing(response): pass
def text(response): return "1"
def empty(response): return {}
def bad_part(response): return {"a": 1, "b": float("inf")}
def forgot_async(response): return later(response)
def pid(response): time.sleep(0.2); return os.getpid()
async def later(response):
    await asyncio.sleep(0.2)
    return 0.5
async def too_late(response):
    if response == "b":
        await asyncio.sleep(60)
    return 0.5
async def blocks_on_b(response):
    if response == "b":
        time.sleep(60)
    await asyncio.sleep(0.1)
    return 0.5
def batch(response, answer, level, scale): return [scale * (a == r) + v for r, a, v in zip(response, answer, level)]
def batch_parts(response): return [{"length": len(r), "one": 1} for r in response]
async def batch_later(response):
    await asyncio.sleep(0.01)
    return numpy.arange(len(response))
def batch_some(response): return [None if r == "b" else {"x": float("nan")} if r == "c" else 1 for r in response]
def batch_short(response): return [1]
def batch_number(response): return 1
def batch_mapping(response): return {"a": [1, 2]}
def batch_hangs(response): time.sleep(60)
def only(response, /): return 1
prints = lambda response: print("noise") or 1
constant = 3
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's reward file."""
    path = tmp_path_factory.mktemp("user") / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def scorer(*functions: dict[str, Any], data: str = "d.jsonl", **options: Any) -> RewardScorer:
    section = TypeAdapter(RewardSection).validate_python({"functions": list(functions), **options})
    return RewardScorer(section, [DataSection(train=data)])


def items(*responses: str, answer: str | None = "5", **columns: Any) -> list[RewardInput]:
    prompt = Prompt("d/0", "d", "prompt text", (1,), answer, columns)
    return [RewardInput(f"r{i}", prompt, response, len(response)) for i, response in enumerate(responses)]


@pytest.fixture
def user(user_file: Path) -> Callable[..., dict[str, Any]]:
    """Config of a function of the user's file."""
    return lambda name, **options: {"type": "function", "function": f"{user_file}:{name}", **options}


def test_components_are_named_weighted_and_summed(user: Callable[..., dict[str, Any]]) -> None:
    """The reward is the weighted sum; each component says what it saw; parts of a mapping stand by name."""
    functions = (
        {"type": "numeric", "weight": 2},
        {"type": "regex", "pattern": r"^\d$", "full_match": True, "name": "format", "weight": 0.5},
        {"type": "math_verify"},
        user("parts", weight=10),
    )
    with scorer(*functions) as rewards:
        right, wrong = rewards.score(items("5", "so 6"))
    assert [(c.name, c.weight, c.value, c.label) for c in right.components] == [
        ("numeric", 2, 1.0, "correct"),
        ("format", 0.5, 1.0, "match"),
        ("math_verify", 1, 1.0, "correct"),
        ("parts/short", 10, 1.0, None),
        ("parts/digits", 10, 1.0, None),
    ]
    assert (right.rollout_id, right.reward) == ("r0", 23.5)
    assert [c.label for c in wrong.components] == ["wrong", "no_match", "wrong", None, None]
    assert wrong.components[0].explanation == "last number 6, answer 5"
    assert wrong.reward == 0.0
    assert all(c.latency_s > 0 and c.error is None for c in right.components)


def test_functions_get_the_arguments_they_declare(user: Callable[..., dict[str, Any]]) -> None:
    """Columns by name or all of them, kwargs from the config."""
    with scorer(user("columns", kwargs={"factor": 10}), user("everything"), user("length")) as rewards:
        (result,) = rewards.score(items("5", level=3, other="x"))
    # everything: level, other, data_source, prompt, response, answer
    assert [c.value for c in result.components] == [40, 6, 1]


def test_task_reward_scores_as_the_task_does() -> None:
    """The reasoning_gym task judges the text in answer tags, or the whole response."""
    metadata = {"source_dataset": "chain_sum"}
    with scorer({"type": "reasoning_gym"}, data="reasoning_gym:chain_sum") as rewards:
        results = rewards.score(
            items("5", "I think <answer>5.0</answer>", "<answer>6</answer>", question="2 + 3", metadata=metadata)
        )
    assert [r.components[0].label for r in results] == ["correct", "correct", "wrong"]
    assert (results[2].reward or 0.0) < 0.1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "ValueError: no idea what this is (my_rewards.py line 9)"),
        ("exits", "SystemExit: 3 (my_rewards.py line 14)"),
        ("dies", "its process ended with exit code 9"),
        ("nan", "ValueError: returned nan; return a finite number"),
        ("nothing", "TypeError: returned NoneType; return a number"),
        ("text", "TypeError: returned str; return a number"),
        ("empty", "ValueError: returned an empty mapping"),
        ("bad_part", "ValueError: returned inf for 'b'; return a finite number"),
        ("forgot_async", "TypeError: returned a coroutine; declare the function with async def"),
    ],
)
def test_failed_function_stops_the_run_or_counts_zero(
    user: Callable[..., dict[str, Any]], name: str, error: str
) -> None:
    """on_error fail is one line with component and rollout; zero keeps the other components and records the error."""
    with scorer(user(name)) as rewards, pytest.raises(RewardError) as caught:
        rewards.score(items("a"))
    assert str(caught.value).startswith(f"reward {name!r} on rollout r0: {error}")
    assert "\n" not in str(caught.value)
    with scorer(user(name), {"type": "numeric"}, on_error="zero") as rewards:
        first, second = rewards.score(items("5", "6"))
        assert first.components[0].error is not None
        assert first.components[0].error.startswith(error)
        assert first.components[0].value is None
        assert (first.reward, second.reward) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs_on_b", "too_late", "blocks_on_b"])
def test_timeouts_end_the_call_and_spare_the_others(user: Callable[..., dict[str, Any]], name: str) -> None:
    """A plain function that hangs, an async one that waits, an async one that blocks: all end in time, alone."""
    with scorer(user(name, timeout_s=0.5), on_error="zero") as rewards:
        started = time.monotonic()
        results = rewards.score(items("a", "b", "c", "d"))
        assert time.monotonic() - started < 10
        assert results[1].components[0].error == "timed out after 0.5 s"
        assert [bool(r.reward) for r in results] == [True, False, True, True]
        assert rewards.score(items("a"))[0].reward == results[0].reward
    with scorer(user(name, timeout_s=0.5)) as rewards, pytest.raises(RewardError, match=r"timed out after 0.5 s; fix"):
        rewards.score(items("a", "b"))


def test_endless_regex_is_killed() -> None:
    """A pattern that backtracks for ever is stopped by its timeout."""
    with scorer({"type": "regex", "pattern": "(a+)+b", "timeout_s": 0.5}) as rewards, pytest.raises(RewardError) as e:
        rewards.score(items("a" * 40))
    assert str(e.value).startswith("reward 'regex' on rollout r0: timed out after 0.5 s")


def test_concurrency_limits_calls_in_flight(user: Callable[..., dict[str, Any]]) -> None:
    """Plain calls get a process each up to the limit; async calls run side by side in one."""
    with scorer(user("pid"), concurrency=2) as rewards:
        rewards.score(items(*"abcdefgh"))  # a second process is on its way, however slow the machine starts it
        time.sleep(0.1)
        pids = {result.reward for _ in range(3) for result in rewards.score(items(*"abcdefgh"))}
        assert len(pids) == 2
    with scorer(user("later"), concurrency=8) as rewards:
        rewards.score(items("a"))
        took = []
        for _ in range(5):
            started = time.monotonic()
            assert [result.reward for result in rewards.score(items(*"abcdefgh"))] == [0.5] * 8
            took.append(time.monotonic() - started)
        assert min(took) < 1.0  # one after the other would take 1.6 s each time


def test_results_keep_the_order_of_the_items(user: Callable[..., dict[str, Any]]) -> None:
    """However calls interleave, results come in the order of the items."""
    with scorer(user("length"), {"type": "regex", "pattern": "xxx"}, concurrency=3) as rewards:
        results = rewards.score(items(*("x" * i for i in range(40))))
    assert [r.rollout_id for r in results] == [f"r{i}" for i in range(40)]
    assert [r.components[0].value for r in results] == list(range(40))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("lenght", {}, "has no function 'lenght'; did you mean 'length'?"),
        ("constant", {}, "'constant' is int, not a function"),
        ("only", {}, "'response' is positional-only"),
        ("columns", {"kwargs": {"facter": 2}}, "kwargs.facter: the function has no such argument; did you mean 'fac"),
        ("columns", {"kwargs": {"answer": 2}}, "kwargs.answer is taken"),
    ],
)
def test_unusable_functions_are_refused_at_the_start(
    user: Callable[..., dict[str, Any]], function: str, options: dict[str, Any], message: str
) -> None:
    """A misspelt function or argument is a ConfigError before anything is scored."""
    with pytest.raises(ConfigError) as caught:
        scorer(user(function, **options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_functions_that_cannot_be_imported_are_refused(tmp_path: Path) -> None:
    """A missing file or module, and one that fails or exits while it is imported, are told apart."""
    (tmp_path / "broken.py").write_text("import json\n\nundefined\n")
    (tmp_path / "crashes.py").write_text("import os\nos._exit(7)\n")
    for reference, message in [
        (f"{tmp_path}/none.py:score", "none.py does not exist"),
        ("no_such_module_here:score", "no module 'no_such_module_here' in"),
        (f"{tmp_path}/broken.py:score", "failed: NameError: name 'undefined' is not defined (broken.py line 3)"),
        (f"{tmp_path}/crashes.py:score", "reward process ended with exit code 7 while loading the functions"),
    ]:
        with pytest.raises(ConfigError) as caught:
            scorer({"type": "function", "function": reference})
        assert message in str(caught.value)


def test_function_by_module_name() -> None:
    """module:function is looked up on the Python path."""
    function = {"type": "function", "function": "statistics:fmean", "kwargs": {"data": [1, 2]}}
    with scorer(function) as rewards:
        assert rewards.score(items("a"))[0].reward == 1.5


def test_check_finds_prompts_that_cannot_be_scored(user: Callable[..., dict[str, Any]]) -> None:
    """Missing answers and columns are found from the dataset alone, before a model is loaded."""
    with scorer({"type": "numeric"}) as rewards:
        rewards.check([items("", answer="5")[0].prompt])
        with pytest.raises(DataError, match=r"prompt d/0 has no answer to score against; set data.answer_column"):
            rewards.check([items("", answer=None)[0].prompt])
        with pytest.raises(DataError, match="prompt d/0: answer 'Paris' holds no number; reward numeric needs one"):
            rewards.check([items("", answer="Paris")[0].prompt])
    with scorer(user("columns")) as rewards:
        rewards.check([items("", level=1)[0].prompt])
        with pytest.raises(
            DataError, match="has no column 'level', which reward 'columns' takes; did you mean 'levle'"
        ):
            rewards.check([items("", levle=1)[0].prompt])


def test_numeric_alone_needs_no_process_and_is_quick() -> None:
    """64 numeric scores take a few milliseconds."""
    took = []
    with scorer({"type": "numeric"}) as rewards:
        for _ in range(5):
            started = time.perf_counter()
            rewards.score(items(*["The answer is 5"] * 64))
            took.append(time.perf_counter() - started)
    assert min(took) < 0.05
    assert not psutil.Process().children()


def test_prints_do_not_reach_the_output_of_a_command(
    user: Callable[..., dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """What user code prints goes to stderr."""
    with scorer(user("prints")) as rewards:
        rewards.score(items("a"))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "noise\n")


@pytest.mark.slow
def test_processes_die_with_a_killed_trainer(user_file: Path) -> None:
    """kill -9 of the trainer leaves no verifier process, not even one that hangs in user code."""
    code = (
        "from rlinsight.config import *\nfrom core_trainer.rewards import *\nfrom core_trainer.types import Prompt\n"
        f"f = FunctionReward(type='function', function='{user_file}:hangs_on_b', timeout_s=100)\n"
        "s = RewardScorer(RewardSection(functions=[f]), [DataSection(train='d.jsonl')])\nprint('started', flush=True)\n"
        "s.score([RewardInput('r', Prompt('d/0', 'd', 't', (1,), None), 'b', 1)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"started\n"
        time.sleep(0.3)
        (child,) = psutil.Process(trainer.pid).children()
        trainer.kill()
        assert psutil.wait_procs([child], timeout=5)[1] == []


def test_batched_functions_are_called_once_with_lists(user: Callable[..., dict[str, Any]]) -> None:
    """Arguments are lists over the rollouts but for kwargs; numbers, parts and coroutines come back one each."""
    functions = (
        user("batch", batched=True, kwargs={"scale": 10}),
        user("batch_parts", batched=True, weight=0.5),
        user("batch_later", batched=True, weight=100),
        user("length"),
    )
    with scorer(*functions) as rewards:
        results = rewards.score([*items("5", level=2), *items("six", level=3)])
    assert [[c.value for c in r.components] for r in results] == [[12, 1, 1, 0, 1], [3, 3, 1, 1, 3]]
    assert [c.name for c in results[0].components][1:3] == ["batch_parts/length", "batch_parts/one"]
    assert [r.reward for r in results] == [12 + 1 + 0 + 1, 3 + 2 + 100 + 3]


def test_a_batched_function_fails_for_one_rollout_alone(user: Callable[..., dict[str, Any]]) -> None:
    """None or NaN in the list fails its rollout; the others keep their scores."""
    with scorer(user("batch_some", batched=True), {"type": "numeric"}, on_error="drop") as rewards:
        results = rewards.score(items("5", "b", "c", "6"))
    assert [r.reward for r in results] == [2.0, None, None, 1.0]
    assert results[1].error == "batch_some: returned NoneType; return a number"
    assert results[2].error == "batch_some: returned nan for 'x'; return a finite number"
    assert [c.value for c in results[1].components] == [None, 0.0]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("batch_short", "ValueError: returned 1 scores for 2 responses; return one for each"),
        ("batch_number", "TypeError: returned int; a batched function returns a list"),
        ("batch_mapping", "TypeError: returned dict; a batched function returns a list"),
        ("batch_hangs", "timed out after 0.5 s"),
    ],
)
def test_a_batched_call_that_fails_as_a_whole_fails_every_rollout(
    user: Callable[..., dict[str, Any]], name: str, error: str
) -> None:
    """Each rollout says why; components of other functions are not touched."""
    with scorer(user(name, batched=True, timeout_s=0.5), {"type": "numeric"}, on_error="zero") as rewards:
        results = rewards.score(items("5", "6"))
    assert all(result.components[0].error is not None for result in results)
    assert all(str(result.components[0].error).startswith(error) for result in results)
    assert [result.reward for result in results] == [1.0, 0.0]


def test_a_dropped_rollout_has_no_reward_but_keeps_its_components(user: Callable[..., dict[str, Any]]) -> None:
    """on_error drop touches the rollout that failed and no other."""
    with scorer(user("length"), user("raises_on_b"), on_error="drop") as rewards:
        results = rewards.score(items("a", "b", "aa"))
    assert [result.reward for result in results] == [2.0, None, 3.0]
    assert [c.value for c in results[1].components] == [1.0, None]
    assert str(results[1].error).startswith("raises_on_b: ValueError: no b")


def test_a_failure_that_ends_the_run_hands_over_what_was_scored(user: Callable[..., dict[str, Any]]) -> None:
    """The exception carries the failed component and those that had spoken, so that they can be recorded."""
    with (
        scorer({"type": "numeric"}, user("raises_on_b"), concurrency=1) as rewards,
        pytest.raises(ComponentFailed) as caught,
    ):
        rewards.score(items("5", "b", "6"))
    first, failed, unreached = caught.value.results
    assert [c.value for c in first.components] == [1.0, 1.0]
    assert [c.value for c in failed.components] == [0.0, None]
    assert (failed.reward, failed.error) == (None, f"raises_on_b: {failed.components[1].error}")
    assert ([c.name for c in unreached.components], unreached.reward, unreached.error) == (["numeric"], None, None)


@pytest.mark.parametrize(
    ("options", "penalties"),
    [
        ({"form": "linear"}, {0: 0, 4: 0, 5: 0.25, 6: 0.5, 8: 1, 100: 1}),
        ({"form": "quadratic"}, {0: 0, 4: 0, 5: 0.0625, 6: 0.25, 8: 1, 100: 1}),
        ({"form": "deviation"}, {0: 1, 3: 0.25, 4: 0, 5: 0.25, 8: 1, 100: 1}),
        ({"form": "step", "max": None}, {0: 0, 4: 0, 5: 1}),
    ],
)
def test_length_is_penalised_as_the_form_says(options: dict[str, Any], penalties: dict[int, float]) -> None:
    """Worked by hand with target 4 and max 8, in sampled tokens."""
    with scorer({"type": "length", "target": 4, "max": 8, "weight": 2, **options}) as rewards:
        prompt = items("")[0].prompt
        results = rewards.score([RewardInput(str(n), prompt, "text", n) for n in penalties])
    assert [result.reward for result in results] == [-2 * penalty for penalty in penalties.values()]


def test_verifiers_report_the_answer_they_read() -> None:
    """The answer is the same however it is written; none found is the empty answer, none looked for is None."""
    with scorer({"type": "regex", "pattern": "x"}, {"type": "numeric"}) as rewards:
        assert [r.answer for r in rewards.score(items("so 5", "it is 5.0", "x"))] == ["5", "5", ""]
    with scorer({"type": "math_verify"}) as rewards:
        first, second, none = rewards.score(items("$\\frac{10}{4}$", "so 2.5 it is", "who knows"))
        assert (first.answer, none.answer) == ("5/2", "")
        assert second.answer is not None
    with scorer({"type": "regex", "pattern": "x"}) as rewards:
        assert rewards.score(items("x"))[0].answer is None


def test_each_dataset_is_scored_by_its_own_task() -> None:
    """The dataset's number chooses the task whose score counts."""
    section = TypeAdapter(RewardSection).validate_python({"functions": [{"type": "reasoning_gym"}]})
    tasks = [DataSection(train="reasoning_gym:chain_sum"), DataSection(train="reasoning_gym:spell_backward")]
    prompts = [
        Prompt("a/0", "a", "t", (1,), "5", {"question": "2 + 3", "metadata": {"source_dataset": "chain_sum"}}),
        Prompt("b/0", "b", "t", (1,), "olleh", {"question": "hello", "metadata": {"source_dataset": "spell_backward"}}),
    ]
    with RewardScorer(section, tasks) as rewards:
        results = rewards.score([RewardInput("r", p, p.answer or "", 1, i) for i, p in enumerate(prompts)])
        assert [result.reward for result in results] == [1.0, 1.0]
