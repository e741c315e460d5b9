"""What a worker holds may fail to close; what the worker recorded is delivered all the same."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core_trainer.job import Job
from core_trainer.rollout.vllm import servers
from core_trainer.workers import base
from core_trainer.workers.base import Place
from core_trainer.workers.policy import PolicyWorker
from core_trainer.workers.reward import RewardWorker
from rlinsight import config, telemetry

TREE = {"data": {"train": "d.jsonl"}, "reward": {"functions": [{"type": "numeric"}]}}


class Stuck:
    """An engine, or a scorer, that does not close."""

    def close(self) -> None:
        raise OSError("it is gone already")


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for each time that a worker has telemetry deliver."""
    told: list[bool] = []
    shutdown = telemetry.shutdown

    class Base:  # what the workers' base sees of it
        setup = staticmethod(telemetry.setup)

        @staticmethod
        def shutdown() -> bool:
            told.append(shutdown(0))
            return told[-1]

    monkeypatch.setattr(base, "telemetry", Base)
    return told


def place(folder: Path, model: Path, **sections: Any) -> tuple[Place, Job, config.Config, dict[str, str]]:
    """Arguments of a worker."""
    job = Job(run_id="r", attempt=1, run_dir=folder, spool_dir=folder / "spool", collector=None)
    return Place("worker", 0, 1), job, config.parse({"model": {"source": str(model)}, **TREE, **sections}), {}


def test_an_engine_that_does_not_close(tmp_path: Path, tiny_model: Path, delivered: list[bool]) -> None:
    """The policy worker says so, after it has delivered."""
    worker = PolicyWorker(*place(tmp_path, tiny_model))
    worker.hybrid = Stuck()  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone already"):
        worker.close()
    assert len(delivered) == 1


def test_verifiers_that_do_not_close(tmp_path: Path, tiny_model: Path, delivered: list[bool]) -> None:
    """Likewise the reward worker."""
    worker = RewardWorker(*place(tmp_path, tiny_model))
    worker.scorer = Stuck()  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone already"):
        worker.close()
    assert len(delivered) == 1


def test_a_server_ends_whatever_its_scraper_does(
    tmp_path: Path, tiny_model: Path, delivered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scraper fails at its end: the process is gone nevertheless, and the worker has delivered."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(*_: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return started[-1]

    @contextmanager
    def scraped(*_: Any) -> Iterator[None]:
        yield
        raise OSError("it is gone already")

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "wait_until_healthy", lambda *_: None)
    monkeypatch.setattr(servers.scraping, "scraped", scraped)
    worker = servers.VllmServerWorker(*place(tmp_path, tiny_model, rollout={"engine": "vllm_server"}))
    worker.start(tiny_model)
    assert started[0].poll() is None
    with pytest.raises(OSError, match="gone already"):
        worker.close()
    assert started[0].returncode is not None
    assert len(delivered) == 1
