"""Whole runs of `rlinsight train` on a tiny model: real Ray, engine, collector, store. Each starts real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import load_file

from rlinsight import names, store
from tests.e2e.test_launch import assert_linked, heed_signals

COMMAND = Path(sys.executable).parent / "rlinsight"
MARK = "RLINSIGHT_TEST_PROJECT"  # in the environment of every process a test starts
REWARD = '''
def short_words(prompt, response, answer):
    """More of the letter e is better: something a random model can learn."""
    return response.count("e") / 8
'''


class Project:
    """A folder in which somebody trains."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.store = path, path / "store.duckdb"
        (path / "reward.py").write_text(REWARD)
        self.tree: dict[str, Any] = {
            "run": {"name": "tiny", "dir": str(path / "runs")},
            "model": {"source": str(model), "compute_dtype": "float32"},
            "data": {
                "train": "reasoning_gym:basic_arithmetic",
                "task_args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                "size": 32,
            },
            "reward": {"functions": [{"type": "function", "function": "reward.py:short_words"}]},
            "rollout": {"group_size": 4, "max_new_tokens": 12},
            "trainer": {"total_steps": 4, "prompts_per_step": 4, "learning_rate": 1e-3},
            "telemetry": {"store": str(self.store)},
        }

    def start(self, *arguments: str, config: dict[str, Any] | None = None) -> subprocess.Popen[str]:
        file = self.path / "config.yaml"
        file.write_text(yaml.safe_dump(config or self.tree))
        return subprocess.Popen(
            [COMMAND, "train", file, *arguments],
            cwd=self.path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {MARK: str(self.path)},
            preexec_fn=heed_signals,
            start_new_session=True,  # a process group of its own, as a terminal gives a command
        )

    def train(self, *arguments: str, exit_code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=600)
        assert process.returncode == exit_code, f"exit {process.returncode}\n{out}\n{err}"
        if exit_code == 0 and self.tree["telemetry"].get("enabled", True):
            assert_linked(self.store)
        return out + err

    def processes(self) -> list[str]:
        """Command lines of everything alive that a command of this project started, however detached."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            if (process.info["environ"] or {}).get(MARK) == str(self.path):
                found.append(" ".join(process.info["cmdline"] or []))
        return found

    def rows(self, sql: str) -> list[dict[str, Any]]:
        return store.query(sql, store=self.store).to_pylist()

    def runs(self) -> list[Path]:
        return sorted((self.path / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def run(self, name: str = "tiny") -> Path:
        """The folder of the one run of that name."""
        (found,) = (self.path / "runs").glob(f"{name}-*")
        return found


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Iterator[Project]:
    """A fresh folder; what a failed test left running in it is killed."""
    project = Project(tmp_path, tiny_model)
    yield project
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(MARK) == str(tmp_path):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Project:
    """One run that uses every phase: KL loss, two epochs of two mini-batches, two data-parallel workers."""
    project = Project(tmp_path_factory.mktemp("trained"), tiny_model)
    project.tree["algorithm"] = {"kl": {"coef": 0.05}, "num_epochs": 2, "num_mini_batches": 2}
    project.tree["rollout"] |= {"temperature": 0.7}
    project.tree["trainer"] |= {"num_workers": 2}
    project.train()
    assert project.processes() == []
    return project


def test_everything_links(trained: Project) -> None:
    """Every rollout joins its step, group, tokens and spans, and every turn a request the engine timed; nothing is
    dropped; phases cover the steps."""
    assert_linked(trained.store)
    (turns,) = trained.rows("SELECT count(*) AS n, count(queue_s) AS timed FROM turn_requests")
    (sampled,) = trained.rows("SELECT count(*) AS n FROM turns")
    assert turns["timed"] == turns["n"] == sampled["n"] == 64
    coverage = trained.rows("SELECT * FROM v_phase_coverage")
    assert len(coverage) == 4
    assert all(row["fraction"] >= 0.95 for row in coverage), coverage
    health = trained.rows("SELECT * FROM health WHERE run_id IS NOT NULL")
    assert len(health) == 6  # controller, two policy, two reference, one reward
    for row in health:
        assert row["emitted"] > 0
        assert (row["dropped"], row["refused"], row["missing"]) == (0, 0, 0), row
    assert trained.rows("SELECT * FROM open_spans") == []


def test_every_leaf_says_what_its_time_counts_as(trained: Project) -> None:
    """No span of a step's trace without children lacks a bucket, and the buckets of each step add up to it."""
    silent = trained.rows(
        """SELECT DISTINCT o.name, (o.span_attributes ->> '$."rlinsight.worker.method"') AS method
           FROM otel_spans o JOIN v_steps s ON s.trace_id = o.trace_id
           ANTI JOIN otel_spans c ON c.trace_id = o.trace_id AND c.parent_span_id = o.span_id
           WHERE o.bucket IS NULL AND (o.span_attributes ->> '$."rlinsight.skipped"') IS NULL"""
    )
    assert silent == []
    for row in trained.rows("SELECT * FROM goodput"):
        parts = [row[f"{name}_ns"] for name in ("productive", "overhead", "wasted", "idle", "unattributed")]
        assert sum(parts) == row["wall_ns"]
        assert row["productive_ns"] > 0


def test_views_answer(trained: Project) -> None:
    """The views tell what the run did, and agree with each other."""
    (run,) = trained.rows("SELECT * FROM runs")
    assert (run["status"], run["steps_done"]) == ("finished", 4)
    metrics = trained.rows("SELECT * FROM train_metrics ORDER BY step")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    for row in metrics:
        for column in (
            "reward_mean",
            "entropy",
            "ref_kl",
            "policy_kl",
            "rollout_kl",
            "clip_fraction",
            "grad_norm",
            "weights_changed",
            "tokens_per_s",
            "response_length_mean",
        ):
            assert row[column] is not None, (row["step"], column)
        assert row["rollout_kl"] < 1e-6  # float32 engine and trainer agree to rounding
    (count,) = trained.rows("SELECT count(*) AS n, count(DISTINCT group_id) AS g, avg(reward) AS r FROM rollouts")
    assert (count["n"], count["g"]) == (64, 16)
    assert count["r"] == pytest.approx(np.mean([row["reward_mean"] for row in metrics]))
    versions = trained.rows("SELECT DISTINCT policy_version, replica FROM weight_syncs ORDER BY ALL")
    assert [(v["policy_version"], v["replica"]) for v in versions] == [
        (version, f"policy/{rank}") for version in (0, 4, 8, 12, 16) for rank in (0, 1)
    ]


def test_tokens_carry_what_training_did(trained: Project) -> None:
    """Per token: ids, text, four log-probs, entropy, advantage and masks, consistent with the step's metrics."""
    tokens = trained.rows("SELECT * FROM tokens")
    lengths = trained.rows("SELECT sum(response_tokens) AS n FROM rollouts")
    assert len(tokens) == lengths[0]["n"]
    for column in (
        "token_id",
        "piece",
        "rollout_log_prob",
        "old_log_prob",
        "log_prob",
        "ref_log_prob",
        "entropy",
        "advantage",
    ):
        assert all(row[column] is not None for row in tokens), column
    assert max(abs(row["old_log_prob"] - row["rollout_log_prob"]) for row in tokens) < 1e-4
    gaps = trained.rows(
        "SELECT step, max(abs(ref_log_prob - rollout_log_prob)) AS gap FROM tokens GROUP BY step ORDER BY step"
    )
    assert gaps[0]["gap"] < 1e-4  # the first step samples from the reference itself
    assert min(row["gap"] for row in gaps[1:]) > 1e-2  # later ones have left it, and it stayed
    by_step = trained.rows(
        "SELECT t.step, avg(t.entropy) AS entropy, m.entropy AS reported "
        "FROM tokens t JOIN train_metrics m USING (run_id, step) WHERE in_loss GROUP BY ALL"
    )
    assert all(row["entropy"] == pytest.approx(row["reported"], rel=1e-4) for row in by_step), by_step
    texts = trained.rows(
        "SELECT response_text, list_aggregate(token_pieces, 'string_agg', '') AS pieces FROM token_runs"
    )
    assert sum(row["pieces"].startswith(row["response_text"]) for row in texts) > len(texts) / 2  # special tokens aside


def test_rollout_traces_link_to_their_step(trained: Project) -> None:
    """A rollout's root span starts its own trace, holds its chat span, and links to the step that dispatched it."""
    rows = trained.rows(
        "SELECT s.trace_id, json_extract_string(s.links, '$[0].trace_id') AS linked, st.trace_id AS step_trace, "
        "c.name AS chat "
        "FROM otel_spans s JOIN steps st ON st.step = s.step "
        "JOIN otel_spans c ON c.parent_span_id = s.span_id WHERE s.name = 'rl.rollout'"
    )
    assert len(rows) == 64
    for row in rows:
        assert row["linked"] == row["step_trace"] != row["trace_id"]
        assert row["chat"].startswith("chat ")


@pytest.mark.parametrize("loss", [{"type": "ppo_clip"}, {"type": "kl_cov", "cov_ratio": 0.1}], ids=lambda x: x["type"])
def test_workers_and_micro_batches_do_not_change_the_result(project: Project, loss: dict[str, Any]) -> None:
    """One worker and two sample the same rollouts and take the same steps, up to summation order in float32."""
    project.tree["trainer"] |= {"total_steps": 3}
    project.tree["algorithm"] = {"num_epochs": 2, "policy_loss": loss}
    project.train()
    project.train("trainer.num_workers=2", "trainer.micro_batch_tokens=64")
    one, two = (
        project.rows(f"SELECT * FROM train_metrics WHERE run_id = '{run.name}' ORDER BY step") for run in project.runs()
    )
    for a, b in zip(one, two, strict=True):
        assert a["reward_mean"] == pytest.approx(b["reward_mean"], abs=0.05)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
    assert one[0]["reward_mean"] == two[0]["reward_mean"]
    assert one[0]["grad_norm"] == pytest.approx(two[0]["grad_norm"], rel=1e-4)


def test_resume_is_bitwise_and_a_run_repeats(project: Project) -> None:
    """Three steps and a resume equal six steps in one go, weights and metrics bit for bit."""
    project.tree["trainer"] |= {"total_steps": 6}
    project.train()
    project.train("run.name=cut", "trainer.total_steps=3")
    out = project.train("run.name=cut", "--resume")
    assert "attempt 2" in out
    whole, cut = project.run(), project.run("cut")
    assert_same_run(project, whole, cut, 6)
    attempts = project.rows(f"SELECT attempt, resumed_from_step FROM run_starts WHERE run_id = '{cut.name}' ORDER BY 1")
    assert [tuple(row.values()) for row in attempts] == [(1, None), (2, 3)]
    ended = project.rows(f"SELECT status, attempts FROM runs WHERE run_id = '{cut.name}'")
    assert ended == [{"status": "finished", "attempts": 2}]


def assert_same_run(project: Project, one: Path, other: Path, steps: int) -> None:
    """The last checkpoints hold the same tensors, and every metric that is no speed is the same in each step."""
    folders = [run / f"checkpoints/step-{steps:06d}" for run in (one, other)]
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) for folder in folders]
    assert files[0] == files[1]
    for file in files[0]:
        mine, theirs = (load_file(folder / file) for folder in folders)
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine), file
    mine, theirs = (
        project.rows(
            "SELECT step, name, value FROM step_metrics WHERE NOT name LIKE 'perf/%' "
            f"AND run_id = '{run.name}' ORDER BY ALL"
        )
        for run in (one, other)
    )
    assert {row["step"] for row in mine} == set(range(1, steps + 1))
    assert mine == theirs


def assert_complete(project: Project) -> None:
    """Everything links, nothing was dropped, nothing is left open."""
    assert [row for row in project.rows("SELECT * FROM v_linkage") if row["linked"] != row["n"]] == []
    health = project.rows("SELECT dropped, refused, missing FROM health WHERE run_id IS NOT NULL")
    assert health
    assert {tuple(row.values()) for row in health} == {(0, 0, 0)}
    assert project.rows("SELECT * FROM open_spans") == []


VALIDATION = {
    "datasets": [{"source": "reasoning_gym:spell_backward", "size": 4, "name": "words"}],
    "every": 1,
    "n": 4,
    "temperature": 1.0,
}


def test_ppo_resumes_bit_for_bit_with_its_critic_on_two_ranks(project: Project) -> None:
    """Critic, its optimizer, the adapted KL coefficient and the best validation are restored; all of it is recorded."""
    controller = {"type": "adaptive", "target": 0.001, "horizon": 32}
    project.tree["algorithm"] = {"name": "ppo", "num_mini_batches": 2, "kl": {"controller": controller}}
    project.tree["trainer"] |= {"num_workers": 2, "total_steps": 3, "keep_best": True, "keep_checkpoints": 1}
    project.tree["validation"] = VALIDATION
    project.train()
    project.train("run.name=cut", "trainer.total_steps=1")
    project.train("run.name=cut", "--resume")
    whole, cut = project.run(), project.run("cut")
    assert_same_run(project, whole, cut, 3)
    assert_complete(project)
    kinds = {path.name for path in (cut / "checkpoints/step-000003/critic").glob("*.safetensors")}
    assert kinds == {"model.safetensors", "optimizer.safetensors", "value_head.safetensors"}
    coefs = project.rows(
        f"SELECT value FROM step_metrics WHERE run_id = '{cut.name}' AND name = '{names.M_KL_COEF}' ORDER BY step"
    )
    assert len({row["value"] for row in coefs}) == 3
    evals = [
        project.rows(f"SELECT step, value FROM evals WHERE run_id = '{run.name}' AND metric = 'mean@4' ORDER BY step")
        for run in (whole, cut)
    ]
    assert evals[0] == evals[1]
    assert [row["step"] for row in evals[0]] == [0, 1, 2, 3]
    first = max(evals[0], key=lambda row: row["value"])["step"]  # the first of equal ones
    kept = {path.name for path in (whole / "checkpoints").glob("step-*")}
    assert kept == {f"step-{step:06d}" for step in {first, 3}}
    tokens = project.rows("SELECT count(*) AS n, count(value) AS v, count(value_target) AS r FROM tokens WHERE in_loss")
    assert tokens[0]["n"] == tokens[0]["v"] == tokens[0]["r"] > 0
    other = ("run.name=cut", "trainer.total_steps=4", "algorithm.critic.type=shared", "--resume")
    out = project.train(*other, exit_code=1)
    assert "cannot go on with this config" in out
    assert "algorithm.critic.type: " in out


def test_adapters_and_a_shared_critic_need_no_worker_more(project: Project) -> None:
    """The reference is the model without its adapters: no worker of its own, and a KL of 0 in the first step alone."""
    project.tree["model"]["lora"] = {"rank": 4, "alpha": 8}
    project.tree["algorithm"] = {
        "name": "ppo",
        "critic": {"type": "shared"},
        "kl": {"where": "loss", "estimator": "k3"},
    }
    project.tree["trainer"] |= {"total_steps": 2, "learning_rate": 1e-2}
    project.train()
    assert_complete(project)
    checkpoint = project.run() / "checkpoints/step-000002"
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.*")}
    assert {"adapter_model.safetensors", "critic/value_head.safetensors"} < files
    assert "model.safetensors" not in files
    processes = project.rows("SELECT DISTINCT service_name AS name FROM health WHERE run_id IS NOT NULL")
    assert {row["name"] for row in processes} == {f"rlinsight.{role}" for role in ("controller", "policy", "reward")}
    gaps = project.rows(
        "SELECT step, max(abs(ref_log_prob - rollout_log_prob)) AS gap FROM tokens GROUP BY 1 ORDER BY 1"
    )
    assert gaps[0]["gap"] < 1e-4 < gaps[1]["gap"]


PLUGIN = '''
from core_trainer.algorithms.registry import advantage, policy_loss, TokenLoss


@advantage("best_minus_rest")
def best_minus_rest(rewards, groups, greedy_rewards, *, scale: float = 1.0):
    """Against the greedy rollout of the prompt."""
    return scale * (rewards - greedy_rewards)


@policy_loss("plain")
def plain(log_probs, advantages, *, sharpness: float = 1.0):
    """Policy gradient."""
    return TokenLoss(-sharpness * advantages * log_probs, log_probs.detach() * 0 + 1, log_probs > 0)
'''


def test_a_plugin_reaches_the_workers_and_recipes_record_what_they_drop(project: Project) -> None:
    """A user's advantage and loss train with a greedy baseline; a wrong option is refused before a worker starts; dapo
    links everything it sampled; a run of one recipe does not go on with another.
    """
    (project.path / "mine.py").write_text(PLUGIN)
    project.tree["trainer"] |= {"total_steps": 2}
    recipes = {
        "dapo": {"name": "dapo", "num_mini_batches": 2, "shaping": {"dynamic_sampling": {"max_rounds": 2}}},
        "mine": {
            "plugins": ["mine.py"],
            "advantage": {"type": "best_minus_rest", "scale": 0.5},
            "policy_loss": {"type": "plain", "sharpness": 2.0},
        },
    }
    project.tree["algorithm"] = recipes["dapo"]
    project.train()
    rounds = project.rows(
        f"SELECT step, value FROM step_metrics WHERE name = '{names.M_SAMPLING_ROUNDS}' ORDER BY step"
    )
    groups = project.rows("SELECT step, count(DISTINCT group_id) AS n FROM rollouts GROUP BY step ORDER BY step")
    dropped = project.rows("SELECT step, reason FROM dropped_groups")
    for row, sampled in zip(rounds, groups, strict=True):
        lost = sum(group["step"] == row["step"] for group in dropped)
        assert 1 <= row["value"] <= 2
        assert sampled["n"] == 4 if row["value"] == 1 else 4 < sampled["n"] <= 4 + lost
    assert {group["reason"] for group in dropped} <= {"zero_variance"}
    parts = project.rows("SELECT DISTINCT component FROM rewards ORDER BY 1")
    assert [row["component"] for row in parts] == ["overlong", "short_words"]
    assert_complete(project)

    project.tree["algorithm"] = recipes["mine"]
    out = project.train("trainer.total_steps=3", "--resume", exit_code=1)
    assert "cannot go on with this config" in out
    assert "algorithm.shaping.overlong.factor: 1.0 -> None" in out
    project.train("run.name=mine")
    assert_complete(project)
    mine = project.run("mine")
    rows = project.rows(
        f"SELECT r.group_id, r.reward, t.advantage FROM rollouts r JOIN rollout_training t USING (run_id, rollout_id) "
        f"WHERE run_id = '{mine.name}'"
    )
    greedy = project.rows(
        f"SELECT group_id, reward FROM rollout_samples JOIN rollout_scores USING (run_id, rollout_id) "
        f"WHERE split = 'baseline' AND run_id = '{mine.name}'"
    )
    baseline = {row["group_id"].removesuffix("-greedy"): row["reward"] for row in greedy}
    assert len(rows) == 2 * 16
    assert len(baseline) == 2 * 4
    for row in rows:
        assert row["advantage"] == pytest.approx(0.5 * (row["reward"] - baseline[row["group_id"]]), abs=1e-6)
    out = project.train("algorithm.advantage.scale=high", "run.name=bad", exit_code=2)
    assert "scale='high'" in out
    assert not list((project.path / "runs").glob("bad*/checkpoints"))
    out = project.train("algorithm.policy_loss.sharp=1", "run.name=bad", exit_code=2)
    assert "has no option 'sharp'; did you mean 'sharpness'?" in out


def test_a_failed_reward_and_a_killed_worker_end_a_run_in_one_line(project: Project) -> None:
    """A reward that raises in step 4 leaves a checkpoint of step 3; mended, the run goes on from there until the policy
    worker is killed with kill -9. Each time: one error that says what failed, no process left, the run marked failed.
    """
    good = (project.path / "reward.py").read_text()
    bad = good.replace("return", "import pathlib\n    calls = pathlib.Path('calls')\n    return").replace(
        "    return",
        "    calls.write_text((calls.read_text() if calls.exists() else '') + 'x')\n    "
        "if len(calls.read_text()) > 50: raise KeyError('lost')\n    return",
    )
    (project.path / "reward.py").write_text(bad)
    project.tree["reward"]["concurrency"] = 1
    project.tree["trainer"] |= {"total_steps": 500}
    assert_failed(project, project.start(), "error: reward 'short_words'")
    run = project.run()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000003"]

    (project.path / "reward.py").write_text(good)
    process = project.start("--resume")
    _wait_for_step(project, 5)
    (worker,) = [p for p in psutil.process_iter(["cmdline"]) if _is_policy_of(p, project)]
    worker.kill()
    assert_failed(project, process, "error: a policy worker died")
    steps = project.rows("SELECT step, attempt FROM train_metrics ORDER BY step")
    assert [(row["step"], row["attempt"]) for row in steps[:5]] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def assert_failed(project: Project, process: subprocess.Popen[str], error: str) -> None:
    """The command ends with exit code 1 and one line of error that begins so, and leaves nothing running."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1, out + err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert errors[0].startswith(error)
    assert "Traceback" not in out + err
    assert project.processes() == []
    assert project.rows("SELECT status FROM runs") == [{"status": "failed"}]


def _is_policy_of(process: psutil.Process, project: Project) -> bool:
    try:
        named = " ".join(process.cmdline()).startswith("ray::PolicyWorker")
        return named and process.environ().get(MARK) == str(project.path)
    except psutil.Error:
        return False


def test_it_learns(project: Project) -> None:
    """A random model learns to write what is rewarded."""
    project.tree["trainer"] |= {"total_steps": 20, "learning_rate": 5e-3, "prompts_per_step": 8}
    project.train()
    rewards = [row["reward_mean"] for row in project.rows("SELECT reward_mean FROM train_metrics ORDER BY step")]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3, rewards


def test_sql_is_live_and_signals_leave_a_resumable_run(project: Project) -> None:
    """Steps, open spans and processes can be read while the run goes on. One Ctrl-C ends it between updates with exit
    code 130 and a checkpoint, from which --resume goes on; SIGTERM ends that one as gently, with 143.
    """
    project.tree["trainer"] |= {"total_steps": 500}
    process = project.start()
    _wait_for_step(project, 2)
    first = project.rows("SELECT max(step) AS step FROM train_metrics")[0]["step"]
    until = time.monotonic() + 60  # a delivery may fall between two steps, or bring the workers' spans first
    while not project.rows(f"SELECT 1 FROM open_spans WHERE name = '{names.STEP}'"):
        assert time.monotonic() < until
        time.sleep(0.3)
    assert project.rows("SELECT status FROM runs") == [{"status": "running"}]
    _wait_for_step(project, first + 1)
    idle = ("/monitor.py", "/log_monitor.py", "/dashboard/dashboard.py")  # of Ray's, which a run does not need
    commands = project.processes()
    assert [command for command in commands if any(name in command for name in (*idle, "ray::IDLE"))] == []
    os.killpg(process.pid, signal.SIGINT)  # a terminal signals every process of the group, Ray's too
    assert_interrupted(project, process, 130)

    process = project.start("--resume")
    _wait_for_step(project, project.rows("SELECT steps_done FROM runs")[0]["steps_done"] + 1)
    process.send_signal(signal.SIGTERM)
    assert_interrupted(project, process, 143)
    assert project.rows("SELECT attempts FROM runs") == [{"attempts": 2}]
    steps = [row["step"] for row in project.rows("SELECT step FROM train_metrics ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))


def assert_interrupted(project: Project, process: subprocess.Popen[str], exit_code: int) -> None:
    """The command says how to go on; what it did is stored whole, with no process left."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == exit_code, out + err
    assert project.processes() == []
    assert "--resume" in out
    (run,) = project.rows("SELECT status, steps_done FROM runs")
    assert run["status"] == "interrupted"
    assert run["steps_done"] == project.rows("SELECT max(step) AS step FROM train_metrics")[0]["step"]
    assert all(row["linked"] == row["n"] for row in project.rows("SELECT * FROM v_linkage"))


def _wait_for_step(project: Project, step: int, timeout_s: float = 600) -> None:
    from rlinsight.errors import StoreError

    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            found = project.rows("SELECT max(step) AS step FROM train_metrics")[0]["step"]
        except StoreError:
            found = None  # not there yet
        if found is not None and found >= step:
            return
        time.sleep(0.3)
    raise AssertionError(f"step {step} was not stored within {timeout_s} s")
