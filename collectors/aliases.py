"""Other spellings of attributes and metrics we know, so that what foreign senders emit fills the same columns.

Owns the table. The raw row keeps what was sent; where an item carries both spellings, the known one counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlinsight import names

# sent as -> known as
ATTRIBUTES: Mapping[str, str] = {
    # GenAI conventions before 1.27, still in use by vLLM's and older instrumentations' spans
    "gen_ai.usage.prompt_tokens": names.INPUT_TOKENS,
    "gen_ai.usage.completion_tokens": names.OUTPUT_TOKENS,
    "gen_ai.request.id": names.REQUEST_ID,
    # OpenInference
    "llm.token_count.prompt": names.INPUT_TOKENS,
    "llm.token_count.completion": names.OUTPUT_TOKENS,
}

_METRIC_PREFIXES: Mapping[str, str] = {
    "ray_vllm_": "vllm:",  # vLLM's metrics through Ray's exporter, where a colon may not stand
    "ray_vllm:": "vllm:",
}


def metric_name(sent: str) -> str:
    """The known spelling of a metric's name; the name itself when it has no other."""
    for prefix, known in _METRIC_PREFIXES.items():
        if sent.startswith(prefix):
            return known + sent.removeprefix(prefix)
    return sent
