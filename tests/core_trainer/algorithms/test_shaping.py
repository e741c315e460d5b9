"""Which rollouts are learnt from, and the penalty on length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_trainer.algorithms import registry, shaping
from rlinsight.errors import ConfigError

GROUPED = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=12)


def test_overlong_reference_number() -> None:
    """Length 4, cap 4, buffer 2, factor 1: -1; nothing before the buffer, and half-way half of the factor."""
    got = shaping.overlong(torch.tensor([1, 2, 3, 4]), max_length=4, buffer=2)
    assert got.tolist() == [0, 0, -0.5, -1]
    assert shaping.overlong(torch.tensor([3]), max_length=4, buffer=2, factor=0.5).tolist() == [-0.25]


def test_overlong_buffer_is_checked() -> None:
    """It fits under the cap."""
    for buffer in (0, 5):
        with pytest.raises(ConfigError, match=f"overlong buffer={buffer} is not between 1 and the cap of 4"):
            shaping.overlong(torch.tensor([1]), max_length=4, buffer=buffer)


@settings(max_examples=100, deadline=None)
@given(GROUPED)
def test_group_filters_equal_a_naive_loop(rows: list[tuple[int, float]]) -> None:
    """Group by group in plain Python."""
    x = {
        "groups": torch.tensor([group for group, _ in rows]),
        "rewards": torch.tensor([reward for _, reward in rows], dtype=torch.float64),
        "staleness": torch.arange(len(rows)) % 3,
    }
    oldest = [max(i % 3 for i, (other, _) in enumerate(rows) if other == group) for group, _ in rows]
    peers = [[reward for other, reward in rows if other == group] for group, _ in rows]
    means = [sum(rewards) / len(rewards) for rewards in peers]
    for name, options, expected in [
        ("zero_variance", {}, [len(set(rewards)) > 1 for rewards in peers]),
        ("too_hard", {"min_reward": 0.3}, [mean >= 0.3 for mean in means]),
        ("too_easy", {"max_reward": 0.7}, [mean <= 0.7 for mean in means]),
        ("stale", {"max_staleness": 1}, [staleness <= 1 for staleness in oldest]),
        ("too_small", {}, [len(rewards) >= 2 for rewards in peers]),
    ]:
        assert registry.find("group_filter", name).call(x, options).tolist() == expected, name


def test_equal_rewards_have_no_variance_despite_rounding() -> None:
    """Three times 0.1 has a std above 0 in floating point."""
    rewards = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    assert shaping.zero_variance(rewards, torch.zeros(3, dtype=torch.int64)).tolist() == [False] * 3


def test_a_filter_keeps_whole_groups_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a group, a number for a rollout, and a value for a group are refused by the filter's name."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    x = {
        "rewards": torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64),
        "groups": torch.tensor([7, 7, 4, 4]),
    }

    @registry.group_filter("at_least")
    def at_least(rewards: Tensor, *, low: float) -> Tensor:
        return rewards >= low

    @registry.group_filter("numbers")
    def numbers(rewards: Tensor) -> Tensor:
        return rewards

    @registry.group_filter("short")
    def short(rewards: Tensor) -> Tensor:
        return rewards[:2] > 0

    assert shaping.filter_groups("at_least", x, {"low": 2.0}).tolist() == [False, False, True, True]
    with pytest.raises(ConfigError, match="group filter 'at_least' keeps some rollouts of a group and not others"):
        shaping.filter_groups("at_least", x, {"low": 1.0})
    with pytest.raises(ConfigError, match=r"'numbers' returned torch.float64 of shape \[4\]; return torch.bool"):
        shaping.filter_groups("numbers", x, {})
    with pytest.raises(ConfigError, match=r"of shape \[2\]; return torch.bool of shape \[B\]=\[4\]"):
        shaping.filter_groups("short", x, {})
    assert (
        shaping.filter_groups("at_least", {key: tensor[:0] for key, tensor in x.items()}, {"low": 1.0}).tolist() == []
    )


def test_selection_names_the_first_reason() -> None:
    """A rollout is kept when it passes every check."""
    checks = {
        "stale": torch.tensor([True, False, True, False]),
        "zero_variance": torch.tensor([True, False, False, True]),
    }
    got = shaping.select(checks)
    assert got.keep.tolist() == [True, False, False, False]
    assert got.reasons == [None, "stale", "zero_variance", "stale"]
