"""One forward pass of a policy over a packed batch: hidden states, then log-probs of the response tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from core_trainer.batching import PackedBatch, TrainSample, micro_batches, pack
from core_trainer.exact import level
from core_trainer.logprobs import TokenScores, token_scores
from rlinsight.errors import ModelError


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Make a backward pass keep each layer's input only and compute the layer again (arXiv 1604.06174).

    transformers' own switch acts in training mode alone, where models may have dropout; ours stay in evaluation mode.
    Raises ModelError for a model whose layers are not marked for it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{model.config.model_type} models have no layers to recompute; set trainer.gradient_checkpointing: false"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Nothing in a layer draws random numbers, so none need be drawn again.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Hidden states [M, d] of the rows that predict a response token, one for each, before the output layer."""
    layout = level.layout(model, batch.layout)
    out = model.get_decoder()(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=layout
    )
    return out.last_hidden_state[0].index_select(0, batch.logit_rows)


def scores(
    model: PreTrainedModel,
    batch: PackedBatch,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
) -> TokenScores:
    """Log-probs (differentiable), entropies and, if asked for, sums of squared probabilities of the response tokens.

    The output layer runs on the rows that predict a response token only. ``entropy_gradient`` makes the entropy
    differentiable too.
    """
    hidden = hidden_states(model, batch)
    return hidden_scores(
        model, hidden, batch, temperature, entropy_gradient=entropy_gradient, sum_pi_squared=sum_pi_squared
    )


def hidden_scores(
    model: PreTrainedModel, hidden: Tensor, batch: PackedBatch, temperature: float, **wanted: bool
) -> TokenScores:
    """The same from ``hidden_states`` [M, d], with the options of ``token_scores``."""
    return token_scores(
        hidden,
        model.get_output_embeddings().weight,  # type: ignore[union-attr]  # a causal model has an output layer
        batch.targets,
        temperature,
        product=level.output_product(model),
        **wanted,
    )


def log_probs(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and entropies of the response tokens, each [M] float32."""
    return scores(model, batch, temperature)[:2]


def sample_log_probs(
    model: PreTrainedModel, samples: Sequence[TrainSample], temperature: float, token_budget: int
) -> list[np.ndarray]:
    """Log-probs [T] of each sample's tokens, in the order of ``samples``."""
    return sample_scores(model, samples, temperature, token_budget)["log_probs"]


@torch.no_grad()
def sample_scores(
    model: PreTrainedModel,
    samples: Sequence[TrainSample],
    temperature: float,
    token_budget: int,
    *,
    sum_pi_squared: bool = False,
) -> dict[str, list[np.ndarray]]:
    """The fields of TokenScores that were asked for, each a list of arrays [T] in the order of ``samples``."""
    names = ["log_probs", "entropy", *(["sum_pi_squared"] if sum_pi_squared else [])]
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
    for part in micro_batches(samples, token_budget):
        batch = pack(part, model.device)
        values = scores(model, batch, temperature, sum_pi_squared=sum_pi_squared)
        for name, arrays in found.items():
            columns = zip(batch.samples, batch.split(getattr(values, name)), strict=True)
            arrays |= {sample.rollout_id: array for sample, array in columns}
    return {name: [arrays[sample.rollout_id] for sample in samples] for name, arrays in found.items()}
