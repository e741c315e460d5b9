"""From rollouts to mini-batches: nothing is lost, and weights are those of the whole step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core_trainer.batch import attach, balanced_groups, mini_batches, split_groups, to_samples
from core_trainer.batching import token_sample
from core_trainer.metrics import TokenStats, emit, rollout_metrics, token_stats
from core_trainer.types import Prompt, Rollout, Turn
from rlinsight import names, telemetry
from rlinsight.config import AlgorithmSection


def make_rollouts(groups: int = 6, size: int = 3, seed: int = 0) -> list[Rollout]:
    """Scored rollouts of random lengths."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for g in range(groups):
        prompt = Prompt(f"p/{g}", "p", "text", tuple(rng.integers(0, 99, 5).tolist()), "1")
        for j in range(size):
            length = int(rng.integers(1, 9))
            turn = Turn(f"t{g}{j}", prompt.token_ids, [1] * length, [-1.0] * length, "x", "stop", 3, 0, 0, 1)
            rollouts.append(Rollout(f"g{g}-r{j}", f"g{g}", j, prompt, [turn], {}, reward=float(rng.integers(0, 2))))
    return rollouts


def test_a_sample_of_tokens_alone() -> None:
    """Ids, log-probs and a mask over every token."""
    sample = token_sample("r", "g", [1, 2], [4, 5, 6], [-1.0, -2.0, -3.0])
    assert (sample.rollout_id, sample.group_id) == ("r", "g")
    assert (sample.prompt_token_ids.tolist(), sample.token_ids.tolist()) == ([1, 2], [4, 5, 6])
    assert sample.loss_mask.tolist() == [True] * 3
    np.testing.assert_array_equal(sample.rollout_log_probs, np.float32([-1, -2, -3]))


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 1), (3, 2), (2, 3), (1, 6)])
def test_every_sample_is_trained_once_with_step_wide_weights(ranks: int, parts: int) -> None:
    """Each epoch covers every sample once; weights of a mini-batch sum to 1 over its tokens on all ranks."""
    rollouts = make_rollouts()
    algorithm = AlgorithmSection(num_mini_batches=parts)
    samples = to_samples(rollouts)
    seen = []
    for batch in mini_batches(samples, ranks, algorithm, (1, 2, 0), 8):
        assert len(batch) == ranks
        flat = [sample for rank in batch for sample in rank]
        seen += [sample.rollout_id for sample in flat]
        assert sum(s.token_weight * s.loss_mask.sum() for s in flat) == pytest.approx(1.0)
    assert sorted(seen) == sorted(s.rollout_id for s in samples)


def test_shuffling_differs_by_epoch_and_repeats_by_seed() -> None:
    """Mini-batches differ between epochs and are the same for the same seed."""
    rollouts = make_rollouts()
    algorithm = AlgorithmSection(num_mini_batches=3)
    samples = to_samples(rollouts)

    def order(epoch: int) -> list[str]:
        return [s.rollout_id for b in mini_batches(samples, 1, algorithm, (1, 2, epoch), 8) for s in b[0]]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_the_number_of_ranks_changes_no_mini_batch() -> None:
    """Each optimizer step sees the same rollouts on one rank as on three."""
    rollouts = make_rollouts()
    algorithm = AlgorithmSection(num_mini_batches=2)
    samples = to_samples(rollouts)

    def steps(ranks: int) -> list[set[str]]:
        batches = mini_batches(samples, ranks, algorithm, (1, 2, 0), 8)
        return [{s.rollout_id for rank in batch for s in rank} for batch in batches]

    assert steps(1) == steps(3)


def test_splits_keep_groups_whole() -> None:
    """No group is cut between ranks, whatever their number."""
    samples = to_samples(make_rollouts())
    for parts in (1, 2, 4, 6):
        split = split_groups(samples, parts)
        assert [s.rollout_id for part in split for s in part] == [s.rollout_id for s in samples]
        owners = [{s.group_id for s in part} for part in split]
        assert sum(len(owner) for owner in owners) == 6


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_balanced_parts_hold_every_group_once_and_keep_order(parts: int) -> None:
    """Shares are the same each time, whole groups, in the samples' order; only spare ranks stay empty."""
    samples = to_samples(make_rollouts())
    split = balanced_groups(samples, parts)
    assert split == balanced_groups(samples, parts)
    assert sum(len({s.group_id for s in part}) for part in split) == 6
    order = [s.rollout_id for s in samples]
    assert all(
        [s.rollout_id for s in part] == [i for i in order if i in {s.rollout_id for s in part}] for part in split
    )
    assert sorted(s.rollout_id for part in split for s in part) == sorted(order)
    assert sum(not part for part in split) == max(0, parts - 6)


def test_balanced_parts_have_about_equal_tokens() -> None:
    """One group of long responses gets a rank to itself, where a cut by count would give it half of the others too."""
    rollouts = make_rollouts(groups=4, size=2)
    for rollout, length in zip(rollouts, (50, 50, 20, 15, 16, 14, 15, 15), strict=True):
        rollout.turns[0].token_ids = [1] * length
        rollout.turns[0].rollout_log_probs = [-1.0] * length
    samples = to_samples(rollouts)
    split = balanced_groups(samples, 2)
    assert [{s.group_id for s in part} for part in split] == [{"g0"}, {"g1", "g2", "g3"}]


@pytest.mark.parametrize("ranks", [1, 2, 5, 9])
def test_rank_results_come_back_to_their_samples(ranks: int) -> None:
    """Arrays computed by ranks land on their own samples, each in its field; a missing rank is an error."""
    samples = to_samples(make_rollouts())
    number = {sample.rollout_id: float(i) for i, sample in enumerate(samples)}
    parts = balanced_groups(samples, ranks)
    results = [
        {
            "ref_log_probs": [np.full(s.num_tokens, number[s.rollout_id]) for s in part],
            "values": [np.full(s.num_tokens, -number[s.rollout_id]) for s in part],
        }
        for part in parts
    ]
    attach(parts, results)
    for sample in samples:
        assert sample.ref_log_probs is not None
        assert sample.values is not None
        assert set(sample.ref_log_probs) == {number[sample.rollout_id]}
        assert set(sample.values) == {-number[sample.rollout_id]}
    with pytest.raises(ValueError, match="zip"):
        attach(parts, results[1:])


def test_fewer_groups_than_mini_batches_make_fewer_of_them() -> None:
    """When groups were dropped, no optimizer step is made of nothing."""
    algorithm = AlgorithmSection(num_mini_batches=4)  # type: ignore[call-arg]
    samples = to_samples(make_rollouts(groups=3))
    batches = list(mini_batches(samples, 1, algorithm, (1, 2, 0), 8))
    assert [len(batch[0]) for batch in batches] == [3, 3, 3]


def test_dr_grpo_divides_by_the_cap_on_length() -> None:
    """Its constant is the longest response there could be, not the longest there is."""
    algorithm = AlgorithmSection(name="dr_grpo")  # type: ignore[call-arg]
    samples = to_samples(make_rollouts(groups=2, size=2))
    list(mini_batches(samples, 1, algorithm, (1, 2, 0), 100))
    assert [sample.token_weight for sample in samples] == pytest.approx([1 / (4 * 100)] * 4)


def test_token_stats_by_hand_and_merged() -> None:
    """Sums over masked tokens; splitting a batch and merging gives the whole."""

    def stats(part: slice) -> TokenStats:
        mask = torch.tensor([True, True, False, True])[part]
        new, old = torch.tensor([-1.0, -2.0, -9.0, -0.5])[part], torch.tensor([-1.5, -2.0, 0.0, -0.5])[part]
        rollout = torch.tensor([-1.5, -2.5, 7.0, -0.5])[part]
        ones = torch.ones(4)[part]
        return token_stats(mask, new, old, rollout, new - 0.5, ones * 2, torch.exp(new - old), ones > 2, ones)

    whole = stats(slice(None))
    assert whole.num_tokens == 3
    assert whole.num_mismatched == 1
    assert whole.policy_kl == pytest.approx(np.exp(0.5) - 1.5)
    assert whole.rollout_kl == pytest.approx(np.exp(0.5) - 1.5)
    assert whole.ref_kl == pytest.approx(3 * (np.exp(-0.5) - 0.5))
    assert whole.ratio_max == pytest.approx(np.exp(0.5))
    assert whole.entropy == 6
    merged = stats(slice(0, 1)).merge(stats(slice(1, 3))).merge(stats(slice(3, 4)))
    algorithm = AlgorithmSection(kl={"coef": 0.1})  # type: ignore[call-arg, arg-type]
    assert merged.metrics(algorithm, 1) == pytest.approx(whole.metrics(algorithm, 1))
    assert stats(slice(2, 3)) == TokenStats()
    assert TokenStats().metrics(algorithm, 1)[names.M_ENTROPY] is None


def test_metrics_of_no_rollout_are_absent() -> None:
    """A step that samples nothing, as a controller of one's own may have, has no length either."""
    assert set(rollout_metrics([]).values()) == {None}


def test_a_metric_of_ones_own_is_recorded_as_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's say what they are; others are dimensionless means over steps."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(telemetry, "event", lambda name, attributes: seen.append(attributes))
    emit("replay/groups", 3.0)
    emit(names.M_GEN_TOKENS_PER_S, 2.0)
    columns = (names.METRIC_NAME, names.METRIC_AGG, names.METRIC_UNIT, names.METRIC_WEIGHT, names.METRIC_VALUE)
    assert [tuple(each[column] for column in columns) for each in seen] == [
        ("replay/groups", "mean", "1", "step", 3.0),
        (names.M_GEN_TOKENS_PER_S, "last", "{token}/s", "step", 2.0),
    ]


def test_rollout_metrics_by_hand() -> None:
    """Zero-variance groups, truncation and lengths count rollouts and groups, not tokens."""
    rollouts = make_rollouts(groups=2, size=2)
    for rollout, reward in zip(rollouts, (1.0, 1.0, 0.0, 1.0), strict=True):
        rollout.reward = reward
    rollouts[0].turns[0].finish_reason = "length"
    metrics = rollout_metrics(rollouts)
    assert metrics[names.M_REWARD_MEAN] == 0.75
    assert metrics[names.M_ZERO_VARIANCE] == 0.5
    assert metrics[names.M_TRUNCATED] == 0.25
