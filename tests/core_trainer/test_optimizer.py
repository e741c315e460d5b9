"""Master weights: small updates survive rounding, and the flat update is AdamW's."""

from __future__ import annotations

import copy

import pytest
import torch

from core_trainer.optimizer import MasterOptimizer
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
