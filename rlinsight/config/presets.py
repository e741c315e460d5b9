"""Named recipes: what each fills of the algorithm section."""

from __future__ import annotations

from typing import Any, Literal

_KL_IN_REWARD = {"coef": 0.05, "estimator": "k1", "where": "reward"}
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, with the token mean and without the KL term that later work dropped (arXiv 2503.14476).
    "grpo": {"advantage": {"type": "grpo"}, "policy_loss": {"type": "ppo_clip"}},
    # arXiv 2503.20783: neither a rollout's length nor its group's std scales its gradient.
    "dr_grpo": {
        "advantage": {"type": "grpo", "normalize_by_std": False},
        "policy_loss": {"type": "ppo_clip"},
        "aggregation": "seq-mean-token-sum-norm",
    },
    # arXiv 2503.14476
    "dapo": {
        "advantage": {"type": "grpo"},
        "policy_loss": {"type": "ppo_clip", "clip_high": 0.28},
        "shaping": {"dynamic_sampling": {"max_rounds": 10}, "overlong": {}},
        "num_mini_batches": 4,
    },
    # arXiv 2507.18071
    "gspo": {
        "advantage": {"type": "grpo"},
        "policy_loss": {"type": "gspo"},
        "aggregation": "seq-mean-token-mean",
        "num_mini_batches": 4,
    },
    # arXiv 2506.13585: the lower bound is left open, the token mean is over the step.
    "cispo": {
        "advantage": {"type": "grpo"},
        "policy_loss": {"type": "cispo", "clip_low": 1.0},
        "num_mini_batches": 4,
    },
    # arXiv 2402.14740
    "rloo": {
        "advantage": {"type": "rloo"},
        "policy_loss": {"type": "reinforce"},
        "aggregation": "seq-mean-token-sum",
        "kl": _KL_IN_REWARD,
    },
    # arXiv 2501.03262
    "reinforce_plus_plus": {
        "advantage": {"type": "reinforce_plus_plus"},
        "policy_loss": {"type": "ppo_clip"},
        "kl": {**_KL_IN_REWARD, "coef": 0.01},
        "num_mini_batches": 4,
    },
    # arXiv 2310.10505
    "remax": {
        "advantage": {"type": "remax"},
        "policy_loss": {"type": "reinforce"},
        "aggregation": "seq-mean-token-sum",
        "kl": _KL_IN_REWARD,
    },
    # arXiv 1707.06347, with the KL of arXiv 2203.02155
    "ppo": {
        "advantage": {"type": "gae"},
        "policy_loss": {"type": "ppo_clip"},
        "kl": _KL_IN_REWARD,
        "critic": {"type": "model"},
        "num_mini_batches": 4,
    },
}  # fmt: skip
Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo"]


def fill(given: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``preset``, key by key; a section of another type takes nothing from the preset's."""
    filled = dict(given)
    for key, value in preset.items():
        if key not in given:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(given[key], dict):
            of_its_type = given[key].get("type", value.get("type")) == value.get("type")
            filled[key] = fill(given[key], value) if of_its_type else given[key]
    return filled
