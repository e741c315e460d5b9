"""Whole runs of the real workers in this process instead of Ray's: a stop and a resume change nothing, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from core_trainer import checkpoint, cluster, controller
from core_trainer.algorithms import registry
from core_trainer.job import Job, RunSummary, StepReport
from core_trainer.workers.base import Place
from rlinsight import config, names, telemetry
from rlinsight.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.slow  # seconds each: a model is trained


class Group:
    """A worker group of one, called directly."""

    world_size = 1
    started: ClassVar[list[str]] = []

    def __init__(self, worker: Any, role: str, world_size: int, *args: Any, num_gpus: float = 0) -> None:
        self.worker = worker(Place(role, 0, 1), *args)
        Group.started.append(role)

    def call(self, method: str, *args: Any, step: int | None = None, timeout_s: float | None = None) -> list[Any]:
        assert (timeout_s is not None) == (method in ("start", "sync_weights"))
        torch.set_num_threads(1)
        return [getattr(self.worker, method)(*args)]

    def scatter(
        self, method: str, parts: Sequence[Any], *args: Any, step: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        assert (timeout_s is not None) == (method == "sample")
        return self.call(method, parts[0], *args)

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return self.call(method, *args)[0]

    def split(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        return [items]

    def split_groups(self, samples: Sequence[Any]) -> list[Sequence[Any]]:
        return [samples]

    def close(self, timeout_s: float) -> None:
        self.worker.close()


class Watcher:
    """A reporter that remembers what is no speed, and asks for a stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.steps: list[dict[str, float | None]] = []

    def stage(self, text: str) -> None:
        """Nobody watches."""

    def step(self, report: StepReport) -> None:
        self.steps.append({name: v for name, v in report.metrics.items() if not name.startswith("perf/")})

    def stop_requested(self) -> bool:
        return self.stop_after is not None and len(self.steps) >= self.stop_after


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cluster, "WorkerGroup", Group)
    monkeypatch.setattr(cluster.Cluster, "_start_ray", lambda *_: None)
    monkeypatch.setattr(Group, "started", [])
    yield
    telemetry.shutdown(0)


def train(path: Path, source: Path, watcher: Watcher, resume: Path | None = None, **sections: Any) -> RunSummary:
    """More different letters are better; three steps of four prompts."""
    (path / "reward.py").write_text("def letters(prompt, response, answer):\n    return len(set(response)) / 16\n")
    data = path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a} + {b}?"}) + "\n" for a in range(5) for b in range(4)))
    tree: dict[str, Any] = {
        "model": {"source": str(source), "compute_dtype": "float32"},
        "data": {"train": str(data)},
        "reward": {"functions": [{"type": "function", "function": f"{path / 'reward.py'}:letters"}]},
        "rollout": {"group_size": 2, "max_new_tokens": 8},
        "trainer": {"total_steps": 3, "prompts_per_step": 4, "learning_rate": 1e-3},
        "telemetry": {"enabled": False},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None, resume=resume)
    return controller.run(config.parse(tree), job, watcher)


VALIDATION = {"datasets": [{"source": "reasoning_gym:chain_sum", "size": 2}], "every": 1, "max_new_tokens": 4}
SHARED = {"system_prompt": "Count with care, one digit after the other. " * 4}  # over a block of the engine's cache
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {
        "data": SHARED,
        "algorithm": {
            "name": "ppo",
            "num_mini_batches": 2,
            "kl": {"controller": {"type": "adaptive", "target": 1e-3, "horizon": 8}},
            "critic": {"type": "model", "warmup_steps": 1},
        },
        "validation": VALIDATION,
    },
    "shared critic": {"algorithm": {"name": "ppo", "critic": {"type": "shared"}, "num_epochs": 2}},
    "adapters": {
        "algorithm": {"kl": {"coef": 0.1}},
        "model": {"lora": {"rank": 4}},
        "trainer": {"learning_rate": 1e-2, "warmup_steps": 1, "lr_schedule": "cosine"},
    },
    "dapo with correction": {
        "algorithm": {
            "name": "dapo",
            "shaping": {"dynamic_sampling": {"max_rounds": 2}, "overlong": {"buffer": 4}},
            "correction": {"importance": {"level": "sequence"}, "rejection": {"high": 1.0}},
        }
    },
    "clip_cov": {
        "algorithm": {
            "num_mini_batches": 2,
            "policy_loss": {"type": "clip_cov", "cov_ratio": 0.2, "cov_low": 0.0, "clip_low": 0.9, "clip_high": 9.0},
            "correction": {"importance": {}, "rejection": {"high": 1.0}},
        },
        "model": {"lora": {"rank": 4}},
        "trainer": {"learning_rate": 1e-2},
    },
    "remax": {"algorithm": {"name": "remax"}},
    "token baseline": {"algorithm": {"advantage": {"type": "optimal_token_baseline"}, "policy_loss": {"type": "sapo"}}},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_stop_and_a_resume_equal_one_go(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """Every metric of every step, every tensor of the last checkpoint, and the controller's state."""
    whole, first, second = Watcher(), Watcher(stop_after=1), Watcher()
    for part in ("whole", "cut"):
        (tmp_path / part).mkdir()
    done = train(tmp_path / "whole", tiny_model, whole, **RUNS[name])
    cut = train(tmp_path / "cut", tiny_model, first, **RUNS[name])
    assert (cut.status, cut.step) == ("interrupted", 1)
    resumed = train(tmp_path / "cut", tiny_model, second, resume=cut.checkpoint, **RUNS[name])
    assert len(whole.steps) == 3
    assert (whole.steps[-1][names.M_GRAD_NORM] or 0) > 1e-3
    assert first.steps + second.steps == whole.steps
    assert done.checkpoint is not None
    assert resumed.checkpoint is not None
    states = [checkpoint.read_state(path) for path in (done.checkpoint, resumed.checkpoint)]
    assert states[0] == states[1]
    files = sorted(path.relative_to(done.checkpoint) for path in done.checkpoint.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(resumed.checkpoint) for path in resumed.checkpoint.rglob("*.safetensors"))
    for file in files:
        mine, theirs = load_file(done.checkpoint / file), load_file(resumed.checkpoint / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), file
    stored = {file.as_posix() for file in files}
    assert ("critic/value_head.safetensors" in stored) == (name in ("ppo", "shared critic"))
    assert ("adapter_model.safetensors" in stored) == (name in ("adapters", "clip_cov"))
    if name == "clip_cov":
        assert all((step[names.M_CLIP_FRACTION] or 0) > 0.05 for step in whole.steps)
        assert all(step[names.M_RATIO_MAX] < 10 for step in whole.steps)  # none of these by the ratio
    assert ("reference" in Group.started) == (name in ("ppo", "shared critic", "remax"))


@pytest.mark.parametrize("name", ["ppo", "remax"])
def test_validation_changes_nothing_of_training(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """Bit for bit, also where its prompts have a beginning in common with those that are trained on."""
    runs: list[tuple[list[dict[str, float | None]], dict[str, torch.Tensor]]] = []
    for part, validation in (("with", VALIDATION), ("without", None)):
        (tmp_path / part).mkdir()
        watcher, sections = Watcher(), {**RUNS[name], "data": SHARED}
        sections.pop("validation", None)
        if validation is not None:
            sections["validation"] = validation
        done = train(tmp_path / part, tiny_model, watcher, **sections)
        assert done.checkpoint is not None
        runs.append((watcher.steps, load_file(done.checkpoint / "model.safetensors")))
    (steps, weights), (steps_without, weights_without) = runs
    assert steps == steps_without
    assert (steps[-1][names.M_GRAD_NORM] or 0) > 1e-3
    assert all(torch.equal(weights[key], weights_without[key]) for key in weights)


@pytest.mark.parametrize("name", ["ppo", "dapo with correction", "clip_cov"])
def test_the_same_seed_and_config_give_two_equal_runs(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """Bit for bit: every metric of every step, every tensor of the last checkpoint; another seed gives another run."""
    runs: list[tuple[list[dict[str, float | None]], dict[str, torch.Tensor]]] = []
    for part, seed in (("one", 3), ("two", 3), ("other", 4)):
        (tmp_path / part).mkdir()
        watcher = Watcher()
        done = train(tmp_path / part, tiny_model, watcher, run={"seed": seed}, **RUNS[name])
        assert done.checkpoint is not None
        stored = "adapter_model" if "model" in RUNS[name] else "model"
        runs.append((watcher.steps, load_file(done.checkpoint / f"{stored}.safetensors")))
    (steps, weights), (steps_two, weights_two), (_, weights_other) = runs
    assert steps == steps_two
    assert (steps[-1][names.M_GRAD_NORM] or 0) > 1e-3
    assert weights.keys() == weights_two.keys()
    assert all(torch.equal(weights[key], weights_two[key]) for key in weights)
    assert not all(torch.equal(weights[key], weights_other[key]) for key in weights)


def test_parts_of_ones_own_stand_in_for_built_in_ones(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KL estimator, an aggregation and a treatment of importance ratios, written anew in a plugin: the same run."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    plugin = tmp_path / "parts.py"
    plugin.write_text(
        "import torch\n"
        "from core_trainer.algorithms.registry import aggregation, importance, kl_estimator\n"
        "@kl_estimator('own_k2')\n"
        "def k2(log_probs, other):\n"
        "    return (log_probs - other) ** 2 / 2\n"
        "@aggregation('own_sum')\n"
        "def token_sum(num_loss_tokens):\n"
        "    return torch.ones_like(num_loss_tokens, dtype=torch.float64)\n"
        "@importance('own_cut')\n"
        "def cut(ratio, *, high: float = 2.0):\n"
        "    return ratio.clamp(max=high)\n"
    )
    runs = []
    for part, names_, plugins in (
        ("own", ("own_k2", "own_sum", "own_cut"), [str(plugin)]),
        ("built in", ("k2", "token-sum", "truncate"), []),
    ):
        (tmp_path / part).mkdir()
        estimator, aggregation, treatment = names_
        algorithm = {
            "plugins": plugins,
            "kl": {"estimator": estimator, "coef": 0.1},
            "aggregation": aggregation,
            "correction": {"importance": {"treatment": {"type": treatment, "high": 0.9}}},
        }
        watcher = Watcher()
        done = train(tmp_path / part, tiny_model, watcher, algorithm=algorithm)
        assert done.checkpoint is not None
        runs.append((watcher.steps, load_file(done.checkpoint / "model.safetensors")))
    (steps, weights), (built_in, built_in_weights) = runs
    assert steps == built_in
    assert (steps[-1][names.M_KL_LOSS] or 0) > 0
    assert steps[-1][names.M_CORRECTION["weight_mean"]] == pytest.approx(0.9, rel=1e-3)
    assert all(torch.equal(weights[key], built_in_weights[key]) for key in weights)


def test_micro_batches_do_not_change_what_kl_cov_learns(tmp_path: Path, tiny_model: Path) -> None:
    """Up to rounding: the first mini-batch of a step is not penalised by the sign of what passes round apart. Prompts
    of many lengths pad those of a mini-batch otherwise than those of the step.
    """
    data = tmp_path / "ragged.jsonl"
    lengths = np.repeat([1, 40, 3, 90, 7, 2, 60, 5], 3)
    data.write_text("".join(json.dumps({"prompt": "word " * n + "?"}) + "\n" for n in lengths))
    runs = []
    for tokens in (4096, 64):
        (tmp_path / str(tokens)).mkdir()
        watcher = Watcher()
        train(
            tmp_path / str(tokens),
            tiny_model,
            watcher,
            data={"train": str(data)},
            algorithm={"num_mini_batches": 2, "policy_loss": {"type": "kl_cov", "cov_ratio": 0.5, "kl_coef": 10.0}},
            trainer={"total_steps": 1, "micro_batch_tokens": tokens},
        )
        runs.append(watcher.steps[0])
    one, other = runs
    for name in (names.M_LOSS, names.M_GRAD_NORM, names.M_POLICY_KL):
        assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_a_loss_of_ones_own_sees_the_whole_mini_batch(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a plugin: the likeliest tokens of each mini-batch are cut, as many as the config says, whatever the
    micro-batches.
    """
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    plugin = tmp_path / "losses.py"
    plugin.write_text(
        "import torch\n"
        "from core_trainer.algorithms.registry import TokenLoss, policy_loss\n"
        "@policy_loss('own_cut', whole_mini_batch=True)\n"
        "def cut(log_probs, old_log_probs, advantages, mask, *, num_cut: int = 1):\n"
        "    likeliest = torch.where(mask, log_probs.detach(), -torch.inf).topk(num_cut).indices\n"
        "    clipped = torch.zeros_like(mask).index_fill(0, likeliest, True)\n"
        "    ratio = torch.exp(log_probs - old_log_probs)\n"
        "    return TokenLoss(torch.where(mask & ~clipped, -advantages * ratio, 0), ratio.detach(), clipped)\n"
    )
    tokens = 4 * 2 * 8  # of a step
    for budget, num_cut in ((4096, 3), (1, 3), (1, 5)):
        folder = tmp_path / f"{budget} {num_cut}"
        folder.mkdir()
        watcher = Watcher()
        algorithm = {
            "plugins": [str(plugin)],
            "policy_loss": {"type": "own_cut", "num_cut": num_cut},
            "num_mini_batches": 2,
        }
        train(
            folder, tiny_model, watcher, algorithm=algorithm, trainer={"total_steps": 2, "micro_batch_tokens": budget}
        )
        assert [step[names.M_CLIP_FRACTION] for step in watcher.steps] == [2 * num_cut / tokens] * 2
        assert all((step[names.M_GRAD_NORM] or 0) > 1e-3 for step in watcher.steps)


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """By name, before any worker starts, as are another critic, adapters and a plugin's wrong option."""
    done = train(tmp_path, tiny_model, Watcher(), trainer={"total_steps": 1})
    started = len(Group.started)
    for sections, message in (
        ({"algorithm": {"name": "rloo"}}, 'algorithm is "grpo" there and "rloo" in this run'),
        ({"algorithm": {"name": "ppo"}}, 'critic is null there and "model" in this run'),
        ({"model": {"lora": {"rank": 4}}}, "lora.rank is null there and 4 in this run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(tmp_path, tiny_model, Watcher(), resume=done.checkpoint, **sections)
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from core_trainer.algorithms.registry import advantage\n"
        "@advantage('of_train_loop')\n"
        "def mine(rewards, *, scale: float = 1.0):\n"
        "    return scale * rewards\n"
    )
    algorithm = {"plugins": [str(plugin)], "advantage": {"type": "of_train_loop", "scal": 2.0}}
    with pytest.raises(ConfigError, match="no option 'scal'; did you mean 'scale'"):
        train(tmp_path, tiny_model, Watcher(), algorithm=algorithm)
    assert len(Group.started) == started
