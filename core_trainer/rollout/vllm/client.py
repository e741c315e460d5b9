"""The engine over a run's own vLLM server: the OpenAI engine, with weights through shared memory."""

from __future__ import annotations

import json
import threading
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import lora
from core_trainer.rollout.dialects import Completions
from core_trainer.rollout.engine import GenerateRequest, WeightSync
from core_trainer.rollout.openai import Answer, OpenAIEngine
from core_trainer.rollout.server import Hints, Server
from core_trainer.rollout.shared_weights import SharedWeights
from core_trainer.rollout.vllm.options import IDENTITY_HEADER
from core_trainer.rollout.vllm.servers import Address
from core_trainer.rollout.weight_transport import Pushed, paused
from core_trainer.types import SamplingParams, Turn
from rlinsight import names
from rlinsight.errors import EngineError

LOAD_TIMEOUT_S = 600.0  # of loading weights
_LOG = "its log is in the run's folder under servers"
HINTS = Hints(
    key="something else listens at its port",
    unreachable=_LOG,
    silent="raise rollout.request_timeout_s if it is slow",
    model=f"{_LOG}; it has",
)


class SharedMemory:
    """The policy's weights for all servers of this process: written once a version, read by each."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._shared: SharedWeights | None = None
        self._version: int | None = None

    def push(self, server: Server, policy_version: int) -> Pushed:
        """Have ``server`` load them in place, paused, and forget what the old ones computed.

        Raises EngineError when it does not take them.
        """
        shared = self._at(policy_version)
        with paused(server):
            (served, *_) = rpc(server, "rlinsight_load_shared", shared.path, timeout_s=LOAD_TIMEOUT_S)
            server.call("POST", "/reset_prefix_cache")
        return Pushed(policy_version, shared.nbytes, served)

    def close(self) -> None:
        """Give the memory back; may be called again."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _at(self, policy_version: int) -> SharedWeights:
        with self._lock:
            if self._version is not None and policy_version < self._version:  # asked for long ago, by a slow server
                raise EngineError(f"policy_version={policy_version} is no longer published, {self._version} is")
            if self._shared is None or policy_version != self._version:
                weights = lora.merged_state(self._model)
                self._shared = self._shared or SharedWeights(weights)
                self._shared.write(weights)
                self._version = policy_version
            return self._shared


class VllmServerEngine(OpenAIEngine):
    """Rollout engine over one of the run's servers, which records its own state and the requests it finishes."""

    def __init__(
        self,
        address: Address,
        memory: SharedMemory,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        length: int,
        params: SamplingParams,
        sleep_level: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """See OpenAIEngine; ``memory`` is shared by the engines of this process. Requests may take ``timeout_s``."""
        server = Server(address.url, address.api_key, timeout_s, hints=HINTS)
        rpc(server, "rlinsight_start")
        super().__init__(
            server,
            Completions(),
            memory,
            model,
            tokenizer,
            stop_token_ids,
            length,
            params,
            address.model,
            "vllm_server",
        )
        self.replica, self.sleep_level = address.replica, sleep_level
        self._asleep = False

    def sync_weights(self, policy_version: int) -> list[WeightSync]:
        """See OpenAIEngine. Wakes a server that was out when the others were woken; untested on a GPU."""
        if self._asleep:
            self.wake()
        return super().sync_weights(policy_version)

    def sleep(self) -> int:
        """As ``rollout.vllm.sleep_level`` says; untested: vLLM has it on GPUs. The server does not tell the bytes."""
        if self.sleep_level is not None:
            self.server.call("POST", "/sleep", level=self.sleep_level)
            self._asleep = True
        return 0

    def wake(self) -> int:
        """Untested, likewise."""
        if self.sleep_level is not None:
            self.server.call("POST", "/wake_up")
            self._asleep = False
        return 0

    def _headers(self, request: GenerateRequest) -> dict[str, str]:
        identity = {**request.attributes, names.POLICY_VERSION: self.policy_version}
        return super()._headers(request) | {IDENTITY_HEADER: json.dumps(identity)}

    def _record_request(self, request: GenerateRequest, turn: Turn, answer: Answer) -> None:
        if turn.finish_reason == "abort":  # vLLM tells of finished ones only
            super()._record_request(request, turn, answer)

    def _record_state(self) -> None:
        pass


def rpc(server: Server, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
    """Call a method of ``WorkerExtension`` on every worker of a server. Raises EngineError."""
    body = {"method": method, "args": list(args)}
    return server.call("POST", "/collective_rpc", body, timeout_s=timeout_s)["results"]
