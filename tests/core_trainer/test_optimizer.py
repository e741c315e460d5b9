"""Master weights: small updates survive rounding, and the flat update is AdamW's."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Literal

import pytest
import torch

from core_trainer import models
from core_trainer.optimizer import MasterOptimizer, OptimizerStats, learning_rate, module_group, update_metrics
from rlinsight import names
from rlinsight.config import TrainerSection
from rlinsight.errors import CheckpointError, TrainingError


def make_model(seed: int = 0) -> torch.nn.Sequential:
    """Two layers in float32."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    """The same random gradients for equal seeds, in each parameter's dtype."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_equals_adamw_with_clipping() -> None:
    """Ten steps equal torch's AdamW with clip_grad_norm_ parameter by parameter, weight decay and warm-up included."""
    section = TrainerSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=4)
    mine, theirs = make_model(), make_model()
    optimizer = MasterOptimizer(mine, section, torch.float32)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(10):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.accumulate()
        stats = optimizer.step(step + 1)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
        reference.step()
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert stats.learning_rate == pytest.approx(reference.param_groups[0]["lr"])
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_accumulated_micro_batches_equal_one_batch() -> None:
    """Gradients add up in float32 and are cleared by the step."""
    whole, parts = make_model(), make_model()
    one, many = (MasterOptimizer(m, TrainerSection(learning_rate=1e-2), torch.float32) for m in (whole, parts))
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        whole(x).square().sum().backward()
        one.accumulate()
        for piece in x.split(5):
            parts(piece).square().sum().backward()
            many.accumulate()
        assert one.step(1).grad_norm == pytest.approx(many.step(1).grad_norm, rel=1e-5)
        assert float(one.gradient.abs().max()) == 0.0
    torch.testing.assert_close(one.master, many.master, atol=1e-6, rtol=1e-5)


def test_float32_masters_keep_updates_that_bfloat16_loses() -> None:
    """At lr 1e-4 weights of 1 in bfloat16 stand still; with masters they move, and weights_changed tells the two
    apart.
    """
    moved = {}
    for master_dtype in (torch.float32, torch.bfloat16):
        model = make_model()
        for p in model.parameters():
            torch.nn.init.constant_(p, 1.0)
        optimizer = MasterOptimizer(model, TrainerSection(learning_rate=1e-4, max_grad_norm=1e9), master_dtype)
        for p in model.parameters():
            p.data = p.data.bfloat16()
        changed = 0.0
        for _ in range(60):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.accumulate()
            changed += optimizer.step(1).weights_changed
        moved[master_dtype] = (float(next(model.parameters()).flatten()[0].detach()), changed)
    assert moved[torch.bfloat16] == (1.0, 0.0)
    value, changed = moved[torch.float32]
    assert value < 1.0
    assert changed == 2.0  # bfloat16 steps by 2^-8 below 1; 60 x 1e-4 crosses the midpoints 0.00195 and 0.00586


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_touches_nothing(value: float) -> None:
    """The update is refused by name, masters and model stay as they are, and the next update works."""
    model = make_model()
    optimizer = MasterOptimizer(model, TrainerSection(learning_rate=1e-2), torch.float32)
    before = optimizer.master.clone()
    set_gradients(model, 0)
    next(model.parameters()).grad[0, 0] = value  # type: ignore[index]
    optimizer.accumulate()
    with pytest.raises(TrainingError, match=f"gradient norm of step 7 is {value}"):
        optimizer.step(7)
    assert torch.equal(optimizer.master, before)
    set_gradients(model, 1)
    optimizer.accumulate()
    optimizer.step(8)
    assert bool(torch.isfinite(optimizer.master).all())


def test_state_round_trip_and_foreign_state() -> None:
    """Restored moments continue bit for bit; those of another model are refused by shape."""
    model = make_model()
    optimizer = MasterOptimizer(model, TrainerSection(learning_rate=1e-2), torch.float32)
    for step in range(3):
        set_gradients(model, step)
        optimizer.accumulate()
        optimizer.step(1)
    twin_model = copy.deepcopy(model)
    twin = MasterOptimizer(twin_model, TrainerSection(learning_rate=1e-2), torch.float32)
    twin.load_state_dict({k: v.clone() for k, v in optimizer.state_dict().items()}, optimizer.num_updates)
    for m, o in ((model, optimizer), (twin_model, twin)):
        set_gradients(m, 9)
        o.accumulate()
        o.step(4)
    assert torch.equal(optimizer.master, twin.master)
    other = MasterOptimizer(torch.nn.Linear(3, 3), TrainerSection(), torch.float32)
    with pytest.raises(CheckpointError, match="the model needs"):
        other.load_state_dict(optimizer.state_dict(), 3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 0.5**0.5) / 2]),
    ],
)
def test_learning_rates_by_hand(schedule: str, expected: list[float]) -> None:
    """Two warm-up steps of six, then from the peak towards a fifth of it."""
    ratio = 0.0 if schedule == "constant" else 0.2
    section = TrainerSection.model_validate(
        {"learning_rate": 2.0, "warmup_steps": 2, "total_steps": 6, "lr_schedule": schedule, "min_lr_ratio": ratio}
    )
    assert [learning_rate(section, step) / 2 for step in range(1, 7)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_late_start_has_the_whole_schedule(schedule: Literal["constant", "linear", "cosine"]) -> None:
    """Weights trained in steps 4 to 9 of nine have the rates that six steps from the first on have."""
    late = TrainerSection(learning_rate=2.0, warmup_steps=2, total_steps=9, lr_schedule=schedule)
    early = late.model_copy(update={"total_steps": 6})
    expected = [learning_rate(early, step) for step in range(1, 7)]
    assert [learning_rate(late, step, 4) for step in range(4, 10)] == expected
    assert expected[1] == 2.0


def test_the_rate_never_falls_below_its_floor() -> None:
    """A step after total_steps, as after a resume with fewer of them, is trained at min_lr_ratio."""
    section = TrainerSection(learning_rate=1.0, total_steps=4, lr_schedule="linear", min_lr_ratio=0.1)
    assert learning_rate(section, 9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_lr_ratio": 0.1}, "min_lr_ratio=0.1 has no effect with lr_schedule=constant"),
        ({"lr_schedule": "cosine", "warmup_steps": 100}, "lr_schedule=cosine never begins"),
    ],
)
def test_schedules_that_do_nothing_are_refused(values: dict, message: str) -> None:
    """A floor without a fall, and a fall after the last step."""
    with pytest.raises(ValueError, match=message):
        TrainerSection.model_validate(values)


def test_gradient_norms_by_module_group(tiny_model: Path) -> None:
    """Each group's norm is that of its parameters' gradients before clipping; their squares sum to the whole."""
    model = models.load_model(tiny_model, torch.float32)
    optimizer = MasterOptimizer(model, TrainerSection(max_grad_norm=1e-3), torch.float32)
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, float] = {}
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        group = "norms" if "norm" in name else name.split(".")[-3] if "layers" in name else "embed_tokens"
        expected[group] = expected.get(group, 0.0) + float(p.grad.double().square().sum())
    optimizer.accumulate()
    stats = optimizer.step(1)
    assert set(stats.grad_norms) == {"embeddings", "attention", "mlp", "norms"}
    for mine, theirs in (
        ("attention", "self_attn"),
        ("mlp", "mlp"),
        ("norms", "norms"),
        ("embeddings", "embed_tokens"),
    ):
        assert stats.grad_norms[mine] == pytest.approx(math.sqrt(expected[theirs]), rel=1e-6)
    assert math.hypot(*stats.grad_norms.values()) == pytest.approx(stats.grad_norm)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("transformer.wpe.weight", "embeddings"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.post_attention_layernorm.weight", "norms"),
        ("transformer.h.1.ln_2.bias", "norms"),
        ("model.layers.0.mlp.experts.gate_up_proj", "mlp"),
        ("lm_head.weight", "head"),
        ("embed_out.weight", "head"),
        ("value_head.weight", "value_head"),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "lora"),
        ("something.weight", "other"),
    ],
)
def test_a_parameter_belongs_to_the_group_its_name_says(name: str, group: str) -> None:
    """Llama's, GPT-2's and our own names."""
    assert module_group(name) == group
    assert group in names.M_GRAD_NORM_GROUPS


def test_metrics_of_a_step_cover_all_its_updates() -> None:
    """Norms and changed weights are means over the updates, their maximum is apart, the rate is the last."""
    updates = [
        OptimizerStats(5.0, 0.1, 0.5, {"mlp": 3.0, "attention": 4.0}),
        OptimizerStats(1.0, 0.2, 0.7, {"mlp": 1.0, "attention": 0.0}),
    ]
    assert update_metrics(updates) == pytest.approx(
        {
            "optim/grad_norm": 3.0,
            "optim/grad_norm_max": 5.0,
            "optim/grad_norm/mlp": 2.0,
            "optim/grad_norm/attention": 2.0,
            "optim/learning_rate": 0.2,
            "optim/weights_changed": 0.6,
        }
    )
