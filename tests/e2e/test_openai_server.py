"""`rlinsight train` on servers over HTTP: scripted ones that fail, and a real vLLM server where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from core_trainer import attention, models
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.router import Router
from core_trainer.types import SamplingParams, Turn
from core_trainer.workers.worker_group import free_port
from rlinsight import config
from tests.core_trainer.scripted_server import Fault, ScriptedServer
from tests.core_trainer.test_openai_engine import trained as trained_log_probs
from tests.e2e.test_train import Project
from tests.tiny import make_tiny_model

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run: make test-vllm"
)


def test_train_on_servers_one_of_which_fails(tmp_path: Path, tiny_model: Path) -> None:
    """Requests that fail are made on the other server and recorded; everything links, nothing stale is learned from."""
    project = Project(tmp_path, tiny_model)
    first, second = ScriptedServer(tiny_model), ScriptedServer(tiny_model)
    with first.running(), second.running():
        servers = {"urls": [first.url, second.url]}
        project.tree["rollout"] |= {"engine": "openai", "temperature": 0.8, "openai": servers, "retries": 2}
        project.tree["data"]["max_prompt_tokens"] = 128
        project.tree["trainer"] |= {"total_steps": 3}
        first.script = [None] * 2 + [Fault(drop_after=2), Fault(status=500), Fault(first_log_prob=None)]
        project.train()
    assert project.processes() == []
    for row in project.rows("SELECT * FROM v_linkage"):
        assert row["n"] > 0, row
        assert row["linked"] == row["n"], row
    metrics = project.rows("SELECT step, rollout_kl, weights_changed FROM train_metrics ORDER BY step")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(abs(row["rollout_kl"]) < 1e-5 and row["weights_changed"] > 0.5 for row in metrics), metrics
    names = {server.url.removeprefix("http://") for server in (first, second)}
    assert {row["replica"] for row in project.rows("SELECT DISTINCT replica FROM turns")} == names
    syncs = project.rows("SELECT DISTINCT replica, policy_version, bytes > 100_000 AS moved FROM weight_syncs")
    assert {(row["replica"], row["policy_version"]) for row in syncs} >= {(name, v) for name in names for v in range(4)}
    assert all(row["moved"] for row in syncs), syncs
    served = project.rows("SELECT status_code, count(*) AS n FROM serving_requests GROUP BY ALL ORDER BY ALL")
    assert sum(row["n"] for row in served) == 3 * 16 + 3, served
    times = project.rows("SELECT count(*) AS n FROM serving_requests WHERE ttft_s > 0 AND e2e_s > ttft_s")
    assert times[0]["n"] == 3 * 16


@pytest.fixture(scope="module")
def large_headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's CPU attention wants heads of 32 or more; its reload misses tied output layers on CPUs."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, tie_embeddings=False)


@pytest.fixture(scope="module")
def vllm_server(large_headed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `vllm serve` as docs/servers.md starts it."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(large_headed)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details", "--enforce-eager"]
    command += ["--served-model-name", "policy", "--block-size", "32", "--generation-config", "vllm"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the trainer needs the cores too
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def connect(url: str, model: Path, **rollout: Any) -> tuple[Router, Any]:
    """Engine and policy, whose weights the server has."""
    policy = models.load_model(model, torch.float32)
    attention.enable(policy)
    tree = {"engine": "openai", "openai": {"urls": [url]}, "max_new_tokens": 64, "temperature": 0.7} | rollout
    data = config.DataSection(train="d.jsonl", max_prompt_tokens=64)
    engine = build_engine(config.RolloutSection.model_validate(tree), data, policy, models.load_tokenizer(model), model)
    assert isinstance(engine, Router)
    engine.sync_weights(0)
    return engine, policy


def generate(engine: Router, requests: list[GenerateRequest]) -> list[Turn]:
    async def run() -> list[Turn]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


@needs_vllm
@pytest.mark.timeout(1200)  # with the server's start
def test_a_vllm_server_samples_what_the_policy_says(vllm_server: str, large_headed: Path) -> None:
    """Log-probs are the trainer's before and after a sync, seeds decide, cached tokens count, aborts are heeded."""
    engine, policy = connect(vllm_server, large_headed)
    prompt = tuple(range(3, 60))
    asked = [GenerateRequest(f"r{i}", prompt, SamplingParams(12, 0.7, seed=i)) for i in range(8)]
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.2)
            engine.sync_weights(version)
        turns = generate(engine, asked)
        for turn in turns:
            np.testing.assert_allclose(turn.rollout_log_probs, trained_log_probs(policy, turn, 0.7), atol=1e-4)
            assert turn.policy_version == version
        assert len({tuple(turn.token_ids) for turn in turns}) == 8
        again = generate(engine, asked)
        assert [turn.token_ids for turn in again] == [turn.token_ids for turn in turns]
        assert {turn.num_cached_tokens for turn in again} == {32}
    (top,) = generate(engine, [GenerateRequest("top", prompt, SamplingParams(4, 0.0, num_top_log_probs=3))])
    assert top.top_log_probs is not None
    assert [pairs[0][0] for pairs in top.top_log_probs] == top.token_ids
    assert all(len(pairs) == 3 for pairs in top.top_log_probs)

    async def abort() -> Turn:
        endless = SamplingParams(400, 1.0, logit_bias={policy.config.eos_token_id: -100.0})
        task = asyncio.create_task(engine.generate(GenerateRequest("long", prompt, endless)))
        while not engine._at:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        engine.abort("long")
        return await task

    aborted = asyncio.run(abort())
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) < 400
    engine.close()


@needs_vllm
@pytest.mark.timeout(1200)  # with the server's start
def test_train_on_a_vllm_server(vllm_server: str, large_headed: Path, tmp_path: Path) -> None:
    """A whole run on a server that was there before it and is there after."""
    project = Project(tmp_path, large_headed)
    project.tree["rollout"] |= {"engine": "openai", "temperature": 0.8, "openai": {"urls": [vllm_server]}}
    project.tree["data"]["max_prompt_tokens"] = 128
    project.tree["trainer"] |= {"total_steps": 3}
    process = project.start()
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    for row in project.rows("SELECT * FROM v_linkage"):
        assert row["n"] > 0, row
        assert row["linked"] == row["n"], row
    metrics = project.rows("SELECT step, rollout_kl, weights_changed FROM train_metrics ORDER BY step")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(abs(row["rollout_kl"]) < 1e-5 and row["weights_changed"] > 0.5 for row in metrics), metrics
    assert httpx.get(f"{vllm_server}/health", timeout=5, trust_env=False).is_success
