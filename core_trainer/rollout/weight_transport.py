"""How the policy's weights reach a server."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from transformers import PreTrainedModel

from core_trainer import lora
from core_trainer.rollout.engine import PauseMode
from core_trainer.rollout.server import Server
from core_trainer.rollout.shared_weights import SharedWeights
from rlinsight.errors import EngineError

FILE = "model.safetensors"
PREFIX = "rlinsight-weights-"  # of a folder's name
RESUME_TIMEOUT_S = 5.0  # after a failure: a server that hangs has been waited for once


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a server has after a push."""

    policy_version: int
    moved: int  # bytes it was given
    checksum: str | None = None  # of the weights it serves; None where nobody can tell


class WeightTransport(Protocol):
    """One for all servers of a process, which may call it from threads of their own."""

    def push(self, server: Server, policy_version: int, pause_mode: PauseMode, on_change: Callable[[], None]) -> Pushed:
        """Have ``server`` serve the policy's current weights. Raises EngineError when it does not take them.

        ``pause_mode`` says what becomes of the requests it has. A server that is paused meanwhile has sampled its last
        token of the old weights when ``on_change`` is called, and none of the new.
        """
        ...

    def close(self) -> None:
        """Remove what was published; may be called again."""
        ...


class WeightFolder:
    """The policy's weights as a safetensors file, written once a version: on disk, or in this machine's memory."""

    def __init__(self, model: PreTrainedModel, directory: Path | None, name: str | None = None) -> None:
        """``directory`` must be the servers' too; None shares memory, for servers of the same user on this machine.

        ``name`` tells this process's folder there from those of others; one that is left of an earlier attempt is
        removed. Raises EngineError when it cannot be made.
        """
        self._model, self._on_disk = model, directory is not None
        self._lock = threading.Lock()
        self._version: int | None = None
        self._shared: SharedWeights | None = None
        self.path = _memory_folder() if directory is None else _own_folder(directory, name)
        self.nbytes = 0

    def at(self, policy_version: int) -> Path:
        """The folder, holding that version in FILE. Raises EngineError when it cannot be written."""
        with self._lock:
            if self._version is not None and policy_version < self._version:  # asked for long ago, by a slow server
                raise EngineError(f"policy_version={policy_version} is no longer published, {self._version} is")
            if policy_version != self._version:
                try:
                    self._write()
                except OSError as error:
                    scarce = "space" if self._on_disk else "memory"
                    raise EngineError(
                        f"weights cannot be written to {self.path} ({error.strerror}); free some {scarce}"
                    ) from error
                self._version = policy_version
        return self.path

    def _write(self) -> None:
        weights = lora.merged_state(self._model)
        self.nbytes = sum(weight.nbytes for weight in weights.values())
        if self._on_disk:
            partial = self.path / f".{FILE}.partial"
            save_file({name: weight.contiguous().cpu() for name, weight in weights.items()}, partial)
            partial.rename(self.path / FILE)  # a server that still reads the old one keeps it
            return
        if self._shared is None:
            self._shared = SharedWeights(weights)
            (self.path / FILE).symlink_to(self._shared.path)
        self._shared.write(weights)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _memory_folder() -> Path:
    """An empty folder for the name of what is in memory."""
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise EngineError(f"no folder for the weights can be made: {error}; free some space or set TMPDIR") from error


def _own_folder(directory: Path, name: str | None) -> Path:
    """An empty folder there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if name is None:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        else:
            path = directory / f"{PREFIX}{name}"
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        path.chmod(0o755)  # who else may read is for the folder around it to say
    except OSError as error:
        raise EngineError(
            f"rollout.openai.weights_dir={directory}: no folder for the weights can be made there ({error.strerror})"
        ) from error
    return path


@contextmanager
def paused(server: Server, mode: PauseMode) -> Iterator[None]:
    """In this block vLLM samples nothing: it has finished the requests it had, ended or keeps them. At the end it has
    forgotten all keys and values; of kept requests they are computed anew. Raises EngineError.
    """
    try:
        server.call("POST", "/pause", mode=mode)
        yield
        told = server.call("POST", "/reset_prefix_cache", reset_running_requests=True)
        if told.get("success") is False:
            raise EngineError(f"{server.url} kept keys and values of the old weights")
    except BaseException:  # an interrupt too: a server that stays paused answers nobody, and others may use it
        with suppress(EngineError):  # also after a pause that was not answered in time, but may come
            server.call("POST", "/resume", timeout_s=RESUME_TIMEOUT_S)
        raise
    server.call("POST", "/resume")


class VllmFromDisk:
    """vLLM loads the folder in place, paused, and forgets what the old weights computed.

    Needs a server in VLLM_SERVER_DEV_MODE=1.
    """

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder

    def push(self, server: Server, policy_version: int, pause_mode: PauseMode, on_change: Callable[[], None]) -> Pushed:
        path = self.folder.at(policy_version)
        with paused(server, pause_mode):
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            server.call("POST", "/collective_rpc", call, timeout_s=server.timeout_s)
            on_change()
        return Pushed(policy_version, self.folder.nbytes)

    def close(self) -> None:
        self.folder.close()


class SglangFromDisk:
    """SGLang loads the folder between two of its batches (untested against a server; written after its protocol)."""

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder

    def push(self, server: Server, policy_version: int, pause_mode: PauseMode, on_change: Callable[[], None]) -> Pushed:
        if pause_mode != "wait":
            raise EngineError(
                f"{server.url}: SGLang is not told what becomes of requests in flight; use pause mode wait"
            )
        path = self.folder.at(policy_version)
        server.call("GET", "/v1/models")  # a server that hangs is found before the call that may take long
        call = {"model_path": str(path), "weight_version": str(policy_version)}
        told = server.call("POST", "/update_weights_from_disk", call, timeout_s=server.timeout_s)
        if not told.get("success"):
            raise EngineError(f"{server.url} did not take the weights: {told.get('message')}")
        return Pushed(policy_version, self.folder.nbytes)

    def close(self) -> None:
        self.folder.close()


class KeepsItsOwn:
    """The server's weights stay those of the first push, which it must have been started with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: int | None = None

    def push(self, server: Server, policy_version: int, pause_mode: PauseMode, on_change: Callable[[], None]) -> Pushed:
        with self._lock:
            if self._first is None:
                self._first = policy_version
        return Pushed(self._first, 0)

    def close(self) -> None:
        """Nothing was published."""
