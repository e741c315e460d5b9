"""vLLM workers that do what tests need: leave a weight out, or stop while they sample."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from core_trainer.rollout.vllm.worker import WorkerExtension

SKIPPED = "model.layers.1.mlp.up_proj.weight"  # one of two that share a packed copy


class SkippingWorker(WorkerExtension):
    """It takes every weight but one layer's, which stays as it was loaded first, and says nothing of it."""

    _kept: Tensor | None = None

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if self._kept is None:
            self._kept = weights[SKIPPED].clone()
        super()._load({**weights, SKIPPED: self._kept})


class HoldingWorker(WorkerExtension):
    """It can be stopped at a token, so that whatever a test does meanwhile meets a request in flight."""

    def hold(self, step: int, released: str) -> None:
        """Before that step from here on, wait until the file is there."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # of the worker this extends
        run, steps_done = runner.execute_model, 0

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps_done
            steps_done += 1
            while steps_done == step and not Path(released).exists():
                time.sleep(0.01)
            return run(*args, **kwargs)

        runner.execute_model = execute_model
