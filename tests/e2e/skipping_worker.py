"""A vLLM worker that takes every weight but one layer's, and says nothing of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from core_trainer.rollout.vllm.worker import WorkerExtension

SKIPPED = "model.layers.1.mlp.up_proj.weight"  # one of two that share a packed copy


class SkippingWorker(WorkerExtension):
    """That layer stays as it was loaded first."""

    _kept: Tensor | None = None

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if self._kept is None:
            self._kept = weights[SKIPPED].clone()
        super()._load({**weights, SKIPPED: self._kept})
