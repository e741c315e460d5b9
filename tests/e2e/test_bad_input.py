"""What cannot be trained is refused in one line: non-zero exit, no traceback, no process left, nothing overwritten."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from tests.e2e.test_train import COMMAND, Project

PROMPT = {"prompt": "What is 1 + 1?", "answer": "2"}


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    """A fresh folder with a data file of two rows."""
    project = Project(tmp_path, tiny_model)
    (tmp_path / "data.jsonl").write_text(2 * (json.dumps(PROMPT) + "\n"))
    project.tree["data"] = {"train": str(tmp_path / "data.jsonl")}
    project.tree["trainer"] |= {"prompts_per_step": 2, "total_steps": 2}
    return project


def missing_data(project: Project) -> None:
    (project.path / "data.jsonl").unlink()


def empty_data(project: Project) -> None:
    (project.path / "data.jsonl").write_text("")


def long_prompt(project: Project) -> None:
    (project.path / "data.jsonl").write_text(json.dumps(PROMPT) + "\n" + json.dumps(PROMPT | {"prompt": "many " * 500}))
    project.tree["data"]["max_prompt_tokens"] = 100


def no_weights(project: Project) -> None:
    model = project.path / "model"
    shutil.copytree(project.tree["model"]["source"], model)
    (model / "model.safetensors").unlink()
    project.tree["model"]["source"] = str(model)


def missing_model(project: Project) -> None:
    project.tree["model"]["source"] = str(project.path / "nowhere")


def beyond_context(project: Project) -> None:
    project.tree["rollout"]["max_new_tokens"] = 100_000


def last_prompt_beyond_context(project: Project) -> None:
    (project.path / "data.jsonl").write_text(
        json.dumps(PROMPT) + "\n" + json.dumps(PROMPT | {"prompt": "many " * 5000})
    )
    project.tree["data"]["max_prompt_tokens"] = 100_000


def reward_code(body: str) -> Callable[[Project], None]:
    def prepare(project: Project) -> None:
        (project.path / "reward.py").write_text(
            f"import time\ndef short_words(prompt, response, answer):\n    {body}\n"
        )
        project.tree["reward"]["functions"][0]["timeout_s"] = 1.0

    return prepare


def missing_reward(project: Project) -> None:
    project.tree["reward"]["functions"][0]["function"] = "reward.py:nobody"


def unwritable_store(project: Project) -> None:
    (project.path / "file").write_text("")
    project.tree["telemetry"]["store"] = str(project.path / "file" / "store.duckdb")


def newer_store(project: Project) -> None:
    _make_store(project.store)
    with duckdb.connect(str(project.store)) as connection:
        connection.execute("UPDATE schema_meta SET version = 99")


def foreign_store(project: Project) -> None:
    with duckdb.connect(str(project.store)) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 42 AS x")


def corrupt_store(project: Project) -> None:
    project.store.write_bytes(b"not a database" * 1000)


def _make_store(path: Path) -> None:
    from rlinsight import schema

    with duckdb.connect(str(path)) as connection:
        schema.apply(connection, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing_data, "data.jsonl"),
        (empty_data, "data.jsonl"),
        (long_prompt, "max_prompt_tokens"),
        (no_weights, "safetensors"),
        (missing_model, "nowhere"),
        (beyond_context, "max_new_tokens"),
        (last_prompt_beyond_context, "data/1"),
        (missing_reward, "nobody"),
        (reward_code("time.sleep(60)"), "timed out after 1 s"),
        (reward_code("return float('nan')"), "nan"),
        (unwritable_store, "cannot be created"),
        (newer_store, "99"),
        (foreign_store, "store.duckdb"),
        (corrupt_store, "store.duckdb"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_train_refuses_in_one_line(project: Project, spoil: Callable[[Project], None], message: str) -> None:
    """The error names what is wrong; nothing else is printed as an error, and nothing is left running or
    overwritten.
    """
    spoil(project)
    before = project.store.read_bytes() if project.store.is_file() else None
    process = project.start()
    out, err = process.communicate(timeout=600)
    assert process.returncode not in (0, None), out
    errors = [line for line in err.splitlines() if line.strip()]
    assert [line for line in errors if line.startswith("error: ")] == errors, err
    assert len(errors) == 1, err
    assert message in errors[0], errors[0]
    assert not any(sign in out + err for sign in ("Traceback", "ray::", "^^^")), err
    assert project.processes() == []
    if before is not None:
        assert project.store.read_bytes() == before


@pytest.mark.parametrize("command", ["collect", "dashboard"])
def test_a_taken_port_is_named(project: Project, command: str) -> None:
    """A port somebody else listens on is an error that names it."""
    _make_store(project.store)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        option = "--http-port" if command == "collect" else "--port"
        done = subprocess.run(
            [COMMAND, command, "--store", project.store, option, port], text=True, capture_output=True, timeout=60
        )
    assert done.returncode not in (0, None)
    assert port in done.stderr
    assert "Traceback" not in done.stderr
