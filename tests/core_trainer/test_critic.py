"""The critic worker's loss is the one configured, however it is cut; it learns; it resumes bit for bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

from core_trainer import value_model
from core_trainer.batching import TrainSample
from core_trainer.job import Job
from core_trainer.value_model import ValueStats
from core_trainer.workers.base import Place
from core_trainer.workers.critic import CriticWorker
from core_trainer.workers.worker_group import free_port
from rlinsight import config, names, telemetry
from rlinsight.config import ModelSection
from rlinsight.config.critic import CriticSection, ModelCritic
from rlinsight.errors import CheckpointError, ConfigError, ModelError
from tests.core_trainer.test_value_model import naive_values, valued_samples


@pytest.fixture(autouse=True)
def _telemetry_ends() -> Iterator[None]:
    yield
    telemetry.shutdown(0)


def make_worker(
    source: Path,
    path: Path,
    *,
    resume: Path | None = None,
    rank: int = 0,
    ranks: int = 1,
    port: int | None = None,
    compute_dtype: str = "float32",
    trainer: dict[str, Any] | None = None,
    **critic: Any,
) -> CriticWorker:
    """A worker in this process."""
    tree = {
        "model": {"source": str(source), "compute_dtype": compute_dtype},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "trainer": trainer or {},
    }
    job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None)
    section = ModelCritic(type="model", **critic)
    worker = CriticWorker(Place("critic", rank, ranks), job, config.parse(tree), section, {})
    worker.start(source, resume, port)
    torch.set_num_threads(1)  # at these sizes more of them only wait for each other
    return worker


@pytest.mark.parametrize("token_budget", [20, 10_000])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_and_statistics_equal_a_naive_loop(
    tmp_path: Path, tiny_model: Path, token_budget: int, clip: float | None
) -> None:
    """Clip, masks and weights all act, whatever the micro-batches."""
    worker = make_worker(tiny_model, tmp_path, clip=clip, trainer={"micro_batch_tokens": token_budget})
    samples = valued_samples()
    stats: ValueStats = worker.forward_backward(samples)

    model = value_model.load(tiny_model, worker.seed)
    total, num_clipped = torch.zeros(()), 0
    for sample in samples:
        for t, value in enumerate(naive_values(model, sample)):
            if not sample.loss_mask[t]:
                continue
            old, target = float(sample.values[t]), float(sample.returns[t])  # type: ignore[index]
            error = (value - target) ** 2
            if clip is not None:
                bound = min(max(value.item(), old - clip), old + clip)
                if bound != value.item() and abs(bound - target) > abs(value.item() - target):
                    error, num_clipped = torch.tensor((bound - target) ** 2), num_clipped + 1
            total = total + sample.token_weight * 0.5 * error
    total.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(worker.optimizer.gradient, expected, atol=2e-5, rtol=1e-3)
    assert stats.loss == pytest.approx(total.item(), rel=1e-4)
    assert stats.num_clipped == num_clipped
    assert (num_clipped > 0) == (clip is not None)
    assert stats.num_tokens == sum(int(s.loss_mask.sum()) for s in samples)


def test_values_are_those_of_plain_sequences(tmp_path: Path, tiny_model: Path) -> None:
    """In the order of the samples; nothing to value is no error, which is what a rank without groups gets."""
    worker = make_worker(tiny_model, tmp_path, trainer={"micro_batch_tokens": 20})
    model = value_model.load(tiny_model, worker.seed)
    samples = valued_samples()
    for mine, sample in zip(worker.values(samples)["values"], samples, strict=True):
        np.testing.assert_allclose(mine, naive_values(model, sample).detach().numpy(), atol=1e-5)
    assert worker.values([]) == {"values": []}
    assert worker.forward_backward([]) == ValueStats()


def test_bfloat16_keeps_the_head_in_float32(tmp_path: Path, tiny_model: Path) -> None:
    """Decoder weights are rounded, the head and the masters are not, before an update and after."""
    worker = make_worker(tiny_model, tmp_path, compute_dtype="bfloat16", learning_rate=1e-4)
    samples = valued_samples()
    exact = make_worker(tiny_model, tmp_path).values(samples)["values"]
    for mine, theirs in zip(worker.values(samples)["values"], exact, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, atol=0.02)
    worker.forward_backward(samples)
    worker.optim_step(1)
    assert {p.dtype for p in worker.decoder.parameters()} == {torch.bfloat16}
    masters = worker.optimizer.named_master(worker.model)
    assert torch.equal(masters["value_head.weight"], worker.head.weight)
    assert not torch.equal(masters["decoder.norm.weight"], worker.decoder.norm.weight.float())  # type: ignore[union-attr]


def test_what_the_critic_learned_from_is_recorded_on_demand(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One event per turn, under its rollout: advantage, values and returns; no number of a policy that did not run."""
    worker = make_worker(tiny_model, tmp_path, trainer={"micro_batch_tokens": 20})
    samples = valued_samples()
    for sample in samples:
        sample.turns = [(0, 0, 1), (1, 1, sample.num_tokens)] if sample.num_tokens > 1 else [(0, 0, 1)]
        sample.carrier = {"traceparent": sample.rollout_id}
        sample.policy_version = 3
    events: list[tuple[str, dict[str, Any], dict[str, str]]] = []
    monkeypatch.setattr(telemetry, "event", lambda name, found, carrier: events.append((name, found, carrier)))
    worker.forward_backward(samples)
    assert events == []
    worker.forward_backward(samples, record=True)
    assert sorted((found[names.ROLLOUT_ID], found[names.TURN_INDEX]) for _, found, _ in events) == sorted(
        (sample.rollout_id, turn[0]) for sample in samples for turn in sample.turns
    )
    by_id = {sample.rollout_id: sample for sample in samples}
    for name, found, carrier in events:
        sample = by_id[found[names.ROLLOUT_ID]]
        _, start, end = sample.turns[found[names.TURN_INDEX]]
        assert (name, carrier, found[names.POLICY_VERSION]) == (names.ROLLOUT_TRAINED, sample.carrier, 3)
        assert found[names.ADVANTAGE] == float(sample.advantages[start])  # type: ignore[index]
        for key, array in (
            (names.VALUES_ARRAY, sample.values),
            (names.RETURNS_ARRAY, sample.returns),
            (names.ADVANTAGES_ARRAY, sample.advantages),
        ):
            assert np.frombuffer(found[key], "<f4").tolist() == array[start:end].tolist()  # type: ignore[index]
        assert np.frombuffer(found[names.LOSS_MASK], "u1").tolist() == sample.loss_mask[start:end].tolist()
        assert {names.LOG_PROBS_ARRAY, names.ENTROPY_ARRAY, names.CLIPPED_ARRAY}.isdisjoint(found)


def test_recomputed_layers_change_no_bit(tmp_path: Path, tiny_model: Path) -> None:
    """trainer.gradient_checkpointing reaches the critic, and gives the same loss and gradient."""
    gradients = []
    for recompute in (False, True):
        worker = make_worker(tiny_model, tmp_path, trainer={"gradient_checkpointing": recompute})
        calls = count_calls(worker.decoder)
        stats = worker.forward_backward(valued_samples())
        gradients.append((stats, calls[0], worker.optimizer.gradient))
    (plain, once, expected), (same, twice, gradient) = gradients
    assert plain == same
    assert twice == 2 * once
    assert torch.equal(gradient, expected)


def count_calls(decoder: torch.nn.Module) -> list[int]:
    """A counter of how often the first layer's attention runs."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    decoder.layers[0].self_attn.register_forward_hook(count)  # type: ignore[index,union-attr]
    return calls


def test_it_learns_fixed_returns(tmp_path: Path, tiny_model: Path) -> None:
    """Returns that depend on the prompt and on the token reached are explained by more than 90%."""
    worker = make_worker(tiny_model, tmp_path, learning_rate=3e-3, clip=None)
    samples = valued_samples()
    rng = np.random.default_rng(0)
    num_tokens = sum(sample.num_tokens for sample in samples)
    for sample in samples:
        sample.loss_mask[:] = True
        sample.token_weight = 1 / num_tokens
        state = np.concatenate([sample.prompt_token_ids[-1:], sample.token_ids[:-1]])  # all the value has seen last
        sample.returns = (state % 7 + rng.normal(0, 0.1, len(state))).astype(np.float32)

    def stats() -> ValueStats:
        for sample, values in zip(samples, worker.values(samples)["values"], strict=True):
            sample.values = values
        return worker.forward_backward(samples)

    first = stats()
    for step in range(1, 41):
        worker.optim_step(step)
        last = stats() if step == 40 else worker.forward_backward(samples)
    assert first.explained_variance is not None
    assert first.explained_variance < 0.1
    assert last.explained_variance is not None
    assert last.explained_variance > 0.9
    assert last.loss < first.loss / 10


def train(worker: CriticWorker, steps: range) -> list[float]:
    """Losses of some updates; the targets are another for each step."""
    losses = []
    for step in steps:
        losses.append(worker.forward_backward(valued_samples(step)).loss)
        worker.optim_step(step)
    return losses


def test_a_resumed_critic_is_the_uninterrupted_one(tmp_path: Path, tiny_model: Path) -> None:
    """Two updates, a checkpoint and two more give the losses, weights and moments of four updates, bit for bit."""
    trainer = {"warmup_steps": 3, "weight_decay": 0.1}
    whole = make_worker(tiny_model, tmp_path, learning_rate=1e-3, trainer=trainer)
    half = make_worker(tiny_model, tmp_path, learning_rate=1e-3, trainer=trainer)
    losses = train(whole, range(1, 5))
    first = train(half, range(1, 3))
    saved = tmp_path / "critic"
    saved.mkdir()
    half.save(saved)
    resumed = make_worker(tiny_model, tmp_path, resume=saved, learning_rate=1e-3, trainer=trainer)
    assert first + train(resumed, range(3, 5)) == losses
    assert torch.equal(resumed.optimizer.master, whole.optimizer.master)
    assert resumed.optimizer.num_updates == whole.optimizer.num_updates == 4
    for key, value in whole.optimizer.state_dict().items():
        assert torch.equal(resumed.optimizer.state_dict()[key], value), key
    again = tmp_path / "again"
    again.mkdir()
    resumed.save(again)  # a resumed critic saves from the checkpoint's files
    assert {file.name for file in again.iterdir()} == {file.name for file in saved.iterdir()}


def test_torn_state_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """A checkpoint whose critic has no head, or moments that are cut off or another model's, is not resumed."""
    saved = tmp_path / "critic"
    saved.mkdir()
    worker = make_worker(tiny_model, tmp_path)
    train(worker, range(1, 2))
    worker.save(saved)
    moments = (saved / "optimizer.safetensors").read_bytes()
    (saved / "optimizer.safetensors").write_bytes(moments[:-3])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is unreadable"):
        make_worker(tiny_model, tmp_path, resume=saved)
    (saved / "optimizer.safetensors").write_bytes(moments)
    state = load_file(saved / "optimizer.safetensors")
    cut = {key: value[:-1] if value.numel() > 1 else value for key, value in state.items()}
    versions = {"num_updates": "1", "policy_version": "1"}
    save_file(cut, saved / "optimizer.safetensors", metadata=versions)
    with pytest.raises(CheckpointError, match="the model needs"):
        make_worker(tiny_model, tmp_path, resume=saved)
    (saved / value_model.HEAD).unlink()
    with pytest.raises(ModelError, match="has no value_head"):
        make_worker(tiny_model, tmp_path, resume=saved)


# Ranks ---------------------------------------------------------------------------------------------------------------


def ranks_of(samples: list[TrainSample]) -> list[list[TrainSample]]:
    """Groups 0 and 2 to one rank, the others to the other."""
    parts = [[s for s in samples if s.group_id in groups] for groups in ({"g0", "g2"}, {"g1", "g3"})]
    assert sum(map(len, parts)) == len(samples)
    return parts


def test_gradients_and_statistics_of_parts_add_up(tmp_path: Path, tiny_model: Path) -> None:
    """What two ranks accumulate sums to what one does, and so do their statistics."""
    samples = valued_samples()
    one = make_worker(tiny_model, tmp_path, clip=0.2)
    whole = one.forward_backward(samples)
    parts, gradient = ValueStats(), torch.zeros_like(one.optimizer.gradient)
    for part in ranks_of(samples):
        worker = make_worker(tiny_model, tmp_path, clip=0.2)
        parts = parts.merge(worker.forward_backward(part))
        gradient += worker.optimizer.gradient
    torch.testing.assert_close(gradient, one.optimizer.gradient, atol=1e-6, rtol=1e-5)
    assert parts.metrics(1) == pytest.approx(whole.metrics(1), rel=1e-5)
    assert (parts.num_tokens, parts.num_clipped) == (whole.num_tokens, whole.num_clipped)


def run_rank(rank: int, port: int, source: Path, path: Path) -> None:
    """Two updates on this rank's groups; rank 0 saves."""
    worker = make_worker(source, path, rank=rank, ranks=2, port=port, clip=0.2, learning_rate=1e-3)
    for step in (1, 2):
        worker.forward_backward(ranks_of(valued_samples(step))[rank])
        worker.optim_step(step)
    save_file({"master": worker.optimizer.master}, path / f"rank-{rank}.safetensors")
    telemetry.shutdown(0)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_the_critic_one_would(tmp_path: Path, tiny_model: Path) -> None:
    """Gradients meet over gloo: both ranks end with the same bits, and with one rank's weights up to rounding."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    ranks = [context.Process(target=run_rank, args=(rank, port, tiny_model, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    first, second = (load_file(tmp_path / f"rank-{rank}.safetensors")["master"] for rank in range(2))
    assert torch.equal(first, second)
    one = make_worker(tiny_model, tmp_path, clip=0.2, learning_rate=1e-3)
    train(one, range(1, 3))
    # AdamW's first updates are the sign of the gradient: where it is 0 but for rounding, they may differ by 2 lr each.
    apart = (one.optimizer.master - first).abs()
    assert float(apart.max()) <= 4e-3
    assert float((apart > 1e-5).float().mean()) < 1e-3


# Config --------------------------------------------------------------------------------------------------------------


def test_the_sections_say_what_they_refuse() -> None:
    """A revision without a source, warm-up of a shared critic and a clip of 0 are errors; defaults reload."""
    sections: TypeAdapter[Any] = TypeAdapter(CriticSection)
    for kind in ("model", "shared"):
        section = sections.validate_python({"type": kind})
        assert sections.validate_python(section.model_dump()) == section
    for bad, message in (
        ({"type": "model", "revision": "main"}, "has no effect without source"),
        ({"type": "shared", "warmup_steps": 3}, "Extra inputs are not permitted"),
        ({"type": "model", "clip": 0}, "greater than 0"),
        ({"type": "model", "coef": 0.5}, "Extra inputs are not permitted"),
    ):
        with pytest.raises(ValidationError, match=message):
            sections.validate_python(bad)


def test_the_critic_starts_from_the_policys_model_unless_told() -> None:
    """A source of its own brings its own revision, and leaves precision as it is for the policy."""
    policy = ModelSection(source="a/policy", revision="v1", compute_dtype="float32")
    assert ModelCritic(type="model").model_section(policy) == policy
    own = ModelCritic(type="model", source="a/critic").model_section(policy)
    assert (own.source, own.revision, own.compute_dtype) == ("a/critic", None, "float32")


@pytest.mark.parametrize(
    ("trainer", "warmup_steps", "message"),
    [
        ({"total_steps": 4}, 4, "warmup_steps=4 of trainer.total_steps=4 leaves the policy no step"),
        ({"total_steps": 9, "warmup_steps": 5, "lr_schedule": "linear"}, 4, "lr_schedule=linear never begins"),
        ({"total_steps": 4}, 3, None),
        ({"total_steps": 9, "warmup_steps": 4, "lr_schedule": "linear"}, 4, None),
    ],
)
def test_warmup_leaves_the_policy_steps_to_learn_in(trainer: dict[str, Any], warmup_steps: int, message: str | None):
    """At least one, and one after its own warm-up where a schedule follows."""
    tree = {
        "model": {"source": "nowhere"},
        "data": {"train": "d.jsonl"},
        "reward": {"functions": [{"type": "numeric"}]},
        "algorithm": {"name": "ppo", "critic": {"type": "model", "warmup_steps": warmup_steps}},
        "trainer": trainer,
    }
    if message is None:
        assert config.parse(tree).trainer.total_steps == trainer["total_steps"]
    else:
        with pytest.raises(ConfigError, match=message):
            config.parse(tree)
