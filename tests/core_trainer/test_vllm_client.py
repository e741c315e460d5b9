"""The client of a run's vLLM server: what it records when the server is lost."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.openai import Answer, OpenAIEngine
from core_trainer.rollout.vllm.client import UNSENT_NS, VllmServerEngine
from core_trainer.types import SamplingParams
from rlinsight.errors import EngineError, RequestRefused
from tests.core_trainer.scripted_engine import turn


def test_the_last_requests_of_a_server_that_fails_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it may not have sent: not the older ones, not when a request itself is refused, not again."""
    told: list[str] = []
    monkeypatch.setattr(OpenAIEngine, "_record_request", lambda _, request, *__: told.append(request.request_id))
    engine: Any = VllmServerEngine.__new__(VllmServerEngine)  # without the server that its start asks
    engine._last, engine._lock = deque(), threading.Lock()
    for i, end_ns in enumerate((0, UNSENT_NS + 1, UNSENT_NS + 2)):
        request = GenerateRequest(f"r{i}", (1,), SamplingParams(3, 1.0))
        engine._record_request(request, turn(request, end_ns=end_ns), Answer(0))
    with engine._telling_the_last():
        assert told == []
    with pytest.raises(RequestRefused), engine._telling_the_last():
        raise RequestRefused("too long")
    assert told == []
    for _ in range(2):
        with pytest.raises(EngineError), engine._telling_the_last():
            raise EngineError("gone")
        assert told == ["r1", "r2"]
