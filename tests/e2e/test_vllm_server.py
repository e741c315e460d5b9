"""A run's own vLLM servers: real processes, asked and given weights as a run does. Skipped where vLLM is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from core_trainer import attention, lora, models
from core_trainer.rollout import checksum
from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams, Turn
from rlinsight.config import ModelSection, VllmSection
from rlinsight.errors import EngineError
from tests.e2e.test_train import MARK, Project, _wait_for_step
from tests.e2e.test_vllm import SMOLLM2, assert_like_native, assert_trained, change, naive_greedy, questions
from tests.tiny import make_tiny_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run: make test-vllm"),
    pytest.mark.timeout(900),
]

STOP_TOKEN = 7
SKIPPED = "model.layers.1.mlp.up_proj.weight"  # by vllm_workers.py, which needs vLLM
OWNER = """
import sys, time
from pathlib import Path
from core_trainer.rollout.vllm.options import ENVIRONMENT, API_KEY
from core_trainer.rollout.vllm.servers import Address, launch
address = Address("vllm/0", sys.argv[2], "tiny", "key")
server = launch(Path(sys.argv[1]), address, sys.argv[4:], ENVIRONMENT | {API_KEY: "key"}, Path(sys.argv[3]))
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


def options(section: VllmSection, **changes: str) -> list[str]:
    from core_trainer.rollout.vllm.options import command_line, engine_arguments

    return command_line(engine_arguments(section, "float32", 32, 256) | changes)


@contextmanager
def running(directory: Path, folder: Path, threads: int = 1, **changes: str) -> Iterator[Any]:
    """A server of the model there, and its address."""
    from core_trainer.rollout.vllm.options import API_KEY, ENVIRONMENT
    from core_trainer.rollout.vllm.servers import Address, launch, stop, wait_until_healthy
    from core_trainer.workers.worker_group import free_port

    log = folder / "vllm-0.log"
    address = Address("vllm/0", f"http://127.0.0.1:{free_port()}", "tiny", "a-random-key")
    environment = ENVIRONMENT | {
        API_KEY: address.api_key,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(Path(__file__).parents[2]),  # for a worker of these tests
    }
    process = launch(directory, address, options(VllmSection(kv_cache_gib=0.25), **changes), environment, log)
    try:
        wait_until_healthy(process, address, log)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        yield address
    finally:
        stop(process)
    _, alive = psutil.wait_procs(family, timeout=20)  # killed children are reaped by others
    assert not alive


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of the tiny model."""
    worker = "tests.e2e.vllm_workers.HoldingWorker"
    with running(directory, tmp_path_factory.mktemp("servers"), worker_extension_cls=worker) as address:
        yield address


@pytest.fixture
def engine(server: Any, directory: Path) -> Iterator[Any]:
    """The engine over it and a fresh model, synced at version 0."""
    engine = connect(server, directory)
    yield engine
    engine.close()


def connect(server: Any, directory: Path) -> Any:
    """An engine over the server and a fresh model, synced at version 0."""
    from core_trainer.rollout.vllm.client import SharedMemory, VllmServerEngine

    model = models.load_model(directory, torch.float32)
    attention.enable(model)
    tokenizer = models.load_tokenizer(directory)
    params = SamplingParams(16, 0.7, top_p=0.9)
    engine = VllmServerEngine(server, SharedMemory(model), model, tokenizer, (STOP_TOKEN,), 200, params)
    engine.sync_weights(0)
    return engine


def generate(engine: Any, requests: Sequence[GenerateRequest]) -> list[Turn]:
    """All requests at once."""

    async def run() -> list[Turn]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, 500, rng.integers(1, 81)).tolist()) for _ in range(count)]


def test_only_who_has_the_key_is_answered(server: Any) -> None:
    """No path but /metrics works without it, least of all those that run code or change weights."""
    rpc = {"method": "rlinsight_start"}
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": server.api_key}):
            assert client.post("/collective_rpc", json=rpc, headers=wrong).status_code == 401
            for path in ("/v1/models", "/health", "/nothing", "/docs"):
                assert client.get(path, headers=wrong).status_code == 401
        right = {"authorization": f"Bearer {server.api_key}"}
        assert client.post("/collective_rpc", json=rpc, headers=right).json() == {"results": [None]}
        assert "vllm:num_requests_running" in client.get("/metrics").text
    (connection,) = {
        each.laddr.ip for each in psutil.net_connections("tcp") if each.laddr.port == httpx.URL(server.url).port
    }
    assert connection == "127.0.0.1"


def test_it_serves_each_version_of_the_weights(engine: Any) -> None:
    """Greedy tokens are those of the native engine on the same weights, before and after syncs; checksums agree."""
    asked = [GenerateRequest(f"r{i}", p, SamplingParams(12, 0.0)) for i, p in enumerate(prompts(8))]
    written = []
    for version, scale in enumerate((1.0, -0.7, 1.3), start=1):
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(scale)
        (synced,) = engine.sync_weights(version)
        assert synced.replica == "vllm/0"
        assert synced.moved == sum(parameter.nbytes for parameter in engine.model.parameters())
        assert synced.checksum_served == checksum.of(lora.merged_state(engine.model).items())
        twin = NativeEngine(engine.model, engine.tokenizer, (STOP_TOKEN,), 64)
        twin.sync_weights(version)
        mine, theirs = generate(engine, asked), generate(twin, asked)
        for a, b in zip(mine, theirs, strict=True):
            assert (a.token_ids, a.finish_reason, a.policy_version) == (b.token_ids, b.finish_reason, version)
            np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
        written.append([turn.token_ids for turn in mine])
    assert written[0] != written[1] != written[2]


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_weights_change_under_requests_in_flight(
    engine: Any, mode: PauseMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wait samples them to their end first, abort ends them, keep goes on from there as if the new weights had written
    what the old ones did; each token says whose it is. The server waits with token 20 until it was told.
    """
    from core_trainer.rollout.vllm.client import rpc

    engine.stop_token_ids = ()
    request = GenerateRequest("r", prompts(1)[0], SamplingParams(100, 0.0))
    (untouched,) = generate(engine, [request])

    call, released = engine.server.call, tmp_path / "released"

    def release_after(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "/pause":  # which is answered once the server goes on
            threading.Timer(1, released.touch).start()
        return call(method, path, *args, **kwargs)

    rpc(engine.server, "hold", 20, str(released))
    monkeypatch.setattr(engine.server, "call", release_after)

    async def run() -> tuple[Turn, Any]:
        task = asyncio.create_task(engine.generate(request))
        while "r" not in engine._answers or len(engine._answers["r"].token_ids) < 10:
            await asyncio.sleep(0.001)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(-0.7)
        (synced,) = await asyncio.to_thread(engine.sync_weights, 1, mode)
        return await task, synced

    turn, synced = asyncio.run(run())
    assert (synced.pause_mode, synced.in_flight, synced.aborted) == (mode, 1, int(mode == "abort"))
    done = turn.policy_versions.count(0) if mode == "keep" else len(turn.token_ids)
    assert turn.token_ids[:done] == untouched.token_ids[:done]
    assert turn.policy_version == 0
    if mode == "keep":
        assert 10 <= done < 100
        assert turn.token_policy_versions == [0] * done + [1] * (100 - done)
        continued = naive_greedy(engine.model, [*request.prompt_token_ids, *turn.token_ids[:done]], 100 - done)
        assert turn.token_ids[done:] == continued != untouched.token_ids[done:]
    else:
        assert turn.token_policy_versions is None
        assert (turn.finish_reason, done < 100) == (("abort", True) if mode == "abort" else ("length", False))
    (later,) = generate(engine, [request])
    assert later.token_ids == naive_greedy(engine.model, request.prompt_token_ids, 100)
    assert (later.policy_version, later.token_policy_versions) == (1, None)


def test_a_server_that_skips_one_layer_is_caught(directory: Path, tmp_path: Path) -> None:
    """By its checksum where no log-prob tells yet, and by its log-probs; its packed layer is what it computes with."""
    worker = "tests.e2e.vllm_workers.SkippingWorker"
    with running(directory, tmp_path, worker_extension_cls=worker) as server:
        engine = connect(server, directory)
        layer = engine.model.get_parameter(SKIPPED)
        for version, factor in enumerate((1.0, 1 + 1e-6), start=1):
            with torch.no_grad():
                layer.mul_(factor)
            (synced,) = engine.sync_weights(version)
            same = synced.checksum_served == checksum.of(lora.merged_state(engine.model).items())
            assert same == (factor == 1)
        with torch.no_grad():
            layer.mul_(-1)
        with pytest.raises(EngineError, match="did not take the weights of policy_version=3: log-probs differ"):
            engine.sync_weights(3)
        engine.close()


@pytest.mark.slow
def test_the_real_model_is_sampled_as_the_native_engine_does(tmp_path: Path) -> None:
    """SmolLM2 in float32: greedy tokens before and after a sync of changed weights, log-probs the trainer's."""
    source = models.resolve(ModelSection(source=SMOLLM2))
    with running(source, tmp_path, threads=2) as server:
        engine = connect(server, source)
        asked = [
            GenerateRequest(f"r{i}", p, SamplingParams(32, 0.0, num_top_log_probs=2))
            for i, p in enumerate(questions(engine.tokenizer, 6))
        ]
        for version in (0, 1):
            if version:
                before = generate(engine, asked)
                change(engine.model)
                (synced,) = engine.sync_weights(version)
                assert synced.checksum_served == checksum.of(lora.merged_state(engine.model).items())
                assert [turn.token_ids for turn in before] != [turn.token_ids for turn in generate(engine, asked)]
            twin = NativeEngine(engine.model, engine.tokenizer, (STOP_TOKEN,), 64)
            twin.sync_weights(version)
            assert_like_native(generate(engine, asked), generate(twin, asked))
        sampled = generate(engine, [replace(r, params=SamplingParams(24, 0.8, seed=i)) for i, r in enumerate(asked)])
        assert_trained(engine.model, sampled, 0.8)
        engine.close()


def test_log_probs_are_of_the_whole_vocabulary(engine: Any) -> None:
    """As in the process: at the temperature, before penalties and truncation, which shape what is sampled alone."""
    params = SamplingParams(16, 0.7, top_p=0.5, top_k=20, repetition_penalty=1.3, seed=3, num_top_log_probs=3)
    (turn,) = generate(engine, [GenerateRequest("r", prompts(1)[0], params)])
    reference = models.load_model(Path(engine.model.name_or_path), torch.float32, attn_implementation="sdpa")
    ids = torch.tensor([[*turn.prompt_token_ids, *turn.token_ids]])
    with torch.no_grad():
        logits = reference(input_ids=ids).logits[0, len(turn.prompt_token_ids) - 1 : -1].float() / 0.7
    log_probs = logits.log_softmax(-1)
    expected = log_probs[torch.arange(len(turn.token_ids)), turn.token_ids]
    np.testing.assert_allclose(turn.rollout_log_probs, expected, atol=1e-4)
    assert turn.top_log_probs is not None
    assert [[token for token, _ in row] for row in turn.top_log_probs] == log_probs.topk(3).indices.tolist()


def test_a_stream_comes_in_pieces_and_can_be_left(engine: Any) -> None:
    """Chunks add up to the turn of the last; one that is left ends at the server too, which then has nothing to do."""
    request = GenerateRequest("r", prompts(2)[1], SamplingParams(40, 0.0))

    async def read(limit: int) -> list[Chunk]:
        found: list[Chunk] = []
        async with aclosing(engine.stream(request)) as chunks:
            async for chunk in chunks:
                found.append(chunk)
                if len(found) == limit:
                    break
        return found

    assert len(asyncio.run(read(2))) == 2
    chunks = asyncio.run(read(1000))
    turn = chunks[-1].turn
    assert turn is not None
    assert [token for chunk in chunks for token in chunk.token_ids] == turn.token_ids
    assert len(chunks) > 5
    with httpx.Client(base_url=engine.server.url, trust_env=False) as client:
        text = client.get("/metrics").text
    running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    assert running
    assert all(float(line.rpartition(" ")[2]) == 0 for line in running), running


def test_a_server_that_cannot_start_tells_why(directory: Path, tmp_path: Path) -> None:
    """The error names the cause and the log, at once and not after the time limit."""
    from core_trainer.rollout.vllm.options import API_KEY, ENVIRONMENT
    from core_trainer.rollout.vllm.servers import Address, launch, wait_until_healthy
    from core_trainer.workers.worker_group import free_port

    address, log = Address("vllm/0", f"http://127.0.0.1:{free_port()}", "tiny", "key"), tmp_path / "vllm-0.log"
    process = launch(tmp_path / "missing", address, options(VllmSection()), ENVIRONMENT | {API_KEY: "key"}, log)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"vLLM server vllm/0 ended with exit code 1 while it started: .*vllm-0.log"):
        wait_until_healthy(process, address, log)
    assert time.monotonic() - began < 200


def test_a_killed_owner_takes_its_server_along(directory: Path, tmp_path: Path) -> None:
    """kill -9 of the process that started it: server and engine end by themselves."""
    from core_trainer.workers.worker_group import free_port

    arguments = [str(directory), f"http://127.0.0.1:{free_port()}", str(tmp_path / "log"), *options(VllmSection())]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    try:
        deadline = time.monotonic() + 600
        while not (family := [server, *server.children(recursive=True)])[1:]:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.5)
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 60
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def trained(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Three steps of `rlinsight train` on two replicas."""
    project = Project(tmp_path_factory.mktemp("train"), directory)
    project.tree["rollout"] |= {
        "engine": "vllm_server",
        "temperature": 0.8,
        "vllm": {"kv_cache_gib": 0.25, "replicas": 2},
    }
    project.tree["data"]["max_prompt_tokens"] = 128
    project.tree["trainer"] |= {"total_steps": 3}
    process = project.start()
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, f"{out}\n{err}"
    assert project.processes() == []
    return project


def test_train_on_servers(trained: Project) -> None:
    """Everything links; both replicas serve, take every version, and have the trainer's bits; the policy learns."""
    for row in trained.rows("SELECT * FROM v_linkage"):
        assert row["n"] > 0, row
        assert row["linked"] == row["n"], row
    metrics = trained.rows("SELECT step, rollout_kl, weights_changed FROM train_metrics ORDER BY step")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(abs(row["rollout_kl"]) < 1e-5 and row["weights_changed"] > 0.5 for row in metrics), metrics
    syncs = trained.rows(
        "SELECT policy_version, replica, checksum_trained, checksum_served FROM weight_syncs ORDER BY ALL"
    )
    assert [(row["policy_version"], row["replica"]) for row in syncs] == [
        (version, f"vllm/{i}") for version in range(4) for i in range(2)
    ]
    assert all(row["checksum_served"] == row["checksum_trained"] for row in syncs), syncs
    assert trained.rows("SELECT DISTINCT engine, replica FROM turns ORDER BY ALL") == [
        {"engine": "vllm_server", "replica": f"vllm/{i}"} for i in range(2)
    ]
    assert sorted(path.name for path in (trained.runs()[0] / "servers").iterdir()) == ["vllm-0.log", "vllm-1.log"]


def test_servers_tell_of_each_request(trained: Project) -> None:
    """A turn has two spans of its request as children, ours and vLLM's own, with the engine's times."""
    (row,) = trained.rows("SELECT count(*) AS n, count(queue_s) AS q, count(num_preemptions) AS p FROM turn_requests")
    assert row["n"] == row["q"] == row["p"] == 3 * 16
    spans = trained.rows(
        "SELECT o.name, count(*) AS n, count(DISTINCT t.span_id) AS turns FROM otel_spans o "
        "JOIN turns t ON t.trace_id = o.trace_id AND t.span_id = o.parent_span_id "
        "WHERE o.run_id = t.run_id GROUP BY o.name ORDER BY 1"
    )
    assert spans == [{"name": name, "n": 48, "turns": 48} for name in ("llm_request", "rl.engine.request")]
    rows = trained.rows("SELECT * FROM serving_requests WHERE engine = 'vllm_server' AND rollout_id IS NOT NULL")
    assert len(rows) == 48  # all but the probes of log-probs after each sync
    assert all(row["ttft_s"] > 0 and row["e2e_s"] >= row["decode_s"] for row in rows)
    assert all(row["policy_version"] in range(3) for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def test_servers_tell_of_themselves(trained: Project) -> None:
    """Engine samples of each replica add up to the tokens of the turns; their own metrics are scraped."""
    rows = trained.rows(
        "SELECT replica, max(generation_tokens) AS sampled, max(running) AS running, max(kv_usage) AS kv "
        "FROM engine_samples WHERE engine = 'vllm_server' GROUP BY replica ORDER BY replica"
    )
    assert [row["replica"] for row in rows] == ["vllm/0", "vllm/1"]
    assert all(row["running"] > 0 and 0 < row["kv"] <= 1 for row in rows), rows
    turns = trained.rows("SELECT replica, sum(output_tokens) AS sampled FROM turns GROUP BY replica ORDER BY replica")
    for row, turn in zip(rows, turns, strict=True):
        assert row["sampled"] >= turn["sampled"]  # and those of the probes after each sync
    scraped = trained.rows(
        "SELECT service_name, max(value) AS value FROM otel_metrics WHERE name = 'vllm:generation_tokens_total' "
        "GROUP BY service_name ORDER BY 1"
    )
    assert [row["service_name"] for row in scraped] == ["vllm-0", "vllm-1"]


def test_a_server_that_is_killed_costs_the_run_nothing(directory: Path, tmp_path: Path) -> None:
    """kill -9 of one of two after the first step: the other goes on, an alert says so, every turn has its request."""
    from core_trainer.rollout.vllm.options import REPLICA

    project = Project(tmp_path, directory)
    project.tree["rollout"] |= {"engine": "vllm_server", "vllm": {"kv_cache_gib": 0.25, "replicas": 2}}
    project.tree["data"]["max_prompt_tokens"] = 128
    project.tree["trainer"] |= {"total_steps": 40}  # more than a fast machine makes until the first is seen
    process = project.start()
    _wait_for_step(project, 1)
    killed = [
        each.pid
        for each in psutil.process_iter(["environ", "cmdline"])
        if (each.info["environ"] or {}).get(MARK) == str(tmp_path)
        and each.info["environ"].get(REPLICA) == "vllm/0"
        and "core_trainer.rollout.vllm.serve" in (each.info["cmdline"] or [])
    ]
    os.killpg(os.getpgid(killed[0]), signal.SIGKILL)
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, f"{out}\n{err}"
    assert project.processes() == []
    for row in project.rows("SELECT * FROM v_linkage"):
        assert row["n"] > 0, row
        assert row["linked"] == row["n"], row
    (alert,) = project.rows("SELECT step, message FROM alerts WHERE rule = 'lost_replica'")
    assert "replica vllm/0 did not take the weights" in alert["message"]
    assert project.rows("SELECT steps_done FROM runs") == [{"steps_done": 40}]
    turns = project.rows("SELECT replica, max(step) AS last FROM turns GROUP BY replica ORDER BY replica")
    assert turns[0]["last"] <= alert["step"] < turns[1]["last"] == 40, turns
