"""AdamW over flat master weights, with a compute copy in the model.

The model holds weights in the compute dtype. Masters, gradients and moments are one flat tensor each, so the norm, the
all-reduce and the update are single operations. In bfloat16 an update of 1e-5 of a weight rounds to nothing; in float32
masters it accumulates until the compute copy moves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlinsight import names
from rlinsight.config import TrainerSection
from rlinsight.errors import CheckpointError, TrainingError

_GROUPS = [  # of names.M_GRAD_NORM_GROUPS, by a parameter's name; the first that matches
    ("lora", re.compile(r"lora_")),
    ("value_head", re.compile(r"value_head")),
    ("head", re.compile(r"(^|\.)(lm_head|embed_out)\.")),
    ("norms", re.compile(r"norm|(^|\.)ln_")),
    ("embeddings", re.compile(r"embed|(^|\.)w[tp]e\.")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|feed_forward|ffn|experts")),
]


@dataclass(frozen=True, slots=True)
class OptimizerStats:
    """What one optimizer step did."""

    grad_norm: float  # before clipping
    learning_rate: float
    weights_changed: float  # share of the trained compute weights that changed
    grad_norms: dict[str, float]  # the same by module group; a shared critic's head, clipped apart, is not in grad_norm


def update_metrics(updates: Sequence[OptimizerStats]) -> dict[str, float]:
    """Step metrics of a step's optimizer steps, at least one."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    norms = [update.grad_norm for update in updates]
    return {
        names.M_GRAD_NORM: mean(norms),
        names.M_GRAD_NORM_MAX: max(norms),
        **{
            names.M_GRAD_NORM_GROUPS[group]: mean([update.grad_norms[group] for update in updates])
            for group in updates[0].grad_norms
        },
        names.M_LR: updates[-1].learning_rate,
        names.M_WEIGHTS_CHANGED: mean([update.weights_changed for update in updates]),
    }


def learning_rate(section: TrainerSection, step: int, first_step: int = 1) -> float:
    """Rate of a step, counted from 1: it depends on nothing else, so a resumed run goes on as if never stopped.

    Warm-up rises in equal parts to the peak at ``warmup_steps``. Linear and cosine start from the peak in the step
    after and would reach ``min_lr_ratio`` of it one step after the last, so that no step is wasted at 0. Weights that
    are trained from ``first_step`` on only have their whole schedule in the steps that are left.
    """
    skipped = first_step - 1
    step, total_steps = step - skipped, section.total_steps - skipped
    if step <= section.warmup_steps:
        return section.learning_rate * step / section.warmup_steps
    if section.lr_schedule == "constant":
        return section.learning_rate
    done = min(1.0, (step - 1 - section.warmup_steps) / (total_steps - section.warmup_steps))
    left = 1 - done if section.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.learning_rate * (section.min_lr_ratio + (1 - section.min_lr_ratio) * left)


def module_group(parameter: str) -> str:
    """Group of names.M_GRAD_NORM_GROUPS a parameter of this name belongs to."""
    return next((group for group, pattern in _GROUPS if pattern.search(parameter)), "other")


class MasterOptimizer:
    """Accumulates gradients of ``model`` and updates it. All ranks of a process group hold equal copies.

    Masters are taken from the model's weights as they are at construction, so construct it before they are rounded.

    ``master_dtype`` float32 keeps masters apart from the model; the model's own dtype updates the compute copy's values
    directly, as a plain optimizer over the model would.
    """

    def __init__(self, model: torch.nn.Module, section: TrainerSection, master_dtype: torch.dtype) -> None:
        self.section = section
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in trained]
        self._groups = [module_group(name) for name, _ in trained]
        device = self.parameters[0].device
        self.master = torch.cat([p.detach().reshape(-1) for p in self.parameters]).to(master_dtype)
        self.gradient = torch.zeros(self.master.numel(), dtype=torch.float32, device=device)
        self._views = self.gradient.split([p.numel() for p in self.parameters])
        self._adamw = torch.optim.AdamW(
            [self.master],
            lr=section.learning_rate,
            betas=section.adam_betas,
            weight_decay=section.weight_decay,
            fused=True,
        )
        self.num_updates = 0

    def named_master(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Master weights by parameter name, as views."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parts = self.master.split([p.numel() for _, p in named])
        return {name: part.view(p.shape) for (name, p), part in zip(named, parts, strict=True)}

    def accumulate(self) -> None:
        """Add the model's gradients to the float32 sum and clear them."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:
                view.add_(parameter.grad.reshape(-1))
                parameter.grad = None

    def step(self, step: int) -> OptimizerStats:
        """Sum the gradient over ranks, clip it, update masters and model. ``step`` of the run counts from 1.

        Raises TrainingError, weights untouched, when the gradient is not finite: one such update would make every
        weight NaN.
        """
        return step_together([self], step)[0]

    def _reduce(self) -> list[float]:
        """Sum the gradient over ranks; returns its norm by parameter."""
        if dist.is_initialized():
            dist.all_reduce(self.gradient)
        return torch.stack([torch.linalg.vector_norm(view) for view in self._views]).tolist()

    def _update(self, by_parameter: list[float], step: int, first_step: int) -> OptimizerStats:
        """Clip the summed gradient, whose norms these are, update the masters and refresh the model's copy."""
        norm = math.hypot(*by_parameter)
        self.gradient.mul_(min(1.0, self.section.max_grad_norm / (norm + 1e-6)))
        rate = learning_rate(self.section, step, first_step)
        self._adamw.param_groups[0]["lr"] = rate
        self.master.grad = self.gradient.to(self.master.dtype)
        self._adamw.step()
        self.master.grad = None
        self.gradient.zero_()
        self.num_updates += 1
        by_group: dict[str, list[float]] = {}
        for group, value in zip(self._groups, by_parameter, strict=True):
            by_group.setdefault(group, []).append(value)
        norms = {group: math.hypot(*values) for group, values in by_group.items()}
        return OptimizerStats(norm, rate, self._refresh_model(), norms)

    def _refresh_model(self) -> float:
        """Round the masters into the model; returns the share of elements that changed."""
        changed = torch.zeros((), dtype=torch.int64, device=self.master.device)
        with torch.no_grad():
            for parameter, part in zip(
                self.parameters, self.master.split([p.numel() for p in self.parameters]), strict=True
            ):
                rounded = part.view(parameter.shape).to(parameter.dtype)
                changed += torch.count_nonzero(rounded != parameter)
                parameter.copy_(rounded)
        return float(changed) / self.master.numel()

    def offload(self) -> int:
        """Move masters, gradient and moments to host memory, until ``reload``; returns the bytes moved, 0 on a CPU.

        Untested on a GPU.
        """
        return self._move(torch.device("cpu"))

    def reload(self) -> int:
        """Move them back to the model's device; returns the bytes moved."""
        return self._move(self.parameters[0].device)

    def _move(self, device: torch.device) -> int:
        if self.gradient.device == device:
            return 0
        moments = self.state_dict()
        for tensor in (self.master, self.gradient, *moments.values()):
            tensor.data = tensor.to(device)
        self._views = self.gradient.split([p.numel() for p in self.parameters])
        return sum(tensor.nbytes for tensor in (self.master, self.gradient, *moments.values()))

    def state_dict(self) -> dict[str, Tensor]:
        """Moments as flat tensors; empty before the first update."""
        state = self._adamw.state.get(self.master, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor], num_updates: int) -> None:
        """Restore what ``state_dict`` gave. Raises CheckpointError when it belongs to another model."""
        for key in ("exp_avg", "exp_avg_sq") if num_updates else ():
            if key not in state or state[key].shape != self.master.shape:
                shape = tuple(state[key].shape) if key in state else None
                raise CheckpointError(
                    f"optimizer state {key} has shape {shape}, the model needs {tuple(self.master.shape)}; "
                    "resume with the model the run was started with"
                )
        self._adamw.state[self.master] = {key: value.clone() for key, value in state.items()}
        self.num_updates = num_updates


def step_together(optimizers: Sequence[MasterOptimizer], step: int, first_step: int = 1) -> list[OptimizerStats]:
    """One step of each, or of none: raises TrainingError, all weights untouched, when a gradient is not finite.

    ``first_step`` is the first that trains these weights, see ``learning_rate``.
    """
    norms = [optimizer._reduce() for optimizer in optimizers]
    for by_parameter in norms:
        if not math.isfinite(norm := math.hypot(*by_parameter)):
            for optimizer in optimizers:
                optimizer.gradient.zero_()
            raise TrainingError(
                f"the gradient norm of step {step} is {norm}; lower trainer.learning_rate, or look "
                "at the step's log-probs in view tokens"
            )
    return [optimizer._update(found, step, first_step) for optimizer, found in zip(optimizers, norms, strict=True)]
