"""What this process and its machine use: CPU, memory, disk, network and GPUs, as observable instruments.

Names and units follow the OpenTelemetry semantic conventions. Every process reports itself; of a run's processes on one
machine, one reports the machine too. GPUs are read through NVML where its Python package and a device are present, and
are silently absent elsewhere. Values are read when metrics are collected (meters.py), and at no other time.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import psutil
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from rlinsight import __version__, names

Read = Callable[["_Readings"], Iterable[Observation]]

_log = logging.getLogger(__name__)
_readings: _Readings | None = None
_observing = False


def observe(provider: MeterProvider, run_id: str) -> None:
    """Report this process, and the machine if no other process of the run does, until ``stop``. Never raises."""
    global _readings, _observing
    stop()
    try:
        _readings = _Readings(run_id)
    except Exception as error:  # of whichever sensor: training goes on without it
        _log.warning("no system metrics: %s: %s", type(error).__name__, error)
        return
    if not _observing:  # instruments live as long as the process
        _observing = True
        meter = provider.get_meter("rlinsight.system", __version__, names.SCHEMA_URL)
        for name, read in INSTRUMENTS.items():
            make = meter.create_observable_counter if name in COUNTERS else meter.create_observable_gauge
            make(name, [_callback(read)], name.unit, name.doc)


def stop() -> None:
    """Report nothing any more; also in a forked child, so that the machine stays the parent's to report."""
    global _readings
    readings, _readings = _readings, None
    if readings is not None:
        readings.close()


def _callback(read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def callback(_: CallbackOptions) -> Iterable[Observation]:
        readings = _readings
        try:
            return [] if readings is None else list(read(readings))
        except Exception as error:  # a container may hide what a machine has; the SDK would log each time
            _log.debug("a system metric is absent: %s: %s", type(error).__name__, error)
            return []

    return callback


class _Readings:
    """What the instruments read, with the readings before for what is a difference."""

    def __init__(self, run_id: str) -> None:
        self._first: dict[tuple[str, str], int] = {}  # first reading of each counter
        self._process = psutil.Process()
        self._process_before = time.monotonic(), _cpu_seconds(self._process)
        self._host_before = _host_cpu_seconds()
        self._claim_name = f"\0rlinsight-{hashlib.sha256(run_id.encode()).hexdigest()}"  # at most 108 bytes
        self._claim: socket.socket | None = None
        self._gpus: _Gpus | None = None

    def close(self) -> None:
        """Leave the machine to another process of the run."""
        if self._claim is not None:
            self._claim.close()

    # Process

    def process_cpu(self) -> Iterator[Observation]:
        (then, before), (now, used) = self._process_before, (time.monotonic(), _cpu_seconds(self._process))
        self._process_before = now, used
        yield Observation((used - before) / max(now - then, 1e-9) / _cores())

    def process_memory(self) -> Iterator[Observation]:
        yield Observation(self._process.memory_info().rss)

    def process_threads(self) -> Iterator[Observation]:
        yield Observation(self._process.num_threads())

    def process_files(self) -> Iterator[Observation]:
        yield Observation(self._process.num_fds())

    # Machine

    def host_cpu(self) -> Iterator[Observation]:
        if self._reports_host():
            before, now = self._host_before, _host_cpu_seconds()
            self._host_before = now
            spent = {mode: max(now[mode] - before[mode], 0.0) for mode in now}
            total = sum(spent.values())
            for mode, seconds in spent.items():
                if total:
                    yield Observation(seconds / total, {"cpu.mode": mode})

    def host_memory(self) -> Iterator[Observation]:
        if self._reports_host():
            memory = psutil.virtual_memory()
            for state in ("used", "free", "cached", "buffers"):
                if hasattr(memory, state):
                    yield Observation(getattr(memory, state), {"system.memory.state": state})

    def host_memory_limit(self) -> Iterator[Observation]:
        if self._reports_host():
            yield Observation(psutil.virtual_memory().total)

    def disk(self) -> Iterator[Observation]:
        total = psutil.disk_io_counters() if self._reports_host() else None
        if total is not None:  # a machine may have no disk of its own
            yield self._since_start(total.read_bytes, "disk.io.direction", "read")
            yield self._since_start(total.write_bytes, "disk.io.direction", "write")

    def network(self) -> Iterator[Observation]:
        if self._reports_host():
            links = [count for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo"]
            yield self._since_start(sum(link.bytes_recv for link in links), "network.io.direction", "receive")
            yield self._since_start(sum(link.bytes_sent for link in links), "network.io.direction", "transmit")

    def _since_start(self, total: int, key: str, direction: str) -> Observation:
        """The machine counts since it booted, the SDK says that its counters began with the process."""
        return Observation(total - self._first.setdefault((key, direction), total), {key: direction})

    def gpu(self, read: str) -> Iterator[Observation]:
        if self._reports_host():
            if self._gpus is None:  # here, in the collecting thread: NVML takes its time to start
                self._gpus = _Gpus()
            yield from self._gpus.read(read)

    def _reports_host(self) -> bool:
        """Whether this process holds the run's name on this machine, which the kernel frees when a process ends.

        Asked at each collection, so another process takes over from one that is gone.
        """
        if self._claim is None:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(self._claim_name)  # in Linux's abstract namespace: no file
            except OSError:
                claim.close()
                return False
            self._claim = claim
        return True


class _Gpus:
    """The machine's GPUs as NVML tells them; none where it cannot be used."""

    def __init__(self) -> None:
        self._devices: list[tuple[Any, dict[str, str]]] = []
        try:
            pynvml = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._devices = [
                (handle, {"hw.id": pynvml.nvmlDeviceGetUUID(handle), "hw.name": pynvml.nvmlDeviceGetName(handle)})
                for handle in handles
            ]
        except Exception as error:  # no package, no driver, no permission
            _log.debug("no GPU metrics: %s: %s", type(error).__name__, error)
            return
        self._reads: dict[str, Callable[[Any], float]] = {
            "utilization": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "memory_limit": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
            "temperature": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
            "power": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,  # milliwatts
        }

    def read(self, what: str) -> Iterator[Observation]:
        """One quantity of every GPU that knows it."""
        for gpu, labels in self._devices:
            with suppress(Exception):  # a device may lack a sensor, or be lost
                yield Observation(self._reads[what](gpu), {**labels, "hw.type": "gpu"})


def _gpu(what: str) -> Read:
    return lambda readings: readings.gpu(what)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _host_cpu_seconds() -> dict[str, float]:
    times = psutil.cpu_times()._asdict()
    parts = {"user": ("user", "nice"), "system": ("system", "irq", "softirq")}  # guests are part of user
    parts |= {mode: (mode,) for mode in ("iowait", "steal", "idle")}
    return {mode: sum(times.get(field, 0.0) for field in fields) for mode, fields in parts.items()}


INSTRUMENTS: dict[names.Name, Read] = {
    names.PROCESS_CPU: _Readings.process_cpu,
    names.PROCESS_MEMORY: _Readings.process_memory,
    names.PROCESS_THREADS: _Readings.process_threads,
    names.PROCESS_FILES: _Readings.process_files,
    names.SYSTEM_CPU: _Readings.host_cpu,
    names.SYSTEM_MEMORY: _Readings.host_memory,
    names.SYSTEM_MEMORY_LIMIT: _Readings.host_memory_limit,
    names.SYSTEM_DISK: _Readings.disk,
    names.SYSTEM_NETWORK: _Readings.network,
    names.GPU_UTILIZATION: _gpu("utilization"),
    names.GPU_MEMORY: _gpu("memory"),
    names.GPU_MEMORY_LIMIT: _gpu("memory_limit"),
    names.GPU_TEMPERATURE: _gpu("temperature"),
    names.GPU_POWER: _gpu("power"),
}
COUNTERS = frozenset({names.SYSTEM_DISK, names.SYSTEM_NETWORK})
