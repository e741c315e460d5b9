"""vLLM in exact mode: not one bit between its log-probs and training's. Skipped where vLLM is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from core_trainer import models
from core_trainer.exact import level
from core_trainer.exact.self_test import compare, exact_engine
from rlinsight.config import VllmSection
from rlinsight.errors import EngineError
from tests.core_trainer.test_exact import load
from tests.e2e.test_train import Project
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run: make test-vllm"
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Two tiny models, output layer tied to the embedding or not, with heads as vLLM's CPU attention wants them."""
    return {
        tied: make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, tie_embeddings=tied)
        for tied in (True, False)
    }


def build(directory: Path, model: Any) -> Any:
    """As the worker builds its engine."""

    def start(kind: type) -> Any:
        tokenizer, section = models.load_tokenizer(directory), VllmSection(kv_cache_gib=0.25)
        return kind(model, tokenizer, directory, (2,), 64, 300, section)

    return start


@pytest.mark.parametrize("tied", [True, False])
def test_every_bit_is_the_trainers_at_every_version(directories: dict[bool, Path], tied: bool) -> None:
    """Ragged prompts, shared ones, long ones, decoding in ever smaller batches; again after other weights came in."""
    from core_trainer.rollout.vllm.exact import TiledVllm

    model = load(directories[tied])
    level.enable(model, "tile")
    engine = build(directories[tied], model)(TiledVllm)
    for scale in (1.0, -0.7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        result = compare(model, engine, (2,), 0.7, 300)
        assert result.num_tokens == 369
        assert (result.num_mismatched, result.gap_max, result.first) == (0, 0.0, None)


def test_other_engines_of_the_process_are_vllms_own_and_refused(directories: dict[bool, Path]) -> None:
    """An exact start leaves vLLM's classes as they were, and the self-test finds what its own kernels do. The level
    after the one that failed gets an engine of its own.
    """
    from core_trainer.rollout.vllm.engine import VllmEngine
    from core_trainer.rollout.vllm.exact import ENGINES, TiledVllm

    model = load(directories[True])
    start = build(directories[True], model)
    start(TiledVllm)
    with pytest.raises(EngineError, match=r"level tile: \d+ of 369 differ, the first at position \d+"):
        exact_engine(("tile",), model, start, (2,), 0.7, 300, {"tile": VllmEngine})
    engines = {"mkl": VllmEngine, "tile": ENGINES["tile"]}
    engine = exact_engine(("mkl", "tile"), model, start, (2,), 0.7, 300, engines)
    assert type(engine) is TiledVllm
    assert level.of(model) == "tile"


@pytest.mark.parametrize("exact", [True, "tile"])
def test_training_on_vllm_has_not_one_mismatched_token(
    tmp_path: Path, directories: dict[bool, Path], exact: bool | str
) -> None:
    """Whole runs, weights changing: 0 tokens and a KL of 0.0 at every step, and the store says the same."""
    project = Project(tmp_path, directories[True])
    project.tree["rollout"] |= {"engine": "vllm", "exact": exact, "temperature": 0.8, "vllm": {"kv_cache_gib": 0.25}}
    project.tree["rollout"]["max_new_tokens"] = 80  # beyond a block
    project.tree["data"]["max_prompt_tokens"] = 128
    project.tree["trainer"]["total_steps"] = 3
    project.train()
    metrics = project.rows("SELECT num_mismatched_tokens AS mismatched, rollout_kl AS kl FROM train_metrics")
    assert metrics == [{"mismatched": 0, "kl": 0.0}] * 3
    assert project.rows("SELECT DISTINCT engine FROM turns") == [{"engine": "vllm"}]
    changed = project.rows("SELECT count(*) AS n FROM train_metrics WHERE weights_changed > 0.5")
    assert changed == [{"n": 3}]
