"""One forward pass of a policy over a packed batch: hidden states, then log-probs of the response tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from core_trainer.batching import PackedBatch, TrainSample, micro_batches, pack
from core_trainer.logprobs import token_log_probs


def log_probs(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and entropies of the response tokens, each [M] float32.

    The output layer runs on the rows that predict a response token only.
    """
    hidden = (
        model.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout
        )
        .last_hidden_state[0]
        .index_select(0, batch.logit_rows)
    )
    weight = model.get_output_embeddings().weight  # type: ignore[union-attr]  # a causal model has an output layer
    return token_log_probs(hidden, weight, batch.targets, temperature)


@torch.no_grad()
def sample_log_probs(
    model: PreTrainedModel, samples: Sequence[TrainSample], temperature: float, token_budget: int
) -> list[np.ndarray]:
    """Log-probs [T] of each sample's tokens, in the order of ``samples``."""
    found: dict[str, np.ndarray] = {}
    for part in micro_batches(samples, token_budget):
        batch = pack(part, model.device)
        values, _ = log_probs(model, batch, temperature)
        found |= {s.rollout_id: v for s, v in zip(batch.samples, batch.split(values), strict=True)}
    return [found[sample.rollout_id] for sample in samples]
