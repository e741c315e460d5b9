"""Rollouts to micro-batches: packed tokens with each prompt stored once per group.

Owns the layout of one forward pass (which packed token is where) and the split of a mini-batch into micro-batches
under a token budget. Does no model maths; ``attention.py`` computes over the layout.

Packing: all prompts one after the other, then all responses without their last token, since nothing is predicted from
it. Nothing is padded outside attention, and a prompt shared by the rollouts of a group is computed once, forward and
backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class TrainSample:
    """One rollout as the update sees it: token ids, masks and scalars per token, no text."""

    rollout_id: str
    group_id: str
    prompt_token_ids: np.ndarray  # [P] int64
    token_ids: np.ndarray  # [T] int64, T >= 1
    loss_mask: np.ndarray  # [T] bool, true where the token enters the loss
    rollout_log_probs: np.ndarray  # [T] float32, from the engine
    policy_version: int  # of the weights that sampled it
    token_weight: float = 0.0  # weight of each loss token in the step's loss, see algorithms/aggregation.py
    old_log_probs: np.ndarray | None = None  # [T] float32; None: the update's own first forward is the anchor
    ref_log_probs: np.ndarray | None = None  # [T] float32
    sum_pi_squared: np.ndarray | None = None  # [T] float32, sum of the squared probabilities of all words
    values: np.ndarray | None = None  # [T] float32, the critic's before its update
    weights: np.ndarray | None = None  # [T] float32, importance weights; 0 on a rejected token
    advantages: np.ndarray | None = None  # [T] float32
    returns: np.ndarray | None = None  # [T] float32, what the critic learns
    # Of a policy loss that sees the whole mini-batch, before each update; see batch.set_losses and TokenLoss.
    token_loss: np.ndarray | None = None  # [T] float32
    loss_slope: np.ndarray | None = None  # [T] float32, gradient of the mini-batch's loss to the token's log-prob
    ratio: np.ndarray | None = None  # [T] float32
    clipped: np.ndarray | None = None  # [T] bool
    turns: list[tuple[int, int, int]] = field(default_factory=list)  # (turn index, start, end) into the T tokens
    carrier: dict[str, str] = field(default_factory=dict)  # trace context of the rollout

    @property
    def num_tokens(self) -> int:
        """Sampled tokens T."""
        return len(self.token_ids)


def token_sample(
    rollout_id: str, group_id: str, prompt: Sequence[int], token_ids: Sequence[int], log_probs: Sequence[float]
) -> TrainSample:
    """A sample of tokens alone, sampled by the first weights: every token enters the loss."""
    return TrainSample(
        rollout_id=rollout_id,
        group_id=group_id,
        prompt_token_ids=np.asarray(prompt, dtype=np.int64),
        token_ids=np.asarray(token_ids, dtype=np.int64),
        loss_mask=np.ones(len(token_ids), dtype=bool),
        rollout_log_probs=np.asarray(log_probs, dtype=np.float32),
        policy_version=0,
    )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass over G groups of at most n rollouts. Index tensors are int64, on the model's device."""

    samples: list[TrainSample]  # group by group
    input_ids: Tensor  # [1, N] prompts, then responses without their last token
    position_ids: Tensor  # [1, N]
    layout: SharedPrefixLayout
    logit_rows: Tensor  # [M] packed position that predicts each response token, sample by sample
    targets: Tensor  # [M] the response tokens
    lengths: list[int]  # response tokens of each sample; sums to M

    @property
    def sequences(self) -> Tensor:
        """Index of the sample each response token belongs to: [M] int64."""
        lengths = torch.tensor(self.lengths)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(self.input_ids.device)

    def split(self, values: Tensor) -> list[np.ndarray]:
        """Cut a [M] tensor into one array per sample."""
        return [part.cpu().numpy() for part in torch.split(values, self.lengths)]

    def gather(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Concatenate a per-token array of the samples to [M]."""
        arrays = [getattr(sample, name) for sample in self.samples]
        return torch.from_numpy(np.concatenate(arrays)).to(device=self.input_ids.device, dtype=dtype)

    def per_token(self, name: str) -> Tensor:
        """Repeat a scalar of each sample over its tokens: [M] float32."""
        scalars = torch.tensor([getattr(sample, name) for sample in self.samples], dtype=torch.float32)
        return torch.repeat_interleave(scalars, torch.tensor(self.lengths)).to(self.input_ids.device)


@dataclass(frozen=True, slots=True)
class SharedPrefixLayout:
    """Where the packed tokens of one pass sit. P and L are the longest prompt and the longest packed response."""

    num_prompt_tokens: int  # packed prompt tokens; responses follow
    prompt_rows: Tensor  # [G, P] packed index of each prompt token; 0 on padding
    prompt_pad: Tensor  # [G, P] bool, true on padding
    prompt_unpad: Tensor  # [prompt tokens] index into [G * P]
    response_rows: Tensor | None  # [G, n, L] index into the packed responses; 0 on padding; None without responses
    response_unpad: Tensor | None  # [response tokens] index into [G * n * L]


def padded_tokens(groups: Sequence[Sequence[TrainSample]]) -> int:
    """Tokens of a forward pass over groups as attention lays them out, G (P + n L): what its memory depends on."""
    prompt = max(len(group[0].prompt_token_ids) for group in groups)
    response = max(sample.num_tokens - 1 for group in groups for sample in group)
    return len(groups) * (prompt + max(len(group) for group in groups) * response)


def micro_batches(samples: Sequence[TrainSample], token_budget: int) -> Iterator[list[TrainSample]]:
    """Split a mini-batch into micro-batches of at most ``token_budget`` padded tokens, keeping groups together.

    A group that is over the budget by itself is split, its prompt repeated in each part; a single rollout is never
    split. Parts are ordered by length, so that little is padded. The result of an update depends on none of it.
    """
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    parts = [part for group in groups.values() for part in _split_group(group, token_budget)]
    parts.sort(key=lambda part: (max(sample.num_tokens for sample in part), len(part[0].prompt_token_ids)))
    current = list[TrainSample]()
    num_parts, prompt, size = 0, 0, 0  # of the current micro-batch: parts, longest prompt, most rollouts of a part
    for part in parts:
        prompt, size = max(prompt, len(part[0].prompt_token_ids)), max(size, len(part))
        response = max(sample.num_tokens for sample in part) - 1  # the longest so far: parts are in this order
        if current and (num_parts + 1) * (prompt + size * response) > token_budget:
            yield current
            current, num_parts, prompt, size = [], 0, len(part[0].prompt_token_ids), len(part)
        current += part
        num_parts += 1
    if current:
        yield current


def _split_group(group: list[TrainSample], token_budget: int) -> Iterator[list[TrainSample]]:
    """The whole group where it fits; else by length, so that one long response does not pad the others."""
    if padded_tokens([group]) <= token_budget:
        yield group
        return
    prompt = len(group[0].prompt_token_ids)
    part = list[TrainSample]()
    for sample in sorted(group, key=lambda sample: sample.num_tokens):
        if part and prompt + (len(part) + 1) * (sample.num_tokens - 1) > token_budget:
            yield part
            part = []
        part.append(sample)
    yield part


def pack(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> PackedBatch:
    """Lay out samples for one forward pass. Samples of a group must be adjacent, as ``micro_batches`` yields them."""
    groups: list[list[TrainSample]] = []
    for sample in samples:
        if groups and groups[-1][0].group_id == sample.group_id:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    prompts = [group[0].prompt_token_ids for group in groups]
    responses = [[sample.token_ids for sample in group] for group in groups]
    layout, starts, response_starts = _layout([len(p) for p in prompts], [[len(r) - 1 for r in g] for g in responses])
    tokens = [*prompts, *(r[:-1] for g in responses for r in g)]
    positions = [np.arange(len(p)) for p in prompts]
    rows: list[np.ndarray] = []
    for i, group in enumerate(responses):
        for j, response in enumerate(group):
            positions.append(len(prompts[i]) + np.arange(len(response) - 1))
            first = starts[i] + len(prompts[i]) - 1  # the last prompt token predicts the first response token
            later = layout.num_prompt_tokens + response_starts[i][j] + np.arange(len(response) - 1)
            rows.append(np.concatenate([[first], later]))
    flat = [response for group in responses for response in group]

    def tensor(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)

    return PackedBatch(
        samples=[sample for group in groups for sample in group],
        input_ids=tensor(tokens)[None],
        position_ids=tensor(positions)[None],
        layout=_to(layout, device),
        logit_rows=tensor(rows),
        targets=tensor(flat),
        lengths=[len(response) for response in flat],
    )


def _layout(
    prompt_lengths: Sequence[int], response_lengths: Sequence[Sequence[int]]
) -> tuple[SharedPrefixLayout, list[int], list[list[int]]]:
    """Index tensors, and where each prompt and each response starts among the packed prompts and responses."""
    starts = np.concatenate([[0], np.cumsum(prompt_lengths)]).astype(int)
    longest = max(prompt_lengths)
    prompt_rows = np.zeros((len(prompt_lengths), longest), dtype=np.int64)
    prompt_pad = np.ones_like(prompt_rows, dtype=bool)
    for i, length in enumerate(prompt_lengths):
        prompt_rows[i, :length] = starts[i] + np.arange(length)
        prompt_pad[i, :length] = False
    flat_lengths = [length for group in response_lengths for length in group]
    response_rows, unpad, response_starts = None, None, []
    if sum(flat_lengths):
        most, longest = max(len(group) for group in response_lengths), max(flat_lengths)
        padded = np.zeros((len(response_lengths), most, longest), dtype=np.int64)
        real = np.zeros_like(padded, dtype=bool)
        start = 0
        for i, group in enumerate(response_lengths):
            response_starts.append([])
            for j, length in enumerate(group):
                padded[i, j, :length] = start + np.arange(length)
                real[i, j, :length] = True
                response_starts[-1].append(start)
                start += length
        response_rows, unpad = torch.from_numpy(padded), torch.from_numpy(np.flatnonzero(real))
    else:
        response_starts = [[0] * len(group) for group in response_lengths]
    layout = SharedPrefixLayout(
        num_prompt_tokens=int(starts[-1]),
        prompt_rows=torch.from_numpy(prompt_rows),
        prompt_pad=torch.from_numpy(prompt_pad),
        prompt_unpad=torch.from_numpy(np.flatnonzero(~prompt_pad)),
        response_rows=response_rows,
        response_unpad=unpad,
    )
    return layout, starts[:-1].tolist(), response_starts


def _to(layout: SharedPrefixLayout, device: torch.device | str) -> SharedPrefixLayout:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return SharedPrefixLayout(
        layout.num_prompt_tokens,
        layout.prompt_rows.to(device),
        layout.prompt_pad.to(device),
        layout.prompt_unpad.to(device),
        move(layout.response_rows),
        move(layout.response_unpad),
    )
