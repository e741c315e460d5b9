"""Model sources become local safetensors directories, or a one-line error."""

from __future__ import annotations

from pathlib import Path


def test_tiny_model_is_a_hugging_face_directory(tiny_model: Path) -> None:
    """The tiny model loads as any other, with one token per digit and the turn end as its eos."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
