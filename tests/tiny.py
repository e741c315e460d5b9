"""A tiny random Llama-like model in Hugging Face format, made without network, for tests that need a real model.

Owns: the weights (seeded, random), the byte-level BPE tokenizer trained on the text below, the chat template.
Does not own: what tests do with it; it knows nothing and answers noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = [
    "system\nYou are a helpful assistant.",
    "user\nWhat is 3 + 4? Answer with a number.",
    "assistant\nThe answer is 7.",
    "user\nState the final answer to the following arithmetic problem: 12 - 5 =",
    "assistant\nLet me think step by step. First, take 12 and subtract 5, which leaves 7. So the final answer is 7.",
    "The quick brown fox jumps over the lazy dog while seventeen birds watch from the old stone wall.",
    "Reinforcement learning samples several answers to one question, scores each of them and prefers the better ones.",
    "Count the apples, then the oranges, and write down how many pieces of fruit are in the basket altogether.",
    "Once upon a time there was a small village at the edge of the forest where everybody knew everybody else.",
]


def make_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE over ``_TEXT``: any text round-trips, every digit is its own token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=END_OF_TEXT, model_max_length=2048
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    directory: Path,
    *,
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """Write config, fp32 safetensors, tokenizer and generation config to ``directory`` and return it.

    The same arguments give the same bytes of weights. Leaves the global torch RNG as it was.
    """
    tokenizer = make_tokenizer(vocab_size)
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=ids[START_OF_TURN],
        eos_token_id=ids[END_OF_TURN],
        pad_token_id=ids[END_OF_TEXT],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ids[END_OF_TURN], pad_token_id=ids[END_OF_TEXT])
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
