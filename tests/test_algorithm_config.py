"""Presets fill the algorithm section, and options that would do nothing are refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from rlinsight import config
from rlinsight.config.presets import PRESETS, Preset
from rlinsight.errors import ConfigError


def parse(algorithm: dict[str, Any], **sections: dict[str, Any]) -> config.Config:
    tree = {
        "model": {"source": "some/model"},
        "data": {"train": "data.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "algorithm": algorithm,
    }
    return config.parse({**tree, **sections})


@pytest.mark.parametrize("name", get_args(Preset))
def test_a_preset_is_whole_and_its_resolved_config_loads_to_itself(name: str) -> None:
    """A recipe's name is all it takes, and what a run records of its config starts the same run again."""
    parsed = parse({"name": name})
    assert parsed.algorithm.name == name
    assert config.parse(parsed.model_dump(mode="json")) == parsed


def test_every_preset_has_a_name_and_every_name_a_preset() -> None:
    """The type that documents the names and the table that fills them agree."""
    assert set(get_args(Preset)) == set(PRESETS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"advantage": {"type": "grpo", "normalize_by_std": True}, "aggregation": "token-mean", "kl": None}),
        (
            "dr_grpo",
            {"advantage": {"type": "grpo", "normalize_by_std": False}, "aggregation": "seq-mean-token-sum-norm"},
        ),
        ("gspo", {"policy_loss": {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}}),
        ("rloo", {"advantage": {"type": "rloo"}, "policy_loss": {"type": "reinforce"}}),
        ("remax", {"advantage": {"type": "remax"}}),
    ],
)
def test_presets_say_what_their_papers_say(name: str, expected: dict[str, Any]) -> None:
    """Spot checks of what defines each recipe."""
    dumped = parse({"name": name}).algorithm.model_dump(mode="json")
    assert {key: dumped[key] for key in expected} == expected


def test_given_options_win_over_the_preset_and_keep_the_rest_of_it() -> None:
    """One changed key of a section leaves the others as the recipe has them; another type takes none of them."""
    changed = parse({"name": "dapo", "policy_loss": {"clip_low": 0.1}}).algorithm
    assert (changed.policy_loss.clip_low, changed.policy_loss.clip_high) == (0.1, 0.28)
    other = parse({"name": "dapo", "policy_loss": {"type": "cispo"}}).algorithm
    assert other.policy_loss.model_dump() == {"type": "cispo", "clip_low": 0.2, "clip_high": 0.2}
    assert parse({"name": "ppo", "kl": None}).algorithm.kl is None


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "grppo"}, "algorithm.name='grppo': input should be 'grpo'"),
        ({"advantage": {"type": "grpp"}}, "advantage.type 'grpp' is not built in; did you mean 'grpo'?"),
        ({"advantage": {"type": "grpo", "normalise_by_std": True}}, "did you mean 'normalize_by_std'?"),
        ({"plugins": ["mine.py"]}, "plugins have no effect"),
        ({"policy_loss": {"clip_high": 0.3}}, "clip_high has no effect with one update per step"),
        ({"advantage": {"type": "gae"}}, "advantage gae needs a critic"),
        ({"critic": {"type": "model"}}, "critic has no effect with advantage grpo"),
        ({"kl": {"estimator": "k1"}}, "the gradient of k1 averages to zero"),
        ({"kl": {"estimator": "k3+", "where": "reward"}}, "k3+ only changes a gradient"),
        ({"kl": {"controller": {"type": "adaptive"}}}, "algorithm.kl.controller.target: missing"),
        ({"kl": {"controller": {"type": "adaptve"}}}, "type must be one of 'fixed', 'adaptive'"),
        ({"correction": {}}, "corrects nothing"),
        (
            {"correction": {"mode": "bypass", "importance": {}}},
            "their ratio, which importance and rejection look at, is 1",
        ),
        (
            {"correction": {"importance": {"treatment": {"low": 0.5}}}},
            "treatment: type must be one of 'truncate', 'mask'",
        ),
        ({"correction": {"importance": {"treatment": {"type": "mask", "low": 3}}}}, "low=3 is not below high=2"),
        ({"correction": {"importance": {"treatment": {"type": "mask", "high": 0.4}}}}, "low=0.5 is not below high=0.4"),
        ({"correction": {"importance": {"treatment": {"type": "trunc"}}}}, "'trunc' is not built in; did you mean"),
        ({"correction": {"rejection": {"high": -1}}}, "rejects everything: k3 is never negative"),
        ({"correction": {"rejection": {"estimator": "k1", "low": 2, "high": 1}}}, "low=2 is not below high=1"),
        ({"correction": {"rejection": {"estimator": "k9", "high": 1}}}, "correction.rejection.estimator 'k9'"),
        ({"policy_loss": {"type": "dro", "beta": 1.0}}, "policy_loss.beta has no effect with one update"),
        (
            {"policy_loss": {"type": "kl_cov"}},
            "kl_cov penalises the distance to the old log-probs, which is 0 with one",
        ),
        (
            {"policy_loss": {"type": "kl_cov", "kl_coef": 2.0}},
            "raise num_epochs or num_mini_batches, or set type: rein",
        ),
        ({"policy_loss": {"type": "clip_cov", "cov_low": 5}}, "cov_low=5 is not below cov_high=5"),
        ({"policy_loss": {"type": "clip_cov", "cov_low": 2, "cov_high": 1}}, "so no token could be cut out"),
        ({"kl": {"estimator": "k2+"}}, "estimator k2+ is k2, value and gradient; use k2"),
        ({"kl": {"estimator": "k2+", "where": "reward"}}, "use k2"),
        ({"policy_loss": {"type": "clip_cov", "clip_low": 0.1}}, "policy_loss.clip_low has no effect with one update"),
        ({"name": "ppo", "num_mini_batches": 1, "critic": {"clip": 0.1}}, "critic.clip=0.1 has no effect"),
        (
            {"name": "ppo", "num_mini_batches": 1, "critic": {"clip": 0.1}, "correction": {"mode": "bypass"}},
            "critic.clip=0.1 has no effect",
        ),
        ({"policy_loss": {"type": "gmpo"}}, "policy_loss gmpo has one ratio a sequence"),
        (
            {"kl": {"controller": {"type": "adaptive", "target": 0.1, "horizon": 9}}},
            "horizon=9 is below the 64 rollouts",
        ),
        (
            {"shaping": {"group_filters": [{"type": "too_hard", "min_reward": i} for i in (0, 1)]}},
            "two group_filters have type too_hard",
        ),
        (
            {
                "shaping": {
                    "group_filters": [
                        {"type": "too_hard", "min_reward": 0.9},
                        {"type": "too_easy", "max_reward": 0.1},
                    ]
                }
            },
            "group_filters keep nothing",
        ),
        ({"correction": {"rejection": {"level": "token", "reduction": "sum", "high": 1}}}, "reduction has no effect"),
        ({"correction": {"rejection": {"low": -1, "high": 1}}}, "low has no effect with k3"),
        ({"shaping": {"group_filters": [{"type": "too_hrd", "min_reward": 1}]}}, "did you mean 'too_hard'?"),
        ({"shaping": {"group_filters": [{"type": "too_hard"}]}}, "shaping.group_filters.0.min_reward: missing"),
        ({"aggregation": "token_mean"}, "aggregation 'token_mean' is not built in; did you mean 'token-mean'?"),
        ({"kl": {"estimator": "k4"}}, "kl.estimator 'k4' is not built in;"),
        ({"name": "gspo", "aggregation": "token-mean"}, "set aggregation: seq-mean-token-mean"),
        ({"shaping": {"overlong": {"buffer": 1000}}}, "overlong.buffer=1000 is over rollout.max_new_tokens=256"),
        ({"num_mini_batches": 9}, "leaves a mini-batch empty"),
    ],
)
def test_what_cannot_work_or_does_nothing_is_refused(algorithm: dict[str, Any], message: str) -> None:
    """Each refusal names the key, the value and the way out."""
    with pytest.raises(ConfigError) as refusal:
        parse(algorithm)
    assert message in str(refusal.value)


def test_a_group_of_one_is_refused_where_rollouts_are_compared() -> None:
    """PPO samples a prompt once; GRPO would have nothing to compare with, nor would dynamic sampling."""
    single = {"group_size": 1}
    assert parse({"name": "ppo"}, rollout=single).rollout.group_size == 1
    with pytest.raises(ConfigError, match=r"rollout.group_size=1 with algorithm.advantage grpo"):
        parse({"name": "grpo"}, rollout=single)
    with pytest.raises(ConfigError, match="dynamic_sampling drops every group of one"):
        parse({"name": "ppo", "shaping": {"dynamic_sampling": {}}}, rollout=single)


def test_a_type_of_a_plugin_takes_whatever_options_it_has() -> None:
    """Which options a user's function has is only known once its file is loaded."""
    parsed = parse({"advantage": {"type": "mine", "scale": 2}, "plugins": ["mine.py"]})
    assert parsed.algorithm.advantage.model_dump() == {"type": "mine", "scale": 2}


@pytest.mark.parametrize(
    ("algorithm", "on_policy"),
    [
        ({}, True),
        ({"num_epochs": 2}, False),
        ({"num_mini_batches": 2}, False),
        ({"correction": {"mode": "bypass"}}, False),
    ],
)
def test_one_update_is_on_policy_unless_the_engine_s_log_probs_stand_for_the_old_ones(
    algorithm: dict[str, Any], on_policy: bool
) -> None:
    """Then the ratio is 1, and the pass over old log-probs can be left out."""
    assert parse(algorithm).algorithm.is_on_policy is on_policy


def test_what_moves_from_the_old_log_probs_lets_kl_cov_act() -> None:
    """A second update of the step, or the engine's log-probs for the old ones."""
    for more in ({"num_epochs": 2}, {"num_mini_batches": 2}, {"correction": {"mode": "bypass"}}):
        assert parse({"policy_loss": {"type": "kl_cov"}, **more}).algorithm.policy_loss.kl_coef == 1.0


def test_options_of_clip_cov_that_act_on_policy_are_let_through() -> None:
    """It cuts tokens by covariance whatever the ratio."""
    changed = parse({"policy_loss": {"type": "clip_cov", "cov_ratio": 0.01}}).algorithm
    assert changed.policy_loss.cov_ratio == 0.01
