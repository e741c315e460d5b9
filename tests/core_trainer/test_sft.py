"""Supervised fine-tuning: what is learnt from, the loss and its gradient, and that it learns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core_trainer import checkpoint, models, sft
from core_trainer.batching import TrainSample
from core_trainer.job import Job
from core_trainer.workers.base import Place
from core_trainer.workers.sft import SftWorker
from rlinsight import config, telemetry
from rlinsight.config import SftConfig, SftDataSection, SftTrainerSection
from rlinsight.errors import ConfigError, DataError
from tests.tiny import END_OF_TURN, make_tokenizer

TOKENIZER = make_tokenizer()
ROWS = [
    {"prompt": "1 + 2?", "answer": "It is 3."},
    {"prompt": "Say a word.", "answer": "fox"},
    {"prompt": "Count the birds, please.", "answer": "There are seventeen birds."},
    {"prompt": "x", "answer": 7},
]


def load(path: Path, rows: list[dict[str, Any]] = ROWS, context: int | None = None, **options: Any) -> Any:
    file = path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sft.load_examples(SftDataSection(train=str(file), **options), TOKENIZER, 1, context)


def make_worker(model: Path, path: Path, resume: Path | None = None, **trainer: Any) -> SftWorker:
    """A worker in this process, in float32."""
    tree = {
        "model": {"source": str(model), "compute_dtype": "float32", "lora": trainer.pop("lora", None)},
        "data": {"train": "d.jsonl"},
        "trainer": {"total_steps": 100, **trainer},
    }
    job = Job(run_id="r", attempt=1, run_dir=path, spool_dir=path / "spool", collector=None)
    worker = SftWorker(Place("policy", 0, 1), job, config.parse(tree, "config", SftConfig), {})
    worker.start(model, resume, None)
    torch.set_num_threads(1)  # the tensors are small
    return worker


@pytest.fixture(autouse=True)
def _no_telemetry_left() -> Iterator[None]:
    yield
    telemetry.shutdown(0)


def update(worker: SftWorker, samples: list[TrainSample], step: int) -> float:
    loss = worker.forward_backward(sft.weighted(samples))
    worker.optim_step(step)
    return loss


# Examples ------------------------------------------------------------------------------------------------------------


def test_a_response_is_what_the_model_would_have_sampled(tmp_path: Path) -> None:
    """The prompt ends with the template's opening of the answer; the response's tokens and the end of turn follow."""
    prompt, sample = load(tmp_path)[0]
    assert prompt.text.endswith("1 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert sample.prompt_token_ids.tolist() == list(prompt.token_ids)
    assert TOKENIZER.decode(sample.token_ids) == "It is 3." + END_OF_TURN
    assert sample.loss_mask.all()
    assert TOKENIZER.decode(load(tmp_path)[3][1].token_ids) == "7" + END_OF_TURN


def test_rows_that_cannot_be_learnt_are_named(tmp_path: Path) -> None:
    """No response, one that is too long, and an example beyond the model's context."""
    for row in ({"prompt": "a"}, {"prompt": "a", "answer": ""}):
        with pytest.raises(DataError, match=r"prompt d/1 has no response in 'answer'"):
            load(tmp_path, [ROWS[0], row])
    with pytest.raises(DataError, match=r"the response of d/0 has \d+ tokens, over data.max_response_tokens=3"):
        load(tmp_path, max_response_tokens=3)
    kept = load(tmp_path, max_response_tokens=3, overlong_responses="drop")
    assert [prompt.prompt_id for prompt, _ in kept] == ["d/3"]
    with pytest.raises(DataError, match="all 1 responses"):
        load(tmp_path, ROWS[:1], max_response_tokens=3, overlong_responses="drop")
    with pytest.raises(DataError, match=r"example d/0 has \d+ tokens, over the model's context of 8"):
        load(tmp_path, context=8)


def test_a_model_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    """A response nothing ends would teach the model to go on for ever."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = None, None
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(ROWS[0]))
    with pytest.raises(ConfigError, match="no token that ends a response"):
        sft.load_examples(SftDataSection(train=str(file)), tokenizer, 1, None)


def test_the_held_out_are_the_same_each_time_and_never_trained_on(tmp_path: Path) -> None:
    """By seed, in file order, the share that was asked for; a split that leaves one side empty is refused."""
    examples = load(tmp_path, [{"prompt": f"p {i}", "answer": "a"} for i in range(20)])
    trained, held_out = sft.split(examples, 0.25, seed=1)
    ids = [prompt.prompt_id for prompt, _ in held_out]
    assert len(ids) == 5
    assert {prompt.prompt_id for prompt, _ in trained} == {f"d/{i}" for i in range(20)} - set(ids)
    assert [prompt.prompt_id for prompt, _ in sft.split(examples, 0.25, seed=1)[1]] == ids
    assert [prompt.prompt_id for prompt, _ in sft.split(examples, 0.25, seed=2)[1]] != ids
    assert sft.split(examples, 0.0, seed=1) == (examples, [])
    for fraction in (0.01, 0.99):
        with pytest.raises(DataError, match="holds out"):
            sft.split(examples, fraction, seed=1)


def test_epochs_become_steps() -> None:
    """The last step of an epoch takes from the next one, so that steps are whole; total_steps stands as it is."""
    assert sft.total_steps(SftTrainerSection(epochs=3, prompts_per_step=4), 10) == 8
    assert sft.total_steps(SftTrainerSection(total_steps=5), 10) == 5
    with pytest.raises(ConfigError, match="lr_schedule=cosine never begins: warmup_steps=2 of 2 steps"):
        sft.total_steps(SftTrainerSection(prompts_per_step=4, lr_schedule="cosine", warmup_steps=2), 8)


# Loss and learning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_budget", [40, 10_000])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(
    tmp_path: Path, tiny_model: Path, token_budget: int
) -> None:
    """Packed, in whatever micro-batches, it is transformers' own loss with the prompts masked, mean over tokens."""
    samples = [sample for _, sample in load(tmp_path)]
    samples.append(samples[0])  # an example twice in a step counts twice
    worker = make_worker(tiny_model, tmp_path, micro_batch_tokens=token_budget)
    loss = worker.forward_backward(sft.weighted(samples))

    model = models.load_model(tiny_model, torch.float32)
    total, count = torch.zeros(()), sum(len(sample.token_ids) for sample in samples)
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
        labels = ids.clone()
        labels[0, : len(sample.prompt_token_ids)] = -100
        total = total + model(input_ids=ids, labels=labels).loss * len(sample.token_ids)
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach() / count), rel=1e-5)
    assert worker.loss(samples) == pytest.approx(float(total.detach()), rel=1e-5)
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert torch.allclose(worker.optimizer.gradient, expected, atol=1e-6, rtol=1e-4)


def test_it_learns_to_answer(tmp_path: Path, tiny_model: Path) -> None:
    """The loss falls to nearly nothing, and greedy decoding of the saved model says each response and stops."""
    examples = load(tmp_path)
    samples = [sample for _, sample in examples]
    worker = make_worker(tiny_model, tmp_path, learning_rate=5e-3, warmup_steps=5)
    losses = [update(worker, samples, step) for step in range(1, 41)]
    assert losses[0] > 5
    assert losses[-1] < 0.05
    (tmp_path / "saved").mkdir()
    worker.save(tmp_path / "saved")
    model = models.load_model(tmp_path / "saved", torch.float32)
    for prompt, sample in examples:
        ids = torch.tensor([prompt.token_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == sample.token_ids.tolist()


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_resume_is_bitwise(tmp_path: Path, tiny_model: Path, lora: dict[str, int] | None) -> None:
    """Six updates equal three, a checkpoint, and three more from it: losses, weights and moments, adapters too."""
    samples = [sample for _, sample in load(tmp_path)]
    options = {"learning_rate": 1e-3, "warmup_steps": 5, "lora": lora}
    whole = make_worker(tiny_model, tmp_path, **options)
    losses = [update(whole, samples, step) for step in range(1, 7)]
    cut = make_worker(tiny_model, tmp_path, **options)
    for step in range(1, 4):
        update(cut, samples, step)
    path = checkpoint.write(tmp_path / "c", checkpoint.TrainerState(3, {}), cut.save, keep=1)
    checkpoint.resume(path, {})
    resumed = make_worker(tiny_model, tmp_path, path, **options)
    assert [update(resumed, samples, step) for step in range(4, 7)] == losses[3:]
    assert torch.equal(resumed.optimizer.master, whole.optimizer.master)
    for key, value in whole.optimizer.state_dict().items():
        assert torch.equal(resumed.optimizer.state_dict()[key], value), key
    assert resumed.optimizer.num_updates == 6
