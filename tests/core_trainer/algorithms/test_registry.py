"""Finding algorithms by name, their options, and the files a user adds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core_trainer.algorithms import advantages, policy_losses, registry
from core_trainer.algorithms.registry import TokenLoss, advantage, policy_loss
from rlinsight.errors import ConfigError

PLUGIN = """
from core_trainer.algorithms.registry import advantage, policy_loss, TokenLoss


@advantage("leave_best_out")
def leave_best_out(rewards, groups, *, scale: float = 1.0):
    return scale * (rewards - rewards.max())


@policy_loss("plain")
def plain(log_probs, advantages, mask):
    return TokenLoss(-advantages * log_probs * mask, mask.double(), mask & False)
"""


@pytest.fixture(autouse=True)
def _only_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    """A plugin file."""
    path = folder / name
    path.write_text(text)
    return path


REWARDS = {
    "rewards": torch.tensor([1.0, 3.0]).double(),
    "groups": torch.tensor([0, 0]),
    "mask": torch.ones(2, 3).bool(),
}


def test_a_plugin_is_used_like_a_built_in(tmp_path: Path) -> None:
    """Its functions are found by name, get the tensors they ask for, and take their options."""
    registry.load_plugins([write(tmp_path, PLUGIN)])
    found = registry.find("advantage", "leave_best_out")
    assert (found.inputs, dict(found.options)) == (("rewards", "groups"), {"scale": 1.0})
    got, returns = advantages.compute("leave_best_out", REWARDS, {"scale": 2.0})
    assert (got.tolist(), returns) == ([[-4.0] * 3, [0.0] * 3], None)
    assert "plain" in registry.names("policy_loss")


def test_loading_a_plugin_twice_is_harmless(tmp_path: Path) -> None:
    """Through another path to it, too."""
    path = write(tmp_path, PLUGIN)
    registry.load_plugins([path, str(path)])
    os.symlink(path, tmp_path / "link.py")
    registry.load_plugins([tmp_path / "link.py"])
    assert registry.names("advantage").count("leave_best_out") == 1


def test_a_taken_name_is_refused_with_both_places(tmp_path: Path) -> None:
    """Of a built-in or of another plugin; nothing of the second file stays."""
    first, second = write(tmp_path, PLUGIN), write(tmp_path, "\n" + PLUGIN, "other.py")
    registry.load_plugins([first])
    with pytest.raises(ConfigError, match=r"plugin .*other.py:6: advantage 'leave_best_out' at .*other.py.*mine.py:5"):
        registry.load_plugins([second])
    third = PLUGIN.replace("leave_best_out", "new").replace('"plain"', '"ppo_clip"')
    with pytest.raises(ConfigError, match=r"'ppo_clip' at .*third.py:10 is already taken by .*policy_losses.py"):
        registry.load_plugins([write(tmp_path, third, "third.py")])
    assert "new" not in registry.names("advantage")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1 / 0", r"mine.py:1: ZeroDivisionError: division by zero"),
        ("def f(:", r"mine.py: SyntaxError"),
        ("import nowhere", r"mine.py:1: ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1", r"mine.py: it registers nothing; decorate"),
        (PLUGIN.replace("rewards, groups", "rewards, group"), r"unknown input 'group'; did you mean 'groups'"),
        (PLUGIN.replace("*, scale", "scale"), r"unknown input 'scale'; inputs are rewards.*options come after a \*"),
        (PLUGIN.replace("*, scale: float = 1.0", "**options"), r"takes \*\*options; name every input and option"),
    ],
)
def test_a_broken_plugin_is_named_and_leaves_nothing(tmp_path: Path, text: str, message: str) -> None:
    """File, line where there is one, and cause; after a repair it loads."""
    path = write(tmp_path, text)
    before = registry.names("advantage")
    with pytest.raises(ConfigError, match=message):
        registry.load_plugins([path])
    assert registry.names("advantage") == before
    path.write_text(PLUGIN)
    registry.load_plugins([path])
    assert "leave_best_out" in registry.names("advantage")


def test_a_path_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, or another kind of file."""
    for path in (tmp_path / "absent.py", tmp_path, write(tmp_path, PLUGIN, "plugin.txt")):
        with pytest.raises(ConfigError, match=r"is no Python file; give the path of a \.py file"):
            registry.load_plugins([path])


def test_unknown_names_are_refused_with_the_closest() -> None:
    """Or with all there are."""
    with pytest.raises(ConfigError, match="unknown advantage 'rlo'; did you mean 'rloo'"):
        registry.find("advantage", "rlo")
    with pytest.raises(ConfigError, match="unknown policy loss 'zzz'; known cispo, clip_cov, "):
        registry.find("policy_loss", "zzz")


def test_options_are_checked() -> None:
    """Unknown ones, wrong types and missing ones, before anything runs."""
    grpo = registry.find("advantage", "grpo")
    assert grpo.resolve({}) == {"normalize_by_std": True}
    with pytest.raises(
        ConfigError, match="advantage 'grpo' has no option 'normalise_by_std'; did you mean 'normalize_b"
    ):
        grpo.resolve({"normalise_by_std": False})
    with pytest.raises(ConfigError, match=r"advantage 'grpo': normalize_by_std='no': .*boolean"):
        grpo.resolve({"normalize_by_std": "no"})
    assert registry.find("policy_loss", "ppo_clip").resolve({"clip_low": 1, "dual_clip": None})["clip_low"] == 1
    with pytest.raises(ConfigError, match="needs the option 'min_reward'; set it"):
        registry.find("group_filter", "too_hard").resolve({})


def test_missing_inputs_are_named_with_what_brings_them() -> None:
    """And with what there is instead."""
    available = {"token_rewards": torch.zeros(1, 1), "mask": torch.ones(1, 1).bool()}
    with pytest.raises(
        ConfigError, match=r"advantage 'gae' needs values \(.*algorithm.critic\); there is token_rewards, m"
    ):
        advantages.compute("gae", available, {})


def test_results_of_another_shape_are_refused() -> None:
    """An advantage is [B] or [B, T]; a policy loss is a TokenLoss of [M]."""

    @advantage("short")
    def short(rewards: Tensor) -> Tensor:
        return rewards[:1]

    @policy_loss("bare")
    def bare(log_probs: Tensor) -> Tensor:
        return log_probs

    @policy_loss("summed")
    def summed(log_probs: Tensor, mask: Tensor) -> TokenLoss:
        return TokenLoss(log_probs.sum(), log_probs, mask)

    with pytest.raises(
        ConfigError, match=r"advantage 'short' returned shape \[1\]; return \[B, T\]=\[2, 3\], or \[B\]=\[2\]"
    ):
        advantages.compute("short", REWARDS, {})
    tokens = {"log_probs": torch.zeros(4), "mask": torch.ones(4).bool()}
    with pytest.raises(ConfigError, match=r"policy loss 'bare' returned Tensor; return TokenLoss\("):
        policy_losses.compute("bare", tokens, {})
    with pytest.raises(ConfigError, match=r"policy loss 'summed' returned loss of shape \[\]; return \[4\]"):
        policy_losses.compute("summed", tokens, {})


def test_only_plain_functions_can_be_registered() -> None:
    """Their signature says what they need."""
    with pytest.raises(ConfigError, match=r"advantage 'x': .* is no plain function; decorate a def"):
        advantage("x")(Tensor)


def test_every_builtin_has_a_docstring() -> None:
    """It is the reference of the name."""
    for algorithm in registry._registered.values():
        assert (algorithm.function.__doc__ or "").strip(), algorithm.title
