"""Attention over packed tokens, registered with transformers under the name ``rlinsight``.

Owns two computations, chosen by the ``layout`` object a caller passes through the model's keyword arguments:
``SharedPrefixLayout`` (training: prompts once per group, responses attending to their prompt and themselves) and
anything else with an ``attend`` method (the rollout engine's passes over its KV cache, and exact mode's training).

Scores are taken in the compute dtype and normalised in float32. Plain matmul and softmax: on CPU the backward of fused
attention in bfloat16 takes longer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from core_trainer.batching import SharedPrefixLayout
from rlinsight.errors import ModelError

NAME = "rlinsight"
OPTIONS = ("softcap", "s_aux", "sliding_window")  # of transformers' signature, that would change what is computed


class OwnLayout(Protocol):
    """A layout that computes attention itself, as the rollout engine's over its cache and exact mode's in training."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [Hq, N, D], key and value [Hkv, N, D] -> [N, Hq, D]."""
        ...


def enable(model: PreTrainedModel) -> None:
    """Make a model compute attention through this module.

    Raises ModelError for models whose attention or output this module does not express, rather than training them
    wrongly.
    """
    config = model.config
    for option in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, option, None) not in (None, 1, 1.0):
            raise ModelError(
                f"{config.model_type} models with {option}={getattr(config, option)} are not supported yet"
            )
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        raise ModelError(f"{config.model_type} models with sliding window attention are not supported yet")
    for kind in getattr(config, "layer_types", None) or []:
        if kind != "full_attention":
            raise ModelError(f"{config.model_type} models with layers of {kind} are not supported yet")
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"{config.model_type} models with a biased output layer are not supported yet")
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    _probe(model)


def kv_heads(config: PreTrainedConfig) -> int:
    """Heads of keys and values."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_size(config: PreTrainedConfig) -> int:
    """Numbers of a head's query, key and value, which are alike in every model that ``enable`` takes."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def _probe(model: PreTrainedModel) -> None:
    """Run two tokens: every layer must come here with its own index, and heads as the config has them."""
    seen = _Seen(model.config)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        model.get_decoder()(input_ids=tokens, position_ids=torch.arange(2)[None].to(model.device), layout=seen)
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{model.config.model_type} models are not supported yet: {error}") from None
    if seen.layers != list(range(model.config.num_hidden_layers)):
        raise ModelError(
            f"{model.config.model_type} models do not take their attention from outside; not supported yet"
        )


class _Seen:
    """A layout that notes which layers ask."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers.append(layer)
        sizes, expected = [x.shape[-1] for x in (query, key, value)], head_size(self.config)
        if sizes != [expected] * 3 or len(key) != kv_heads(self.config):
            raise ModelError(
                f"{self.config.model_type} models whose heads have a query of {sizes[0]}, a key of {sizes[1]} and a "
                f"value of {sizes[2]}, {len(key)} heads of keys, are not supported yet"
            )
        return torch.zeros_like(query).transpose(0, 1)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The layout says who attends to whom; no mask tensor is built."""


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: SharedPrefixLayout | OwnLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, N, Hq, D].

    Raises ModelError when a layer asks for what is not computed here; the probe's two tokens are enough for it.
    """
    if asked := [name for name in OPTIONS if options.get(name) is not None]:
        raise ModelError(f"attention with {asked[0]}, as {type(module).__name__} asks for, is not supported yet")
    if isinstance(layout, SharedPrefixLayout):
        out = shared_prefix_attention(query[0], key[0], value[0], layout, scaling)
    else:
        out = layout.attend(module.layer_idx, query[0], key[0], value[0], scaling)  # type: ignore[arg-type]
    return out[None], None


def shared_prefix_attention(q: Tensor, k: Tensor, v: Tensor, layout: SharedPrefixLayout, scaling: float) -> Tensor:
    """Causal attention of prompts, and of responses to their group's prompt and to themselves.

    q [Hq, N, D], k and v [Hkv, N, D], N packed tokens -> [N, Hq, D]. Equal to separate causal attention over each
    (prompt, response) sequence; the prompt's part is computed once per group.
    """
    (heads, _, dim), kv_heads = q.shape, k.shape[0]
    repeat = heads // kv_heads
    q, k, v = (x.transpose(0, 1) for x in (q * scaling, k, v))  # [N, H, D]
    num_prompt = layout.num_prompt_tokens
    groups, p = layout.prompt_rows.shape

    def prompts(x: Tensor) -> Tensor:  # [N, H, D] -> [G, H, P, D]
        rows = Pad.apply(x[:num_prompt], layout.prompt_rows, layout.prompt_unpad)
        return rows.view(groups, p, -1, dim).transpose(1, 2)  # type: ignore[union-attr]

    k_prompt, v_prompt = prompts(k), prompts(v)
    q_prompt = prompts(q).reshape(groups, kv_heads, repeat * p, dim)
    scores = (q_prompt @ k_prompt.transpose(-1, -2)).view(groups, kv_heads, repeat, p, p)
    weights = _softmax(scores + _causal(p, scores)).view(groups, kv_heads, repeat * p, p)
    rows = (weights @ v_prompt).view(groups, heads, p, dim).transpose(1, 2).reshape(groups * p, heads, dim)
    out: Tensor = Unpad.apply(rows, layout.prompt_rows, layout.prompt_unpad)  # type: ignore[assignment]
    if layout.response_rows is None or layout.response_unpad is None:
        return out

    _, n, length = layout.response_rows.shape

    def responses(x: Tensor) -> Tensor:  # [N, H, D] -> [G, Hkv, n, H / Hkv, L, D]
        rows = Pad.apply(x[num_prompt:], layout.response_rows, layout.response_unpad)
        return rows.view(groups, n, length, kv_heads, -1, dim).permute(0, 3, 1, 4, 2, 5)  # type: ignore[union-attr]

    q_response, k_response, v_response = responses(q), responses(k)[:, :, :, 0], responses(v)[:, :, :, 0]
    flat = q_response.reshape(groups, kv_heads, n * repeat * length, dim)
    own = q_response.reshape(groups, kv_heads, n, repeat * length, dim)
    # The whole group's queries meet the prompt's keys in one product; no key is copied per rollout.
    to_prompt = (flat @ k_prompt.transpose(-1, -2)).view(groups, kv_heads, n, repeat, length, p)
    to_prompt = to_prompt.masked_fill(layout.prompt_pad[:, None, None, None, None, :], float("-inf"))
    to_self = (own @ k_response.transpose(-1, -2)).view(groups, kv_heads, n, repeat, length, length)
    weights = _softmax(torch.cat([to_prompt, to_self + _causal(length, to_self)], dim=-1))
    from_prompt = weights[..., :p].reshape(groups, kv_heads, n * repeat * length, p) @ v_prompt
    from_self = weights[..., p:].reshape(groups, kv_heads, n, repeat * length, length) @ v_response
    total = from_prompt.view(groups, kv_heads, n, repeat, length, dim) + from_self.view(
        groups, kv_heads, n, repeat, length, dim
    )
    rows = total.permute(0, 2, 4, 1, 3, 5).reshape(groups * n * length, heads, dim)
    return torch.cat([out, Unpad.apply(rows, layout.response_rows, layout.response_unpad)])


class Pad(torch.autograd.Function):
    """Packed rows [N, H, D] to padded rows [slots, H, D]; the inverse gather is its backward.

    Padding repeats row 0. Its gradient is dropped: as a key it is masked, as a query its output is dropped. A plain
    index_select would add gradients row by row, which is slow on CPU.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return packed.index_select(0, rows.flatten())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class Unpad(torch.autograd.Function):
    """Padded rows [slots, H, D] to packed rows [N, H, D]; padding gets a gradient of exactly zero."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(rows, unpad)
        return padded.index_select(0, unpad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, unpad = ctx.saved_tensors
        if rows.numel() == unpad.numel():
            return grads[0].index_select(0, rows.flatten()), None, None
        padded = grads[0].new_zeros((rows.numel(), *grads[0].shape[1:]))
        return padded.index_copy_(0, unpad, grads[0]), None, None


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _causal(size: int, like: Tensor) -> Tensor:
    """[size, size]: 0 where a row may look, -inf after it."""
    return torch.full((size, size), float("-inf"), dtype=like.dtype, device=like.device).triu(1)
