"""Values of response tokens: a head on a decoder's hidden states, its loss and statistics, its files.

Serves both kinds of critic, a model of its own (``ValueModel``) and a head on the policy's backbone. The value of a
token is read at the row that predicts it, so V(s_t) has seen the prompt and the response before t, and not t itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from core_trainer.algorithms.values import value_loss
from core_trainer.batching import PackedBatch, TrainSample, micro_batches, pack
from core_trainer.checkpoint import WEIGHTS, copy_model_files, save_optimizer
from core_trainer.forward import hidden_scores, hidden_states
from core_trainer.logprobs import TokenScores
from core_trainer.models import load_pretrained
from core_trainer.optimizer import MasterOptimizer, OptimizerStats
from rlinsight import names
from rlinsight.errors import CheckpointError, ModelError

HEAD = "value_head.safetensors"


class ValueHead(torch.nn.Module):
    """Linear, hidden states [M, d] in any dtype -> values [M] float32.

    Weights start from a normal distribution with std 1 / (d + 1), which keeps first values near 0 (arXiv 2009.01325,
    appendix B), the bias from 0. Equal seeds give equal heads; the global random state is left alone.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        drawn = torch.randn((1, hidden_size), generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(drawn / (hidden_size + 1))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)[:, 0]


class ValueModel(torch.nn.Module):
    """A decoder without output layer, and the head that reads it."""

    def __init__(self, decoder: PreTrainedModel, head: ValueHead) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = head


# Values --------------------------------------------------------------------------------------------------------------


def values(decoder: PreTrainedModel, head: ValueHead, batch: PackedBatch) -> Tensor:
    """Value of each response token, [M] float32, differentiable. ``decoder`` may be a whole causal model."""
    return head(hidden_states(decoder, batch))


@torch.no_grad()
def sample_values(
    decoder: PreTrainedModel, head: ValueHead, samples: Sequence[TrainSample], token_budget: int
) -> list[np.ndarray]:
    """Values [T] of each sample's tokens, in the order of ``samples``."""
    found: dict[str, np.ndarray] = {}
    for part in micro_batches(samples, token_budget):
        batch = pack(part, decoder.device)
        arrays = batch.split(values(decoder, head, batch))
        found |= {sample.rollout_id: array for sample, array in zip(batch.samples, arrays, strict=True)}
    return [found[sample.rollout_id] for sample in samples]


def scores_and_values(
    model: PreTrainedModel, head: ValueHead, batch: PackedBatch, temperature: float, **wanted: bool
) -> tuple[TokenScores, Tensor]:
    """What ``forward.scores`` and ``values`` give, from one pass through the backbone that the two share."""
    hidden = hidden_states(model, batch)
    return hidden_scores(model, hidden, batch, temperature, **wanted), head(hidden)


@torch.no_grad()
def sample_scores_and_values(
    model: PreTrainedModel,
    head: ValueHead,
    samples: Sequence[TrainSample],
    temperature: float,
    token_budget: int,
    *,
    sum_pi_squared: bool = False,
) -> dict[str, list[np.ndarray]]:
    """``log_probs``, ``values`` and, if asked for, ``sum_pi_squared``, each arrays [T] in the order of ``samples``."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for part in micro_batches(samples, token_budget):
        batch = pack(part, model.device)
        scores, current = scores_and_values(model, head, batch, temperature, sum_pi_squared=sum_pi_squared)
        tensors = {"log_probs": scores.log_probs, "values": current}
        if scores.sum_pi_squared is not None:
            tensors["sum_pi_squared"] = scores.sum_pi_squared
        for name, tensor in tensors.items():
            columns = zip(batch.samples, batch.split(tensor), strict=True)
            found.setdefault(name, {}).update({sample.rollout_id: array for sample, array in columns})
    return {name: [arrays[sample.rollout_id] for sample in samples] for name, arrays in found.items()}


# Loss and statistics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations in float64; ``merge`` is exact algebra (Chan, Golub, LeVeque 1983).

    Plain sums of squares would lose the variance of values far from 0. Equal numbers give a deviation of exactly 0.
    """

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @classmethod
    def of(cls, numbers: Tensor) -> Moments:
        """Of a tensor [M]."""
        if not numbers.numel():
            return cls()
        first = numbers[0].double()
        shifted = numbers.double() - first
        mean = shifted.mean()
        return cls(numbers.numel(), float(first + mean), float(((shifted - mean) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        """Of both sets of numbers together."""
        count = self.count + other.count
        if not count:
            return self
        share, gap = other.count / count, other.mean - self.mean
        deviation = self.deviation + other.deviation + gap**2 * self.count * share
        return Moments(count, self.mean + gap * share, deviation)


@dataclass(frozen=True, slots=True)
class ValueStats:
    """What an update of values saw on its loss tokens; ``merge`` joins micro-batches, mini-batches and ranks.

    ``values`` are those from before the update, which the advantages were measured from; ``errors`` are returns minus
    them.
    """

    loss: float = 0.0  # already weighted: sums to the loss
    num_clipped: int = 0
    values: Moments = field(default_factory=Moments)
    returns: Moments = field(default_factory=Moments)
    errors: Moments = field(default_factory=Moments)

    def merge(self, other: ValueStats) -> ValueStats:
        """Of both sets of tokens together."""
        return ValueStats(
            self.loss + other.loss,
            self.num_clipped + other.num_clipped,
            self.values.merge(other.values),
            self.returns.merge(other.returns),
            self.errors.merge(other.errors),
        )

    @property
    def num_tokens(self) -> int:
        """Loss tokens."""
        return self.returns.count

    @property
    def explained_variance(self) -> float | None:
        """1 - Var(R - V) / Var(R): 1 is perfect, 0 no better than a constant; None where all returns are equal."""
        return 1 - self.errors.deviation / self.returns.deviation if self.returns.deviation else None

    def metrics(self, num_updates: int) -> dict[str, float | None]:
        """The loss per optimizer step, the rest per loss token; None where there is none."""
        some = self.num_tokens > 0
        return {
            names.M_VALUE_LOSS: self.loss / num_updates,
            names.M_EXPLAINED_VARIANCE: self.explained_variance,
            names.M_VALUE_CLIP_FRACTION: self.num_clipped / self.num_tokens if some else None,
            names.M_VALUE_MEAN: self.values.mean if some else None,
            names.M_RETURN_MEAN: self.returns.mean if some else None,
        }


def weighted_value_loss(current: Tensor, batch: PackedBatch, clip: float | None) -> tuple[Tensor, ValueStats]:
    """Share of a packed batch in the step's value loss, a differentiable scalar, and its statistics.

    ``current`` [M] are the values under the weights in training. Tokens outside the loss mask enter nothing, whatever
    stands on them.
    """
    mask = batch.gather("loss_mask", torch.bool)
    old, returns = batch.gather("values")[mask], batch.gather("returns")[mask]
    loss, clipped = value_loss(current[mask], old, returns, clip=clip)
    total = (loss * batch.per_token("token_weight")[mask]).sum()
    errors = Moments.of(returns.double() - old.double())
    stats = ValueStats(float(total.detach()), int(clipped.sum()), Moments.of(old), Moments.of(returns), errors)
    return total, stats


def critic_metrics(updates: Sequence[OptimizerStats]) -> dict[str, float]:
    """Step metrics of the optimizer steps, at least one, of a critic of its own."""

    def mean(norms: Sequence[float]) -> float:
        return sum(norms) / len(norms)

    return {
        names.M_CRITIC_GRAD_NORM: mean([update.grad_norm for update in updates]),
        **{
            names.M_CRITIC_GRAD_NORM_GROUPS[group]: mean([update.grad_norms[group] for update in updates])
            for group in updates[0].grad_norms
        },
        names.M_CRITIC_LR: updates[-1].learning_rate,
    }


# Files ---------------------------------------------------------------------------------------------------------------


def load(directory: Path, seed: int | None) -> ValueModel:
    """A critic in float32 from a saved one, or from any model directory with a new head drawn from ``seed``.

    ``seed`` None asks for a saved one. Raises ModelError when a file is missing or cannot be read.
    """
    decoder = _load_decoder(directory)
    return ValueModel(decoder, load_head(directory, decoder.config.hidden_size, seed))


def load_head(directory: Path, hidden_size: int, seed: int | None) -> ValueHead:
    """The head in ``directory``, or where it has none a new one from ``seed``; None asks for a saved one."""
    file = directory / HEAD
    if not file.is_file():
        if seed is None:
            raise ModelError(f"critic {directory} has no {HEAD}; resume from another checkpoint")
        return ValueHead(hidden_size, seed)
    head = ValueHead(hidden_size, 0)
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read as safetensors ({error}); take it from another checkpoint") from None
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    needed = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if found != needed:
        raise ModelError(f"{file} holds {found}, the model needs {needed}; use the model the head was trained on")
    head.load_state_dict(state)
    return head


def _load_decoder(directory: Path) -> PreTrainedModel:
    """The model without its output layer, in evaluation mode."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # that the output layer is not used is no news
    try:
        decoder, missing = load_pretrained(AutoModel, directory, torch.float32, attn_implementation="eager")
    finally:
        transformers_logging.set_verbosity(verbosity)
    if missing:
        raise ModelError(f"critic {directory} lacks {len(missing)} weights, such as {missing[0]}; get it again")
    return decoder


def save(directory: Path, model: ValueModel, source: Path, optimizer: MasterOptimizer) -> None:
    """Write a critic: a Hugging Face directory of the decoder's masters, the head beside it, and the moments.

    ``optimizer`` holds ``model``; ``source`` is where the config and tokenizer come from.
    """
    masters = optimizer.named_master(model)
    known = {id(parameter) for parameter in model.parameters()}
    state = model.decoder.state_dict(keep_vars=True)
    kept = {name: tensor for name, tensor in state.items() if id(tensor) not in known}
    with _writing(directory):
        copy_model_files(source, directory)
        model.decoder.config.architectures = [type(model.decoder).__name__]
        model.decoder.config.save_pretrained(directory)
        decoder = {**_below("decoder.", masters), **kept}
        save_file(decoder, directory / WEIGHTS, metadata={"format": "pt"})
        save_optimizer(directory, optimizer, optimizer.num_updates)
    save_head(directory, _below("value_head.", masters))


def save_head(directory: Path, masters: Mapping[str, Tensor]) -> None:
    """Write the masters of a head, all of them, by the head's own names."""
    if set(masters) != {"weight", "bias"}:
        raise CheckpointError(f"a value head is weight and bias, not {sorted(masters)}; give all of its masters")
    with _writing(directory):
        save_file(dict(masters), directory / HEAD)


def _below(prefix: str, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in masters.items() if name.startswith(prefix)}


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"critic {directory} cannot be written ({error}); free some space or set another run.dir"
        ) from None
