"""What runs inside vLLM's own workers, in this process or in a server's: the sampler, and how weights come in.

vLLM mixes ``WorkerExtension`` into its worker class; its methods are called by name through ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# pyright: reportMissingImports=false
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from core_trainer.rollout import checksum
from core_trainer.rollout.shared_weights import open_shared

NUM_COLUMNS = 16  # of each packed layer, other ones at each sync


class WorkerExtension:
    """Methods our side calls on every vLLM worker."""

    model_runner: Any  # these three are of the worker this is mixed into
    reload_weights: Any
    get_model: Any

    def rlinsight_start(self) -> None:
        """Report log-probs as training has them."""
        self.model_runner.sampler = WholeVocabularySampler()
        self._shared: tuple[str, dict[str, Tensor]] | None = None  # path and tensors of the file read last
        self._random = torch.Generator().manual_seed(0)  # the process's own is the trainer's, too

    def rlinsight_load_shared(self, path: str) -> str | None:
        """``rlinsight_load`` what a ``SharedWeights`` of this machine holds."""
        if self._shared is None or self._shared[0] != path:
            self._shared = path, open_shared(path)
        return self.rlinsight_load(self._shared[1])

    def rlinsight_load(self, weights: dict[str, Tensor]) -> str | None:
        """Rewrite vLLM's weights in place, kernel copies included, and return the checksum of what it has then.

        None where that is not to be found under the names of ``weights``: fused in a way this does not know, or shared
        by several GPUs.
        """
        self._load(weights)
        if get_tensor_model_parallel_world_size() > 1:
            return None
        served = served_weights(self.get_model(), weights, self._random)
        return checksum.of(served.items()) if served.keys() == weights.keys() else None

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        self.reload_weights(weights_iterator=iter(weights.items()))
        for module in self.get_model().modules():
            # An output layer tied to the embedding has a packed copy on CPU, which the reload leaves as it was: no
            # weight of the checkpoint bears its name.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def served_weights(model: Any, given: Mapping[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
    """What a vLLM model computes with, as its checkpoint has it: views where it fuses several, tied ones once.

    Kernels for CPUs have weights in a layout of their own that nobody can read. Those are ``given``, with some columns
    in place that the kernel itself has told: where it has other weights they differ.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    weights: dict[str, Tensor] = {}
    names: dict[int, list[str]] = {}  # of each parameter's parts
    for path, module in model.named_modules():
        prefix, _, leaf = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            tensor = parameter.detach()
            parts = [f"{prefix}.{part}.{name}" for part in fused[leaf]] if leaf in fused else [f"{path}.{name}"]
            if id(parameter) not in names:
                names[id(parameter)] = parts
                if not tensor.numel():  # the kernel's copy is the only one
                    weights |= {part: given[part] for part in parts if part in given}
                elif leaf in fused:
                    weights |= zip(parts, tensor.split(module.output_partition_sizes), strict=True)
                elif isinstance(module, VocabParallelEmbedding):
                    weights[parts[0]] = tensor[: module.org_vocab_size]  # padded to a multiple of 64
                else:
                    weights[parts[0]] = tensor
            is_copied = not tensor.numel() or (isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"))
            if name == "weight" and is_copied:
                parts = [part for part in names[id(parameter)] if part in weights]
                weights |= zip(parts, _as_computed(module, [weights[part] for part in parts], random), strict=True)
    return weights


def _as_computed(module: Any, weights: list[Tensor], random: torch.Generator) -> list[Tensor]:
    """``weights`` [out, in], which a linear layer holds one after the other, with some columns as it computes with
    them. A product with a column of the identity is exact in every precision.
    """
    if not weights:
        return []
    width = weights[0].shape[1]
    count = min(NUM_COLUMNS, width)
    first = int(torch.randint(width - count + 1, (), generator=random))
    columns = slice(first, first + count)  # side by side: of each row they are in one line of the processor's cache
    chosen = torch.eye(count, width, dtype=weights[0].dtype).roll(first, dims=1)
    told = module.quant_method.apply(module, chosen, None).T
    rows = [weight.shape[0] for weight in weights]
    found = list(told[: sum(rows)].split(rows))
    for i, (weight, part) in enumerate(zip(weights, found, strict=True)):
        if torch.equal(part, weight[:, columns]):  # as numbers: -0 comes back as 0
            found[i] = weight
        else:
            found[i] = weight.clone()
            found[i][:, columns] = part
    return found


class WholeVocabularySampler(Sampler):
    """vLLM's sampler, with log-probs of the whole distribution at the request's temperature, as training has them.

    vLLM itself offers log-probs before the temperature, or after penalties and biases, of what top-k, top-p and min-p
    left. Greedy rows are at temperature 1.
    """

    def __init__(self) -> None:
        super().__init__("processed_logprobs")  # those that sample() returns
        self.topk_topp_sampler = TopKTopPSampler("raw_logprobs")  # computes none

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, *args: Any) -> Tensor:
        """logits [R, V] float32, as the model gave them. The parent writes penalties and biases over them."""
        scaled = logits
        if sampling_metadata.temperature is not None:  # None: all rows are greedy
            scaled = self.apply_temperature(logits.clone(), sampling_metadata.temperature, all_random=False)
        self._log_probs = self.compute_logprobs(scaled)
        return super().apply_logits_processors(logits, sampling_metadata, *args)

    def sample(self, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None) -> Any:
        """logits [R, V] float32 -> tokens [R], log-probs [R, V]."""
        tokens, _ = super().sample(logits, sampling_metadata, "raw_logprobs")
        return tokens, self._log_probs

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """The sampled token's log-prob first, then the likeliest ones': [R, 1 + num_logprobs] each. The ranks, which
        vLLM compiles a kernel for, nobody reads.
        """
        index = token_ids[:, None]
        values = logprobs.gather(1, index)
        if num_logprobs:
            top = logprobs.topk(num_logprobs)
            index, values = torch.cat([index, top.indices], 1), torch.cat([values, top.values], 1)
        return LogprobsTensors(index.int(), values, torch.zeros_like(token_ids))
