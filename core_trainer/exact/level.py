"""Which exact level a model computes at, and what trainer and engine have to ask for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from core_trainer.batching import SharedPrefixLayout
from core_trainer.exact.activation import ExactActivation
from core_trainer.exact.attention import ExactLayout
from core_trainer.exact.linear import ExactLinear, StrictLinear, TiledLinear
from rlinsight.errors import ConfigError

Level = Literal["mkl", "tile"]
Setting = Literal["auto", "mkl", "tile"]  # rollout.exact where it is on
LINEAR: dict[Level, type[ExactLinear]] = {"mkl": StrictLinear, "tile": TiledLinear}
ACTIVATIONS = {entry if isinstance(entry, type) else entry[0] for entry in ACT2CLS.values()}
MKL_MODE = "AUTO,STRICT"  # the processor's best branch, in strict mode


def prepare(setting: Setting) -> None:
    """To be called before the process's first product: MKL reads its mode then.

    An MKL_CBWR of the user's own is left as it is; whether it is strict enough, the self-test tells.
    """
    if setting != "tile":
        os.environ.setdefault("MKL_CBWR", MKL_MODE)


def candidates(setting: Setting) -> tuple[Level, ...]:
    """Levels to try, in order."""
    return ("mkl", "tile") if setting == "auto" else (setting,)


def enable(model: PreTrainedModel, level: Level) -> None:
    """Make a model that computes attention through ``core_trainer.attention`` compute at ``level``.

    Raises ConfigError off the CPU.
    """
    if model.device.type != "cpu":
        raise ConfigError(
            f"rollout.exact={level} works on a CPU only, and the model is on {model.device}; remove rollout.exact"
        )
    for module in list(model.modules()):
        if type(module) is nn.Linear or isinstance(module, ExactLinear):
            module.__class__ = LINEAR[level]  # the layer keeps its weights, hooks and name
        for name, child in module.named_children():
            if type(child) in ACTIVATIONS and not isinstance(module, ExactActivation):
                setattr(module, name, ExactActivation(child))
    model.exact_level = level  # type: ignore[assignment]


def of(model: Any) -> Level | None:
    """The level a model was enabled at, None for a model of the fast mode."""
    return getattr(model, "exact_level", None)


def layout(model: Any, shared: SharedPrefixLayout) -> SharedPrefixLayout | ExactLayout:
    """What the model's attention is to compute packed tokens with."""
    level = of(model)
    return shared if level is None else ExactLayout(shared, tiled=level == "tile")


def output_product(model: PreTrainedModel) -> Callable[[Tensor, Tensor], Tensor]:
    """hidden [M, d], weight [V, d] -> logits [M, V], as the model's output layer computes them."""
    head = model.get_output_embeddings()
    return head.product if isinstance(head, ExactLinear) else F.linear
