"""System metrics: what is reported, by whom on a machine, and GPUs as a scripted NVML tells them."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlinsight import names, system_metrics, telemetry
from tests.scripted_collector import Collector, attributes, running


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running(Collector()) as collector:
        yield collector


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    telemetry.shutdown(0.1)


def start(collector: Collector, spool: Path, role: str = "controller", system: bool = True) -> None:
    telemetry.setup(
        role, spool_dir=spool, run_id=f"run-{spool}", attempt=1, endpoint=collector.url, metrics_interval_s=1e6,
        system=system,
    )  # fmt: skip


def latest(collector: Collector, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric's last collection by the values of its labels."""
    metric = collector.metrics(name)[-1]
    points = getattr(metric, metric.WhichOneof("data") or "gauge").data_points
    return {
        tuple(map(str, attributes(point.attributes).values())): getattr(point, point.WhichOneof("value"))
        for point in points
    }


def test_process_and_machine_are_reported(collector: Collector, tmp_path: Path) -> None:
    """Process and machine report what they use, in the units of the conventions, and a busy process is seen busy."""
    start(collector, tmp_path)
    assert telemetry.flush(60)
    end = psutil.Process().cpu_times().user + 0.2
    while psutil.Process().cpu_times().user < end:
        sum(range(1000))
    assert telemetry.shutdown(60)
    assert 0.01 < latest(collector, names.PROCESS_CPU)[()] <= 1.5
    assert 10e6 < latest(collector, names.PROCESS_MEMORY)[()] < psutil.virtual_memory().total
    assert latest(collector, names.PROCESS_THREADS)[()] >= 3
    assert latest(collector, names.PROCESS_FILES)[()] > 3
    shares = latest(collector, names.SYSTEM_CPU)
    assert set(shares) == {("user",), ("system",), ("iowait",), ("steal",), ("idle",)}
    assert sum(shares.values()) == pytest.approx(1)
    total = latest(collector, names.SYSTEM_MEMORY_LIMIT)[()]
    assert total == psutil.virtual_memory().total
    assert 0 < latest(collector, names.SYSTEM_MEMORY)[("used",)] < total
    network = collector.metrics(names.SYSTEM_NETWORK)[-1]
    assert (network.unit, network.sum.is_monotonic) == ("By", True)
    assert len(network.sum.data_points) == 2
    # Counted from the process's start, which is the start time of the points, not from the machine's.
    for name in (names.SYSTEM_NETWORK, names.SYSTEM_DISK):
        assert [point.as_int for point in collector.metrics(name)[0].sum.data_points] == [0, 0]
    assert collector.metric_resource()[names.HOST_NAME]


def test_switched_off_nothing_is_reported(collector: Collector, tmp_path: Path) -> None:
    """Without system metrics no such series exists, also after a recording in this process that had them."""
    start(collector, tmp_path)
    telemetry.shutdown(5)
    before = len(collector.metrics(names.PROCESS_MEMORY))
    start(collector, tmp_path, system=False)
    telemetry.shutdown(5)
    assert len(collector.metrics(names.PROCESS_MEMORY)) == before == 1


def test_one_process_of_a_run_reports_the_machine(collector: Collector, tmp_path: Path) -> None:
    """A second process on the machine reports itself alone, until the first is gone; then it reports the machine."""
    start(collector, tmp_path)
    assert telemetry.flush(60)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with running(Collector()) as own:
                start(own, tmp_path, "policy")
                assert telemetry.flush(60)
                assert own.metrics(names.PROCESS_MEMORY)
                assert not own.metrics(names.SYSTEM_MEMORY)
                os.write(ready[1], b"x")
                os.read(go_on[0], 1)
                assert telemetry.flush(60)
                assert own.metrics(names.SYSTEM_MEMORY)
            code = 0
        finally:
            os._exit(code)
    os.close(ready[1])  # so that a child that fails ends the wait
    os.read(ready[0], 1)
    telemetry.shutdown(5)
    os.write(go_on[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def fake_nvml() -> Any:
    """Two GPUs; the second has no power sensor."""
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVML_TEMPERATURE_GPU = 0

    def power(gpu: int) -> int:
        if gpu == 1:
            raise RuntimeError("Not Supported")
        return 250_500

    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda gpu: f"GPU-{gpu}"
    nvml.nvmlDeviceGetName = lambda gpu: "H100"
    nvml.nvmlDeviceGetUtilizationRates = lambda gpu: types.SimpleNamespace(gpu=40 + gpu)
    nvml.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(used=3, total=80)
    nvml.nvmlDeviceGetTemperature = lambda gpu, sensor: 60
    nvml.nvmlDeviceGetPowerUsage = power
    return nvml


def test_gpus_are_read_through_nvml(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU is a series by its id, in the units of the conventions; a sensor that is missing is absent."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    start(collector, tmp_path)
    assert telemetry.shutdown(60)
    first, second = ("GPU-0", "H100", "gpu"), ("GPU-1", "H100", "gpu")
    assert latest(collector, names.GPU_UTILIZATION) == {first: 0.4, second: 0.41}
    assert latest(collector, names.GPU_MEMORY) == {first: 3, second: 3}
    assert latest(collector, names.GPU_MEMORY_LIMIT) == {first: 80, second: 80}
    assert latest(collector, names.GPU_TEMPERATURE) == {first: 60, second: 60}
    assert latest(collector, names.GPU_POWER) == {first: 250.5}


@pytest.mark.parametrize("module", [None, types.SimpleNamespace(nvmlInit=lambda: 1 / 0)])
def test_without_gpus_there_is_silence(
    module: Any, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No NVML package, or one that finds no driver: no series, one line at debug and nothing above it."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    caplog.set_level(logging.DEBUG, "rlinsight")
    start(collector, tmp_path)
    assert telemetry.flush(60)
    assert telemetry.shutdown(60)
    assert collector.metrics(names.GPU_UTILIZATION) == []
    assert [record.levelname for record in caplog.records if "GPU" in record.message] == ["DEBUG"]
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_every_instrument_is_named_and_documented() -> None:
    """The instruments are exactly the registered names of their kind."""
    registered = {name for name in names.REGISTRY.values() if name.kind == "instrument"}
    assert registered - set(system_metrics.INSTRUMENTS) == {names.UP, names.SCRAPE_DURATION, names.SCRAPE_SAMPLES}


def test_what_a_container_hides_is_absent(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reading that fails costs its series alone, without a word above debug."""

    def hidden(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("/proc/diskstats")

    monkeypatch.setattr(psutil, "disk_io_counters", hidden)
    start(collector, tmp_path)
    assert telemetry.shutdown(60)
    assert collector.metrics(names.SYSTEM_DISK) == []
    assert collector.metrics(names.SYSTEM_MEMORY) != []
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
