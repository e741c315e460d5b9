"""Exact mode: which runs may ask for it, its self-test, and training with not one differing bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer import attention, cluster, controller, models
from core_trainer.batching import TrainSample
from core_trainer.exact import level, self_test
from core_trainer.exact.linear import StrictLinear, TiledLinear
from core_trainer.exact.paged import TiledEngine
from core_trainer.exact.self_test import LONGEST, compare, exact_engine, make_requests
from core_trainer.metrics import token_stats
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import Turn
from rlinsight import config, names
from rlinsight.errors import ConfigError, EngineError
from tests.core_trainer.stored import recording
from tests.core_trainer.test_train_loop import Group, Watcher
from tests.core_trainer.test_train_loop import train as train_here

ROOT = Path(__file__).resolve().parents[2]
VLLM = {"exact": "tile", "engine": "vllm"}


def tree(**sections: Any) -> dict[str, Any]:
    """A config of exact mode, with sections added."""
    base = {
        "model": {"source": "m"},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "rollout": {"exact": True},
    }
    return base | sections


# Config --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"), [(True, "auto"), (False, "off"), ("off", "off"), ("mkl", "mkl"), ("tile", "tile")]
)
def test_levels_by_name_or_as_a_switch(written: Any, meant: str) -> None:
    """true takes the first level that passes; a resolved config loads again as it is."""
    parsed = config.parse(tree(rollout={"exact": written}))
    assert parsed.rollout.exact == meant
    assert config.parse(parsed.model_dump(mode="json")) == parsed


def test_no_bit_is_rounded_away_on_the_way_to_the_store() -> None:
    """Exact mode records log-probs whole, and other settings are refused; a run without a record is left alone."""
    assert config.parse(tree()).telemetry.token_decimals is None
    assert config.parse(tree(rollout={})).telemetry.token_decimals == 5
    assert config.parse(tree(telemetry={"text": "off"})).telemetry.token_decimals is None
    assert config.parse(tree(telemetry={"enabled": False})).telemetry.token_decimals == 5
    with pytest.raises(ConfigError, match=r"token_decimals=5 rounds what rollout\.exact=auto keeps equal"):
        config.parse(tree(telemetry={"token_decimals": 5}))


def test_what_cannot_be_exact_is_refused() -> None:
    """Other engines, merged adapters, bfloat16 in MKL's strict mode; each says what to set."""
    for sections, message in (
        (
            {"rollout": {"exact": "mkl", "engine": "vllm_server"}},
            "exact=mkl works with engine: native or vllm only, not vllm_server",
        ),
        ({"model": {"source": "m", "lora": {}}, "rollout": VLLM}, "works without adapters"),
        ({"model": {"source": "m", "compute_dtype": "bfloat16"}, "rollout": VLLM}, "vllm computes in float32"),
        ({"model": {"source": "m", "lora": {}}}, r"set model\.lora\.sync: adapter"),
        (
            {"model": {"source": "m", "compute_dtype": "bfloat16"}, "rollout": {"exact": "mkl"}},
            r"compute_dtype=bfloat16 needs rollout\.exact: tile",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config.parse(tree(**sections))
    config.parse(tree(rollout=VLLM))
    config.parse(tree(model={"source": "m", "lora": {"sync": "adapter"}}))
    config.parse(tree(model={"source": "m", "compute_dtype": "bfloat16"}, rollout={"exact": "tile"}))


# Self-test -----------------------------------------------------------------------------------------------------------


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model ready for a level."""
    model = models.load_model(directory, dtype)
    attention.enable(model)
    return model


def builder(model: Any, directory: Path, perturbed: Sequence[level.Level] = ()) -> Callable[..., NativeEngine]:
    """As the worker builds its engine; at the levels ``perturbed`` the 70th token of each response is one unit in the
    last place off.
    """

    def build(kind: type[NativeEngine]) -> NativeEngine:
        class Perturbed(kind):  # type: ignore[valid-type,misc]
            async def generate(self, request: GenerateRequest) -> Turn:
                turn = await super().generate(request)
                if len(turn.token_ids) > 69:
                    turn.rollout_log_probs[69] = float(
                        np.nextafter(np.float32(turn.rollout_log_probs[69]), np.float32(0))
                    )
                return turn

        chosen = Perturbed if level.of(model) in perturbed else kind
        return chosen(model, models.load_tokenizer(directory), (2,), 64)

    return build


def test_switching_a_model_over_and_back(tiny_model: Path) -> None:
    """Every linear layer changes class and keeps its weights; another level replaces the first."""
    model = load(tiny_model)
    assert level.of(model) is None
    weights = {name: value.data_ptr() for name, value in model.named_parameters()}
    for wanted, kind in (("mkl", StrictLinear), ("tile", TiledLinear)):
        level.enable(model, wanted)  # type: ignore[arg-type]
        assert level.of(model) == wanted
        assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {kind}
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == weights


def test_requests_fit_any_run() -> None:
    """No sequence beyond the run's longest, a token at least on each side, one long one where there is room."""
    for longest in (2, 9, 65, 4096):
        requests = make_requests(500, (2,), 0.7, longest)
        lengths = [len(r.prompt_token_ids) + r.params.max_new_tokens for r in requests]
        assert max(lengths) == min(longest, LONGEST)
        assert all(len(r.prompt_token_ids) > 0 and r.params.max_new_tokens > 0 for r in requests)
        assert len({r.request_id for r in requests}) == len(requests)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_level_tile_agrees_in_every_bit(tiny_model: Path, dtype: torch.dtype) -> None:
    """Engine against trainer; two threads are for the whole runs below."""
    model = load(tiny_model, dtype)
    level.enable(model, "tile")
    result = compare(model, builder(model, tiny_model)(TiledEngine), (2,), 0.7, 300)
    assert result.num_tokens == 369  # each once: 241, their halves, and 8 of the long one
    assert (result.num_mismatched, result.gap_max, result.first) == (0, 0.0, None)


def test_what_the_trainer_scores_alone_is_compared_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence of each prompt, the long one too; a bit of that one is enough, and counts once."""
    real, asked = self_test.sample_log_probs, []

    def scored(model: Any, samples: Sequence[TrainSample], *options: Any) -> list[np.ndarray]:
        (sample,), (row,) = samples, real(model, samples, *options)
        asked.append(len(sample.prompt_token_ids))
        if asked[-1] == 292:
            row[3] = np.nextafter(row[3], np.float32(0))
        return [row]

    monkeypatch.setattr(self_test, "sample_log_probs", scored)
    model = load(tiny_model)
    level.enable(model, "tile")
    result = compare(model, builder(model, tiny_model)(TiledEngine), (2,), 0.7, 300)
    assert asked == [*(prompt for prompt, _ in self_test.LENGTHS), 292]
    assert (result.num_tokens, result.num_mismatched) == (369, 1)
    assert "at position 295 of a sequence with a prompt of 292" in str(result.first)
    assert "scored alone with" in str(result.first)


def test_one_bit_is_enough_to_be_refused(tiny_model: Path) -> None:
    """The error names the position of the first difference and both numbers."""
    model = load(tiny_model)
    wrong = r"level tile: 1 of \d+ differ, the first at position 70 of a sequence with a prompt of 1: sampled with -\d"
    with pytest.raises(EngineError, match=wrong):
        exact_engine(("tile",), model, builder(model, tiny_model, ["tile"]), (2,), 1.0, 80)


def test_the_first_level_that_passes_is_taken(tiny_model: Path) -> None:
    """The model and the engine are left at it."""
    model = load(tiny_model)
    engine = exact_engine(("mkl", "tile"), model, builder(model, tiny_model, ["mkl"]), (2,), 1.0, 80)
    assert level.of(model) == "tile"
    assert type(engine) is TiledEngine


def test_the_updates_own_forward_is_compared_where_the_engines_numbers_are_the_old_ones() -> None:
    """One token of three is off by 0.5 in the trainer's forward: it counts, though old and rollout are the same."""
    mask, ones = torch.tensor([True, True, True, False]), torch.ones(4)
    rollout = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    own = torch.tensor([-1.0, -2.5, -3.0, -9.0])
    stats = token_stats(mask, own, rollout, rollout, None, ones, ones, ones > 2, ones * 0, own)
    assert (stats.num_mismatched, stats.rollout_gap_max) == (1, 0.5)
    assert stats.rollout_kl == pytest.approx(np.exp(-0.5) - 0.5)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_bit_shows_in_the_record_where_the_pass_is_skipped(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The engine's numbers are the old ones then, but what is recorded beside them is the trainer's: metric and
    ``mismatch`` count the same tokens, of two mini-batches those whose weights still are the ones that sampled.
    """

    def planted(*args: Any, **options: Any) -> Any:
        engine = build_engine(*args, **options)
        sample = engine.generate

        async def generate(request: GenerateRequest) -> Turn:
            turn = await sample(request)
            turn.rollout_log_probs[2] = float(np.nextafter(np.float32(turn.rollout_log_probs[2]), np.float32(0)))
            return turn

        engine.generate = generate  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr("core_trainer.workers.policy.build_engine", planted)
    monkeypatch.setattr(cluster, "WorkerGroup", Group)
    monkeypatch.setattr(cluster.Cluster, "_start_ray", lambda *_: None)
    watcher = Watcher()
    num_mini_batches = 2 if name == "grpo" else 1
    with recording(tmp_path) as store:
        train_here(
            tmp_path,
            tiny_model,
            watcher,
            algorithm={"name": name, "num_mini_batches": num_mini_batches},
            rollout={"exact": "tile", "max_new_tokens": 4},
            trainer={"total_steps": 1},
        )
    expected = 8 // num_mini_batches  # rollouts of the first mini-batch
    assert watcher.steps[0][names.M_MISMATCHED] == expected
    ((skipped,),) = store.rows("SELECT skipped FROM phases WHERE phase = 'old_log_probs'")
    assert skipped == controller.EXACT
    for macro in ("mismatch", "mismatch_by_cause"):
        ((mismatched, gap),) = store.rows(f"SELECT sum(mismatched), max(gap_max) FROM {macro}('r')")
        assert mismatched == expected, macro
        assert 0 < gap < 1e-5


# Whole runs ----------------------------------------------------------------------------------------------------------

RUN = """
import json, os, sys
from pathlib import Path

import pytest

from rlinsight import names
from tests.core_trainer import test_train_loop as loop


class Group(loop.Group):
    def call(self, method, *args, step=None, timeout_s=None):
        return [getattr(self.worker, method)(*args)]  # with as many threads as there are cores


path, model, threads, sections = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
watcher = loop.Watcher()
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.cluster, "WorkerGroup", Group)
    patch.setattr(loop.cluster.Cluster, "_start_ray", lambda *_: None)
    loop.train(Path(path), Path(model), watcher, **json.loads(sections))
wanted = (names.M_MISMATCHED, names.M_ROLLOUT_KL, names.M_GRAD_NORM)
print(json.dumps([[step[name] for name in wanted] for step in watcher.steps]))
"""


def train(path: Path, source: Path, threads: int, **sections: Any) -> list[list[float]]:
    """Three steps of GRPO in a process of its own, since MKL reads its mode once: for each the tokens that differ, the
    KL between engine and trainer, and the gradient's norm.
    """
    sections["rollout"] = {"group_size": 3, "max_new_tokens": 80} | sections["rollout"]
    environment = {key: value for key, value in os.environ.items() if key not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    environment["OMP_WAIT_POLICY"] = "passive"  # two threads that wait for each other would fill a busy machine
    command = [sys.executable, "-c", RUN, str(path), str(source), str(threads), json.dumps(sections)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("exact", "dtype"), [("mkl", "float32"), ("tile", "float32"), ("tile", "bfloat16")])
@pytest.mark.parametrize(("threads", "temperature"), [(1, 1.0), (2, 0.7)])
def test_training_has_not_one_mismatched_token(
    tmp_path: Path, tiny_model: Path, exact: str, dtype: str, threads: int, temperature: float
) -> None:
    """Responses beyond a block of 64, weights that change: 0 tokens and a KL of 0.0 at every step, not nearly."""
    sections = {"rollout": {"exact": exact, "temperature": temperature}, "model": {"compute_dtype": dtype}}
    steps = train(tmp_path, tiny_model, threads, **sections)
    assert len(steps) == 3
    for mismatched, kl, gradient in steps:
        assert (mismatched, kl) == (0.0, 0.0)
        assert gradient > 1e-3


@pytest.mark.slow
def test_the_fast_mode_does_differ(tmp_path: Path, tiny_model: Path) -> None:
    """The same run without exact mode: what the gate measures is there to be found."""
    steps = train(tmp_path, tiny_model, 2, rollout={})
    assert all(mismatched > 0 and kl > 0 for mismatched, kl, _ in steps)


@pytest.mark.slow
def test_adapters_and_recomputed_layers_are_exact_too(tmp_path: Path, tiny_model: Path) -> None:
    """Adapters are computed apart on both sides; layers are computed again for the backward pass."""
    sections = {
        "model": {"lora": {"rank": 4, "sync": "adapter"}},
        "trainer": {"learning_rate": 1e-2, "gradient_checkpointing": True},
    }
    steps = train(tmp_path, tiny_model, 2, rollout={"exact": "tile"}, **sections)
    assert [step[:2] for step in steps] == [[0.0, 0.0]] * 3
