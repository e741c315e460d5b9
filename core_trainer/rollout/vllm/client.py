"""The engine over a run's own vLLM server: the OpenAI engine, with weights through shared memory."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core_trainer.rollout.dialects import Completions
from core_trainer.rollout.engine import Chunk, GenerateRequest, PauseMode, WeightSync
from core_trainer.rollout.openai import Answer, OpenAIEngine
from core_trainer.rollout.server import Hints, Server
from core_trainer.rollout.vllm.options import IDENTITY_HEADER
from core_trainer.rollout.vllm.servers import Address
from core_trainer.rollout.weight_transport import FILE, Pushed, WeightFolder, paused
from core_trainer.types import SamplingParams, Turn
from rlinsight import names
from rlinsight.errors import EngineError, RequestRefused

LOAD_TIMEOUT_S = 600.0  # of loading weights
UNSENT_NS = 10 * 10**9  # what a server knows of requests it finished this long ago is stored: it sends each second
_LOG = "its log is in the run's folder under servers"
HINTS = Hints(
    key="something else listens at its port",
    unreachable=_LOG,
    silent="raise rollout.request_timeout_s if it is slow",
    model=f"{_LOG}; it has",
    missing=_LOG,
)


class SharedMemory:
    """The servers of this process map the weights once and load them in place, paused, and forget what the old ones
    computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.folder = WeightFolder(model, None)

    def push(self, server: Server, policy_version: int, pause_mode: PauseMode, on_change: Callable[[], None]) -> Pushed:
        file = self.folder.at(policy_version) / FILE
        with paused(server, pause_mode):
            (served, *_) = rpc(server, "rlinsight_load_shared", str(file), timeout_s=LOAD_TIMEOUT_S)
            on_change()
        return Pushed(policy_version, self.folder.nbytes, served)

    def close(self) -> None:
        self.folder.close()


class VllmServerEngine(OpenAIEngine):
    """Rollout engine over one of the run's servers, which records its own state and the requests it finishes.

    When it fails it may have been killed, and what it had not sent of its last requests is gone. They are recorded from
    here then, so that every turn has its request; those that it had sent are told twice.
    """

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
            address.replica,
        )
        self.sleep_level = sleep_level
        self._asleep = False
        self._last: deque[tuple[GenerateRequest, Turn, Answer]] = deque()  # requests it may not have sent yet
        self._lock = threading.Lock()  # of them: weights may change in another thread

    def sync_weights(self, policy_version: int, pause_mode: PauseMode = "wait") -> list[WeightSync]:
        """See OpenAIEngine. Wakes a server that was out when the others were woken; untested on a GPU."""
        with self._telling_the_last():
            if self._asleep:
                self.wake()
            return super().sync_weights(policy_version, pause_mode)

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

    async def _chunks(self, request: GenerateRequest, stream: bool) -> AsyncGenerator[Chunk, None]:
        with self._telling_the_last():
            async with aclosing(super()._chunks(request, stream)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _headers(self, request: GenerateRequest) -> dict[str, str]:
        identity = {**request.attributes, names.POLICY_VERSION: self.policy_version}
        return super()._headers(request) | {IDENTITY_HEADER: json.dumps(identity)}

    def _record_request(self, request: GenerateRequest, turn: Turn, answer: Answer) -> None:
        if answer.aborted:  # vLLM tells of those it ended itself
            super()._record_request(request, turn, answer)
            return
        with self._lock:
            self._last.append((request, turn, answer))
            while self._last[0][1].end_ns < turn.end_ns - UNSENT_NS:
                self._last.popleft()

    @contextmanager
    def _telling_the_last(self) -> Iterator[None]:
        """Record the last requests when the server fails in this block."""
        try:
            yield
        except RequestRefused:
            raise
        except EngineError:
            with self._lock:
                last, self._last = self._last, deque()
            for request, turn, answer in last:
                super()._record_request(request, turn, answer)
            raise

    def _record_state(self) -> None:
        pass


def rpc(server: Server, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
    """Call a method of ``WorkerExtension`` on every worker of a server. Raises EngineError."""
    body = {"method": method, "args": list(args)}
    return server.call("POST", "/collective_rpc", body, timeout_s=timeout_s)["results"]
