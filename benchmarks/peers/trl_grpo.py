"""GRPO steps with TRL, timed. Runs in TRL's own environment; started by grpo_step.py.

python trl_grpo.py MODEL PROMPTS.jsonl STEPS     prints one JSON line: seconds of each step after the first
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Wall time of each step, generation included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_args, **_kwargs) -> None:
        """Called after the optimizer step."""
        self.ends.append(time.perf_counter())


def main() -> None:
    """Train and print the step times."""
    model_dir, prompts, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(torch.get_num_threads())
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    times = StepTimes()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        reward_funcs=lambda completions, **_: [float(len(completion[0]["content"]) % 2) for completion in completions],
        train_dataset=dataset,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=32,
            learning_rate=1e-5,
            beta=0.0,
            temperature=1.0,
            max_steps=steps + 1,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        callbacks=[times],
    )
    trainer.train()
    print(json.dumps([b - a for a, b in zip(times.ends, times.ends[1:], strict=False)]))


if __name__ == "__main__":
    main()
