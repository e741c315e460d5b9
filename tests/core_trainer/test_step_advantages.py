"""From the samples of a step to advantages: where rewards sit, what is taken off them, what a function is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_trainer.advantages import StepRewards, check_algorithm, correct, estimate
from core_trainer.algorithms import registry
from core_trainer.batching import TrainSample
from rlinsight import names
from rlinsight.config import AlgorithmSection
from rlinsight.config.correction import CorrectionSection
from rlinsight.errors import ConfigError

LENGTHS = (2, 3, 1, 4)  # tokens of the samples: two groups of two


def section(**options: Any) -> AlgorithmSection:
    return AlgorithmSection.model_validate(options)


def sample(index: int, length: int, **arrays: Any) -> TrainSample:
    """A sample of group index // 2; ``arrays`` are lists over its tokens."""
    kept: dict[str, Any] = {name: np.array(value, dtype=np.float32) for name, value in arrays.items()}
    mask = kept.pop("loss_mask", None)
    return TrainSample(
        rollout_id=f"r{index}",
        group_id=f"g{index // 2}",
        prompt_token_ids=np.arange(3),
        token_ids=np.arange(length),
        loss_mask=np.ones(length, dtype=bool) if mask is None else mask.astype(bool),
        rollout_log_probs=kept.pop("rollout_log_probs", np.full(length, -1, dtype=np.float32)),
        policy_version=0,
        **kept,
    )


def samples(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[TrainSample]:
    """With everything a function may ask for, and a token in each longer response that is not in the loss."""
    rng = np.random.default_rng(seed)
    made = []
    for i, length in enumerate(lengths):
        floats = {name: rng.normal(-1, 0.3, length) for name in ("old_log_probs", "ref_log_probs", "values")}
        floats |= {"rollout_log_probs": rng.normal(-1, 0.3, length), "sum_pi_squared": rng.uniform(0.1, 0.9, length)}
        mask = np.ones(length)
        mask[1:2] = length < 3
        made.append(sample(i, length, loss_mask=mask, **floats))
    return made


def rewards(*values: float, **others: Any) -> StepRewards:
    return StepRewards(torch.tensor(values, dtype=torch.float64), **others)


def advantages(made: list[TrainSample]) -> list[list[float]]:
    assert all(sample.advantages is not None and len(sample.advantages) == sample.num_tokens for sample in made)
    return [sample.advantages.tolist() for sample in made]  # type: ignore[union-attr]


def test_grpo_by_hand_leaves_tokens_off_the_mask_at_zero() -> None:
    """Rewards 1 and 0 in a group of two: +-sqrt(1/2); the step's mean |advantage| counts loss tokens only."""
    made = [sample(0, 2), sample(1, 3, loss_mask=[1, 0, 1]), sample(2, 1), sample(3, 1)]
    metrics = estimate(made, rewards(1, 0, 5, 5), section(), 0.0)
    half = 0.5**0.5 - 1e-6  # the std, 0.7071, grows by 1e-6
    assert advantages(made)[0] == pytest.approx([half, half], abs=1e-6)
    assert advantages(made)[1] == pytest.approx([-half, 0, -half], abs=1e-6)
    assert advantages(made)[2:] == [[0], [0]]
    assert metrics == {names.M_ADVANTAGE_ABS: pytest.approx(4 * half / 6, abs=1e-6)}
    assert all(each.returns is None for each in made)


def test_kl_in_the_reward_is_taken_off_each_token_by_hand() -> None:
    """k1 of old and reference is 0.5, 0.25 and, off the mask, 9; coef 2; rewards to go of reinforce with gamma 1."""
    made = [
        sample(0, 3, loss_mask=[1, 0, 1], old_log_probs=[-1, 0, -2], ref_log_probs=[-1.5, -9, -2.25]),
        sample(1, 1, old_log_probs=[-1], ref_log_probs=[-1]),
    ]
    algorithm = section(name="remax", kl={"coef": 2, "estimator": "k1", "where": "reward"})
    greedy = torch.tensor([0.25, 0.25], dtype=torch.float64)
    metrics = estimate(made, rewards(1, 0, greedy_rewards=greedy), algorithm, 2.0)
    assert made[0].returns.tolist() == [1 - 2 * 0.75, 0, 1 - 2 * 0.25]  # type: ignore[union-attr]
    assert advantages(made) == [[-0.5 - 0.25, 0, 0.5 - 0.25], [-0.25]]
    assert metrics[names.M_KL_REWARD] == pytest.approx(0.75 / 2)  # a rollout
    rloo = section(name="rloo", kl={"coef": 2, "estimator": "k1", "where": "reward"})
    estimate(made, rewards(1, 0), rloo, 2.0)
    assert advantages(made) == [[-0.5, 0, -0.5], [0.5]]  # rewards -0.5 and 0 against each other


def test_the_adapted_coefficient_counts_not_the_configured_one() -> None:
    """The caller's coefficient is used; 0 takes nothing off."""
    made = [sample(i, 1, old_log_probs=[-1], ref_log_probs=[-2 - i]) for i in range(2)]
    algorithm = section(name="rloo")
    estimate(made, rewards(1, 1), algorithm, 0.0)
    assert advantages(made) == [[0], [0]]
    estimate(made, rewards(1, 1), algorithm, 0.5)
    assert advantages(made) == [[0.5], [-0.5]]


def test_kl_in_the_loss_leaves_rewards_alone() -> None:
    """Only where: reward touches them."""
    made, plain = samples(), samples()
    estimate(made, rewards(1, 0, 0.5, 0.25), section(kl={"coef": 5}), 5.0)
    estimate(plain, rewards(1, 0, 0.5, 0.25), section(), 0.0)
    assert advantages(made) == advantages(plain)


def test_the_reward_sits_on_the_last_token_in_the_loss() -> None:
    """Also after rejection moved that token; of a rollout without loss tokens it is on the last one, and in no loss."""
    algorithm = section(name="remax", kl=None)
    made = [sample(0, 3, loss_mask=[1, 1, 0]), sample(1, 2, loss_mask=[0, 0])]
    zeros = torch.zeros(2, dtype=torch.float64)
    estimate(made, rewards(3, 7, greedy_rewards=zeros), algorithm, 0.0)
    assert advantages(made) == [[3, 3, 0], [0, 0]]
    gae = section(name="ppo", kl=None, advantage={"type": "gae", "lam": 0.5, "whiten": False})
    for each in made:
        each.values = np.zeros(each.num_tokens, dtype=np.float32)
    estimate(made, rewards(3, 7), gae, 0.0)
    assert advantages(made) == [[1.5, 3, 0], [0, 0]]


def test_rejection_moves_the_reward_and_the_mask() -> None:
    """Token k2 above 0.1 leaves the loss: the reward moves to the token before it, and weights are 0 there."""
    made = [
        sample(0, 2, old_log_probs=[-1, -2], rollout_log_probs=[-1, -1]),
        sample(1, 1, old_log_probs=[-1.25], rollout_log_probs=[-1]),
    ]
    rejection = {"level": "token", "estimator": "k2", "high": 0.1}
    metrics = correct(made, CorrectionSection.model_validate({"rejection": rejection}))
    assert [each.loss_mask.tolist() for each in made] == [[True, False], [True]]
    assert [each.weights.tolist() for each in made] == [[1, 0], [1]]  # type: ignore[union-attr]
    assert metrics[names.M_CORRECTION["rejected_token_fraction"]] == pytest.approx(1 / 3)
    assert metrics[names.M_CORRECTION["k1"]] == pytest.approx((0 + 1 + 0.25) / 3)
    algorithm = section(name="ppo", kl=None, advantage={"type": "gae", "lam": 0.5, "whiten": False})
    for each in made:
        each.values = np.zeros(each.num_tokens, dtype=np.float32)
    estimate(made, rewards(3, 7), algorithm, 0.0)
    assert advantages(made) == [[3, 0], [7]]


def test_importance_weights_by_hand() -> None:
    """exp(old - rollout), cut at 2, on loss tokens only; others are not weighed, which 0 would be."""
    made = [sample(0, 3, loss_mask=[1, 0, 1], old_log_probs=[-1, -1, 0], rollout_log_probs=[-1.5, 0, -1])]
    correct(made, CorrectionSection.model_validate({"importance": {"treatment": {"type": "truncate", "high": 2}}}))
    assert made[0].weights == pytest.approx([np.exp(0.5), 1, 2])
    assert made[0].loss_mask.tolist() == [True, False, True]


def test_weights_that_are_all_zero_have_no_effective_size() -> None:
    """0/0 is no number: the metric is absent."""
    made = [sample(0, 1, old_log_probs=[0], rollout_log_probs=[-9])]
    metrics = correct(made, CorrectionSection.model_validate({"importance": {"treatment": {"type": "mask"}}}))
    assert metrics[names.M_CORRECTION["weight_effective_sample_size"]] is None
    assert metrics[names.M_CORRECTION["weight_mean"]] == 0


def test_gdpo_gets_the_components_and_their_weights() -> None:
    """By hand: components (1, 0) and (0, 4) of weight 1 and 3 give +-(1 - 3) sqrt(1/2), whitened over the tokens."""
    made = [sample(0, 1), sample(1, 1)]
    parts = {
        "components": torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64),
        "component_weights": torch.tensor([1.0, 3.0], dtype=torch.float64),
    }
    estimate(made, rewards(1, 12, **parts), section(advantage={"type": "gdpo"}), 0.0)
    assert advantages(made)[0] == pytest.approx([-(0.5**0.5)], abs=1e-5)
    assert advantages(made)[1] == pytest.approx([0.5**0.5], abs=1e-5)


EVERY = [
    {"advantage": {"type": "grpo"}},
    {"advantage": {"type": "opo"}},
    {"advantage": {"type": "gdpo"}},
    {"advantage": {"type": "optimal_token_baseline"}},
    {"name": "rloo"},
    {"name": "reinforce_plus_plus"},
    {"name": "remax"},
    {"name": "ppo"},
]


def everything(order: list[int]) -> StepRewards:
    """Rewards of four samples in an order."""
    values = torch.tensor([1.0, 0.25, -0.5, 0.75], dtype=torch.float64)[order]
    parts = torch.tensor([[1, 0], [0, 0.25], [-1, 0.5], [0.5, 0.25]], dtype=torch.float64)[order]
    greedy = torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64)[order]
    return StepRewards(values, parts, torch.tensor([1.0, 2.0], dtype=torch.float64), greedy)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_the_order_of_samples_changes_nothing(options: dict[str, Any]) -> None:
    """Groups need not be adjacent: each sample gets the same advantage wherever it stands."""
    algorithm, order = section(**options), [2, 0, 3, 1]
    made, mixed = samples(), samples()
    first = estimate(made, everything([0, 1, 2, 3]), algorithm, 0.05)
    second = estimate([mixed[i] for i in order], everything(order), algorithm, 0.05)
    for a, b in zip(made, mixed, strict=True):
        assert b.advantages == pytest.approx(a.advantages, abs=1e-6)
        assert np.abs(a.advantages).max() > 1e-3  # type: ignore[arg-type]
        if a.returns is not None:
            assert b.returns == pytest.approx(a.returns, abs=1e-6)
    assert second == pytest.approx(first)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_what_is_off_the_mask_changes_nothing(options: dict[str, Any]) -> None:
    """Long tails outside the loss, with any values on them, leave every loss token's advantage as it is."""
    algorithm = section(**options)
    made, tailed = samples(), samples()
    for each in tailed:
        each.token_ids = np.arange(each.num_tokens + 7)
        each.loss_mask = np.concatenate([each.loss_mask, np.zeros(7, dtype=bool)])
        for name in ("old_log_probs", "ref_log_probs", "values", "sum_pi_squared", "rollout_log_probs"):
            tail = np.full(7, 0.5 if name == "sum_pi_squared" else -3, dtype=np.float32)
            setattr(each, name, np.concatenate([getattr(each, name), tail]))
    first = estimate(made, everything([0, 1, 2, 3]), algorithm, 0.05)
    second = estimate(tailed, everything([0, 1, 2, 3]), algorithm, 0.05)
    for a, b in zip(made, tailed, strict=True):
        assert b.advantages == pytest.approx(np.concatenate([a.advantages, np.zeros(7)]), abs=1e-6)  # type: ignore[list-item]
    assert second == pytest.approx(first)


BYPASS = {"mode": "bypass"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": {"type": "gdpo"}, "kl": {"where": "reward", "estimator": "k1"}}, "gdpo, which asks for no rew"),
        ({"advantage": {"type": "optimal_token_baseline"}, "correction": BYPASS}, "sum_pi_squared, which advantage"),
        ({"name": "ppo", "critic": {"type": "shared"}, "correction": BYPASS}, "values of critic type shared come"),
    ],
)
def test_combinations_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    """Before any worker starts, with what to change."""
    with pytest.raises(ConfigError, match=message):
        check_algorithm(section(**options), 2)


def plugin(folder: Path, name: str, parameters: str) -> Path:
    """A file that registers an advantage called ``name`` and an aggregation called ``by_<name>``."""
    file = folder / f"{name}.py"
    file.write_text(
        "from core_trainer.algorithms.registry import advantage, aggregation\n"
        f"@advantage('{name}')\ndef first({parameters}):\n    return rewards\n"
        f"@aggregation('by_{name}')\ndef second(num_loss_tokens):\n    return num_loss_tokens.double()\n"
    )
    return file


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.usefixtures("own_names")
def test_groups_of_one_are_refused_where_a_function_asks_for_groups(tmp_path: Path) -> None:
    """A plugin's, too; one that does not ask for them may have groups of one."""
    compares, alone = (plugin(tmp_path, *each) for each in (("compares", "rewards, groups"), ("alone", "rewards")))
    for name, plugins in (("compares", {"plugins": [compares]}), ("grpo", {})):
        check_algorithm(section(advantage={"type": name}, **plugins), 2)
        with pytest.raises(ConfigError, match=f"rollout.group_size=1 with algorithm.advantage {name}, which asks for"):
            check_algorithm(section(advantage={"type": name}, **plugins), 1)
    check_algorithm(section(advantage={"type": "alone"}, plugins=[alone]), 1)


@pytest.mark.usefixtures("own_names")
def test_each_plugin_has_an_effect(tmp_path: Path) -> None:
    """One of its functions is named; a file of which none is, beside one that is used, is refused with what it has."""
    used, other = (plugin(tmp_path, name, "rewards") for name in ("used", "other"))
    chosen = {"advantage": {"type": "used"}, "plugins": [used, other]}
    with pytest.raises(ConfigError, match=r"other.py has no effect: .*\(advantage 'other', aggregation 'by_other'\)"):
        check_algorithm(section(**chosen), 2)
    check_algorithm(section(**chosen, aggregation="by_other"), 2)


def test_the_rest_of_the_family_is_let_through() -> None:
    """Each preset as it is, and bypass with a critic of its own."""
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo"):
        check_algorithm(section(name=name), 2)
    check_algorithm(section(name="ppo", correction=BYPASS), 1)
