"""What a run's vLLM servers are started with, and that the GPUs suffice for them. Needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core_trainer.cluster import check_gpus
from core_trainer.job import Job
from core_trainer.rollout.vllm import servers
from core_trainer.rollout.vllm.servers import Address, VllmServerWorker
from core_trainer.workers.base import Place
from rlinsight import config
from rlinsight.errors import EngineError

ADDRESS = Address("vllm/0", "http://127.0.0.1:1234", "tiny", "key")


def settings(workers: int = 1, **rollout: Any) -> config.Config:
    return config.parse(
        {
            "model": {"source": "some-owner/some-model"},
            "data": {"train": "reasoning_gym:chain_sum"},
            "reward": {"functions": [{"type": "numeric"}]},
            "rollout": rollout,
            "trainer": {"num_workers": workers},
        }
    )


def test_a_server_takes_no_modules_from_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People train in folders with files of any name, such as queue.py."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    servers.launch(tmp_path, ADDRESS, [], {}, tmp_path / "logs" / "log")
    (command,) = commands
    interpreter = command[: command.index("-m")]
    (tmp_path / "queue.py").write_text("raise SystemExit('taken')")
    monkeypatch.undo()
    subprocess.run([*interpreter, "-c", "import queue"], cwd=tmp_path, check=True)
    assert interpreter[0] == sys.executable


@pytest.mark.parametrize(
    ("validation", "expected"), [({}, 64), ({"max_new_tokens": 32}, 64), ({"max_new_tokens": 512}, 512)]
)
def test_the_longest_response_is_training_s_or_validation_s(validation: dict[str, int], expected: int) -> None:
    """An engine must hold both."""
    tree = settings(max_new_tokens=64).model_dump(mode="json")
    datasets = {"datasets": [{"source": "reasoning_gym:chain_sum"}]}
    assert config.parse(tree).longest_response == 64
    assert config.parse(tree | {"validation": datasets | validation}).longest_response == expected


@pytest.mark.parametrize(("chosen", "expected"), [(None, None), ("", "rlinsight"), ("theirs", "theirs,rlinsight")])
def test_our_stat_logger_is_loaded_whatever_plugins_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str | None
) -> None:
    """vLLM loads all plugins, or those of VLLM_PLUGINS alone."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    worker = VllmServerWorker.__new__(VllmServerWorker)
    worker.config, worker.resource = settings(engine="vllm_server"), {}
    worker.place = Place("vllm", 0, 1)
    worker.job = Job("r", 1, tmp_path, tmp_path, None)
    assert worker._environment(ADDRESS).get("VLLM_PLUGINS") == expected


@pytest.mark.parametrize(
    ("run", "there", "message"),
    [
        (settings(), 1, None),
        (settings(2), 1, "2 policy workers with one GPU each need 2, there are 1; lower trainer.num_workers"),
        (settings(engine="vllm_server"), 2, None),
        (
            settings(engine="vllm_server"),
            1,
            "1 policy workers with one GPU each and 1 vLLM servers with 1 each need 2, there are 1; lower rollout.vllm",
        ),
        (settings(engine="vllm_server", vllm={"replicas": 2, "tensor_parallel_size": 2}), 4, "need 5, there are 4"),
    ],
)
def test_a_run_that_would_wait_for_gpus_is_refused(run: config.Config, there: int, message: str | None) -> None:
    """Ray waits without a word for those that never come."""
    if message is None:
        check_gpus(run, there)
        return
    with pytest.raises(EngineError, match=message):
        check_gpus(run, there)
