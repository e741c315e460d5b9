"""vLLM servers of a run: started with it on this machine, one process a replica.

A server listens on loopback and answers only who has its random key. Its log is in the run's folder, under ``servers``.
Does not own how requests and weights reach it (client.py) nor which replica gets a request (router.py).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from core_trainer import models
from core_trainer.job import Job
from core_trainer.rollout.vllm.options import (
    API_KEY,
    ENVIRONMENT,
    OWNER,
    PLUGIN,
    REPLICA,
    STOP_TIMEOUT_S,
    TELEMETRY,
    check_platform,
    command_line,
    engine_arguments,
)
from core_trainer.workers.base import Place, Worker
from core_trainer.workers.worker_group import free_port
from rlinsight import names, scraping, telemetry
from rlinsight.config import Config
from rlinsight.config.telemetry import ScrapeTarget
from rlinsight.errors import EngineError

START_TIMEOUT_S = 900.0  # large models load for minutes
POLL_S = 0.25
LAST_WORDS = 2000  # bytes of the log in which to look for what went wrong


@dataclass(frozen=True, slots=True)
class Address:
    """A running server, as its clients reach it."""

    replica: str  # its name in telemetry
    url: str
    model: str
    api_key: str = field(repr=False)


class VllmServerWorker(Worker):
    """Ray actor that owns one server, so that Ray places it; its rank is the replica's number."""

    def __init__(self, place: Place, job: Job, config: Config, resource: dict[str, str]) -> None:
        super().__init__(place, job, config.telemetry, resource)
        self.job, self.config, self.resource = job, config, resource
        self._ends = ExitStack()  # what runs, to be ended; the last one first

    def start(self, model_dir: Path) -> Address:
        """Start the server and wait until it serves. Raises EngineError with its last words when it ends first."""
        config, replica = self.config, self.place.lane
        check_platform(config.rollout.vllm)
        address = Address(replica, f"http://127.0.0.1:{free_port()}", config.model.source, secrets.token_urlsafe(32))
        dtype = str(models.compute_dtype(config.model.compute_dtype)).removeprefix("torch.")
        length = config.data.max_prompt_tokens + config.longest_response
        length = min(length, models.context_length(model_dir) or length)
        arguments = engine_arguments(config.rollout.vllm, dtype, config.rollout.max_batch_size, length)
        if config.telemetry.enabled and self.job.collector is not None:  # with an address, vLLM makes a span a request
            arguments["otlp_traces_endpoint"] = f"{self.job.collector}/v1/traces"
        log = self.job.run_dir / "servers" / f"{replica.replace('/', '-')}.log"
        with telemetry.span(names.START_SERVER, {names.REPLICA: replica, names.PATH: str(log)}):
            process = launch(model_dir, address, command_line(arguments), self._environment(address), log)
            self._ends.callback(stop, process)
            wait_until_healthy(process, address, log)
        if config.telemetry.enabled:
            target = ScrapeTarget(url=f"{address.url}/metrics", name=log.stem, labels={str(names.REPLICA): replica})
            section = config.telemetry.model_copy(update={"scrape": [target]})
            self._ends.enter_context(scraping.scraped(section, self.job.run_id, self.job.attempt))
        return address

    def close(self) -> bool:
        """End the server and everything it started."""
        try:
            self._ends.close()
        finally:
            delivered = super().close()
        return delivered

    def _environment(self, address: Address) -> dict[str, str]:
        threads = max(1, len(os.sched_getaffinity(0)) // self.place.world_size)
        environment = ENVIRONMENT | {
            API_KEY: address.api_key,
            REPLICA: address.replica,
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and replicas take turns on the same cores
            # In ms. What a killed server has not sent of its requests is lost.
            "OTEL_BSP_SCHEDULE_DELAY": os.environ.get("OTEL_BSP_SCHEDULE_DELAY", "1000"),
        }
        job, section = self.job, self.config.telemetry
        if not section.enabled:
            return environment
        if "VLLM_PLUGINS" in os.environ:  # the user's choice of plugins, which leaves out our stat logger
            environment["VLLM_PLUGINS"] = ",".join(filter(None, [os.environ["VLLM_PLUGINS"], PLUGIN]))
        if job.collector is not None:
            environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
            if job.token is not None:
                environment["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"authorization=Bearer%20{job.token}"
        environment[TELEMETRY] = json.dumps(
            {
                "spool_dir": str(job.spool_dir),
                "run_id": job.run_id,
                "attempt": job.attempt,
                "endpoint": job.collector,
                "token": job.token,
                "store": str(job.store) if job.store else None,
                "rank": self.place.rank,
                "world_size": self.place.world_size,
                "text": section.text,
                "spool_bytes": section.spool_bytes,
                "metrics_interval_s": section.metrics_interval_s,
                "system": section.system_metrics,
                "resource": self.resource,
            }
        )
        return environment


def launch(
    model_dir: Path, address: Address, options: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a server's process; what it writes goes to the end of ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "core_trainer.rollout.vllm.serve", "--model", str(model_dir)]
    command += ["--served-model-name", address.model, "--host", "127.0.0.1"]
    command += ["--port", str(httpx.URL(address.url).port), "--disable-uvicorn-access-log"]
    command += ["--enable-prompt-tokens-details"]  # cached tokens
    command += ["--middleware", "core_trainer.rollout.vllm.serve.RequireKey"]
    own = {OWNER: str(os.getpid()), "VLLM_SERVER_DEV_MODE": "1"}  # a mode with endpoints that change weights
    with log.open("ab") as output:
        return subprocess.Popen(
            command + options,
            env=os.environ | own | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group, so that what it starts ends with it
        )


def wait_until_healthy(process: subprocess.Popen[bytes], address: Address, log: Path) -> None:
    """Until the server serves. Raises EngineError when it has ended, or after START_TIMEOUT_S."""
    deadline = time.monotonic() + START_TIMEOUT_S
    headers = {"authorization": f"Bearer {address.api_key}"}
    with httpx.Client(headers=headers, trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EngineError(
                    f"vLLM server {address.replica} ended with exit code {process.returncode} while it started: "
                    f"{_last_words(log)}; its log is {log}"
                )
            with suppress(httpx.HTTPError):
                if client.get(f"{address.url}/health", timeout=5).is_success:
                    return
            time.sleep(POLL_S)
    stop(process)
    raise EngineError(f"vLLM server {address.replica} did not serve within {START_TIMEOUT_S:g} s; its log is {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it started; returns when they are gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):  # it is gone, but not always its engine
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    """The last line of a log that names an error, else its last line."""
    text = log.read_bytes()[-LAST_WORDS:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["it said nothing"])[-1]
