"""One part of ``rlinsight check-model``, in a process of its own: training, with its reference, or an engine.

Reads a ``checks.Spec`` as JSON from standard input and writes JSON lines to standard output: ``stage`` while it works,
then ``report`` (with ``reference`` for the training part), or ``error`` when there is no such model. Whatever a library
prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from core_trainer import attention, models
from core_trainer.batching import TrainSample, micro_batches, pack, token_sample
from core_trainer.checks import Answer, Latency, Report, Spec, Timing, compare, gaps, judge, latency
from core_trainer.forward import log_probs, sample_log_probs
from core_trainer.rollout.build import build_engine
from core_trainer.rollout.engine import GenerateRequest, RolloutEngine
from core_trainer.rollout.sample import reason, sample_seed
from core_trainer.types import SamplingParams, Turn
from core_trainer.workers.base import use_threads
from rlinsight.config import DataSection, ModelSection, RolloutSection
from rlinsight.errors import ConfigError, ModelError, RlinsightError

Say = Callable[[str], None]

TOKEN_BUDGET = 4096  # of a forward pass of the trainer
ROUNDS = 4  # requests of each caller of the latency ladder
MIN_REQUESTS = 8  # of one step of it

PASSAGE = (
    "The harbour was built in the year 1274, when the river still ran north of the town.",
    "Ships brought salt, wool and iron, and left with grain from the fields behind the hills.",
    "Nobody kept a list of them before the fire, so we count the stones of the old quay instead.",
    "Each stone bears the mark of the mason who cut it, and a number.",
    "A mason cut about nine stones a month in summer, and four in winter.",
    "Later the river moved, the quay fell dry, and the market took its place.",
)
QUESTIONS = (
    "What is {a} + {b}? Answer with a number.",
    "Write one sentence about the number {a}.",
    "List {c} things one finds in house number {a}.",
    "Is {a} larger than {b}? Explain briefly.",
    "Write a Python function that adds {a} to its argument.",
    "Translate into French: I have {c} apples and {a} pears.",
    "What comes after {a}, {b}, {a}, {b}?",
)


def prompt_texts(count: int) -> list[str]:
    """Different questions, from one line to some paragraphs; always the same."""
    texts = []
    for i in range(count):
        question = QUESTIONS[i % len(QUESTIONS)].format(a=12 + 7 * i, b=95 - i, c=2 + i % 9)
        length = (0, 2, 0, 6, 1, 18, 3, 36)[i % 8]  # sentences after it: before it they would be a shared prefix
        texts.append(" ".join([question, *(PASSAGE[j % len(PASSAGE)] for j in range(length))]))
    return texts


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, new_tokens: int, context: int | None
) -> list[list[int]]:
    """Token ids of ``prompt_texts``, as a user's turn where there is a chat template, cut to the model's context."""
    room = None if context is None else context - new_tokens
    if room is not None and room < 1:
        raise ConfigError(f"--new-tokens {new_tokens} leaves no room for a prompt in a context of {context}; lower it")
    texts = prompt_texts(count)
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = [str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)) for turn in turns]
    encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
    return [ids[:room] for ids in encoded]  # the beginning is what tells them apart


class Loaded:
    """A model with what belongs to it."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        self.directory, self.dtype = directory, models.compute_dtype(spec.dtype)
        began = time.perf_counter()
        self.model = models.load_model(directory, self.dtype)
        models.to_accelerator(self.model)
        self.load_s = time.perf_counter() - began
        self.tokenizer = models.load_tokenizer(directory)
        self.stop_token_ids = models.end_of_turn_ids(self.model.generation_config, self.tokenizer)

    def report(self, part: str) -> Report:
        """With the facts of the model, not yet judged."""
        return Report(
            part,
            "failed",
            architecture=type(self.model).__name__,
            num_parameters=self.model.num_parameters(),
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def prompts(self, count: int, new_tokens: int) -> list[list[int]]:
        """So many that leave room for an answer."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        return make_prompts(self.tokenizer, count, new_tokens, context)


# Training ------------------------------------------------------------------------------------------------------------


def check_training(spec: Spec, directory: Path, say: Say) -> tuple[Report, list[Answer] | None]:
    """The trainer's forward against transformers', a backward pass, and transformers' greedy answers."""
    answers = None
    report = Report("training", "failed")
    try:
        say("training: loading the model")
        loaded = Loaded(spec, directory)
        report = loaded.report("training")
        report.load_s = loaded.load_s
        written = []
        for i, prompt in enumerate(loaded.prompts(spec.num_prompts, spec.new_tokens), start=1):
            say(f"training: transformers answers prompt {i} of {spec.num_prompts}")
            written.append(greedy(loaded.model, prompt, spec.new_tokens, loaded.stop_token_ids))
        answers = written
        say("training: forward and backward")
        attention.enable(loaded.model)
        samples = [token_sample(f"{i}", f"{i}", a.prompt, a.token_ids, a.log_probs) for i, a in enumerate(answers)]
        trained = sample_log_probs(loaded.model, samples, 1.0, TOKEN_BUDGET)
        report.num_prompts = len(answers)
        report.max_log_prob_gap, report.mean_log_prob_gap, report.num_tokens = gaps(
            [answer.log_probs for answer in answers], [list(row) for row in trained]
        )
        judge(report)
        if report.status == "ok" and (broken := broken_gradient(loaded.model, samples)):
            report.status, report.reason = "failed", broken
    except Exception as error:  # any library's, of any model: the check is there to tell it
        explain(report, error)
    return report, answers


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int, stop_token_ids: Sequence[int]) -> Answer:
    """Transformers' own greedy decoding of one prompt, alone and unpadded."""
    model.generation_config = GenerationConfig()  # a model's own may sample, or penalise repetition
    ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate  # whose type depends on its arguments
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=list(stop_token_ids) or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    tokens = out.sequences[0, len(prompt) :]
    rows = torch.log_softmax(torch.cat(out.logits).float(), dim=-1)  # [T, V]
    first, second = rows.topk(2, dim=-1).values.unbind(1)
    chosen = rows.gather(1, tokens[:, None])[:, 0]
    return Answer(prompt, tokens.tolist(), chosen.tolist(), (first - second).tolist())


def broken_gradient(model: PreTrainedModel, samples: Sequence[TrainSample]) -> str | None:
    """What is wrong with the gradient of one micro-batch's mean log-prob; None when nothing is."""
    batch = pack(next(micro_batches(samples, TOKEN_BUDGET)), model.device)
    log_probs(model, batch, 1.0)[0].mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if broken:
        return f"the gradient of {broken[0]} is not finite, nor are {len(broken) - 1} others"
    return None if any(gradient.any() for gradient in gradients.values()) else "no parameter gets a gradient"


# Engines -------------------------------------------------------------------------------------------------------------


def check_engine(spec: Spec, directory: Path, say: Say) -> Report:
    """Greedy parity, log-probs against the trainer's, speed and latency of one engine."""
    report, started = Report(spec.part, "failed"), False
    try:
        say(f"{spec.part}: loading the model")
        loaded = Loaded(spec, directory)
        report = loaded.report(spec.part)
        trains = True
        try:
            attention.enable(loaded.model)
        except ModelError:
            if spec.part == "native":  # which computes attention as training does
                raise
            trains = False
        prompts = [answer.prompt for answer in spec.reference or ()]
        prompts = prompts or loaded.prompts(spec.num_prompts, spec.new_tokens)
        for_ladder = loaded.prompts(num_requests(max(spec.concurrency)), spec.new_tokens)
        say(f"{spec.part}: starting")
        began = time.perf_counter()
        engine = start(spec, loaded, max(map(len, [*prompts, *for_ladder])))
        try:
            engine.sync_weights(0)
            started = True
            report.load_s = time.perf_counter() - began
            measure(report, spec, loaded, engine, prompts, for_ladder, trains, say)
        finally:
            engine.close()
        judge(report)
    except Exception as error:  # likewise, and the engine's own
        explain(report, error, started)
    return report


def start(spec: Spec, loaded: Loaded, longest: int) -> RolloutEngine:
    """The engine as a policy worker would build it."""
    rollout = RolloutSection(
        engine=spec.part,  # type: ignore[arg-type]  # pydantic checks it
        max_new_tokens=spec.new_tokens,
        max_batch_size=max(spec.num_prompts, *spec.concurrency),
    )
    data = DataSection(train="unused.jsonl", max_prompt_tokens=longest)
    replica = f"check/{spec.part}"
    return build_engine(rollout, data, loaded.model, loaded.tokenizer, loaded.directory, replica=replica)


def measure(
    report: Report,
    spec: Spec,
    loaded: Loaded,
    engine: RolloutEngine,
    prompts: list[list[int]],
    for_ladder: list[list[int]],
    trains: bool,
    say: Say,
) -> None:
    """Fill the report. ``trains``: whether the trainer can compute this model's log-probs."""
    report.num_prompts = len(prompts)
    say(f"{spec.part}: greedy answers")
    turns = asyncio.run(_answers(engine, prompts, SamplingParams(spec.new_tokens, temperature=0.0), "greedy"))
    if spec.reference:
        found = [(turn.token_ids, turn.rollout_log_probs) for turn in turns]
        report.parity, parted = compare(spec.reference, found)
        if parted is not None:
            pieces = [
                None if token is None else models.decode(loaded.tokenizer, [token], special=True)
                for token in (parted.expected_id, parted.found_id)
            ]
            report.divergence = replace(parted, expected_piece=pieces[0], found_piece=pieces[1])
    say(f"{spec.part}: sampled answers")
    engine.sync_weights(1)  # forgets what the greedy answers left in its caches
    began = time.perf_counter()
    sampled = asyncio.run(_answers(engine, prompts, SamplingParams(spec.new_tokens), "sampled"))
    report.tokens_per_s = sum(len(turn.token_ids) for turn in sampled) / (time.perf_counter() - began)
    if trains:
        say(f"{spec.part}: the trainer's log-probs")
        turns += sampled  # greedy tokens alone are all likely, and hide errors in the tails
        samples = [
            token_sample(f"{i}", f"{i}", t.prompt_token_ids, t.token_ids, t.rollout_log_probs)
            for i, t in enumerate(turns)
        ]
        trained = sample_log_probs(loaded.model, samples, 1.0, TOKEN_BUDGET)
        report.max_log_prob_gap, report.mean_log_prob_gap, report.num_tokens = gaps(
            [turn.rollout_log_probs for turn in turns], [list(row) for row in trained]
        )
    for step, concurrency in enumerate(spec.concurrency, start=2):
        say(f"{spec.part}: latency of {concurrency} at once")
        engine.sync_weights(step)
        report.latency.append(asyncio.run(_ladder(engine, for_ladder, spec.new_tokens, concurrency)))


async def _answers(engine: RolloutEngine, prompts: list[list[int]], params: SamplingParams, name: str) -> list[Turn]:
    """All prompts at once."""
    return await asyncio.gather(
        *(
            engine.generate(
                GenerateRequest(f"{name}-{i}", tuple(prompt), replace(params, seed=sample_seed(f"check/{i}")))
            )
            for i, prompt in enumerate(prompts)
        )
    )


def num_requests(concurrency: int) -> int:
    """Requests of one step of the ladder."""
    return max(MIN_REQUESTS, ROUNDS * concurrency)


async def _ladder(engine: RolloutEngine, prompts: list[list[int]], new_tokens: int, concurrency: int) -> Latency:
    """``concurrency`` callers, each with its next request as soon as its last one is answered.

    No prompt comes twice: the time to the first token would be the cache's.
    """
    waiting = deque(
        GenerateRequest(
            f"ladder-{concurrency}-{i}",
            tuple(prompts[i]),
            SamplingParams(new_tokens, seed=sample_seed(f"ladder/{i}")),
        )
        for i in range(num_requests(concurrency))
    )
    timings: list[Timing] = []

    async def caller() -> None:
        while waiting:
            request = waiting.popleft()
            timing = Timing(time.perf_counter(), [], [])
            async for chunk in engine.stream(request):
                if chunk.token_ids:
                    timing.arrivals.append(time.perf_counter())
                    timing.counts.append(len(chunk.token_ids))
            timings.append(timing)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return latency(concurrency, timings, time.perf_counter() - began)


# Process -------------------------------------------------------------------------------------------------------------


def explain(report: Report, error: Exception, started: bool = False) -> None:
    """Refused by us, by name, before it ``started``; else failed, as whatever library it was says."""
    refused = isinstance(error, RlinsightError) and not started
    report.status, report.reason = "refused" if refused else "failed", reason(error)


def main() -> None:
    """Entry point of the part's process."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print do not garble the answer

    def send(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    spec = Spec.parse(json.load(sys.stdin))
    use_threads(1)
    try:
        send(stage="finding the model")
        directory = models.resolve(ModelSection(source=spec.source))
        if spec.part == "training":
            report, answers = check_training(spec, directory, lambda text: send(stage=text))
            reference = None if answers is None else [asdict(answer) for answer in answers]
            send(report=asdict(report), reference=reference)
        else:
            send(report=asdict(check_engine(spec, directory, lambda text: send(stage=text))))
    except RlinsightError as error:  # of the model as such
        send(error=str(error))


if __name__ == "__main__":
    main()
