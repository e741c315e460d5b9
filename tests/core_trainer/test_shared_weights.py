"""Weights in shared memory: what another process reads is what was written, and it is a safetensors file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core_trainer.rollout.shared_weights import SharedWeights, open_shared

READER = """
import sys
from core_trainer.rollout.shared_weights import open_shared
tensors = open_shared(sys.argv[1])
for line in sys.stdin:
    print(*(f"{name}={float(tensor.float().sum())}" for name, tensor in sorted(tensors.items())), flush=True)
"""


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "norm": torch.randn(7, dtype=torch.bfloat16),  # 14 bytes: what follows it would be out of line
        "linear": torch.randn(33, 5),
        "head": torch.randn(3, 4, dtype=torch.float16),
    }


def test_it_is_a_safetensors_file() -> None:
    """Any reader of the format gets names, shapes, dtypes and every bit."""
    written = weights(0)
    shared = SharedWeights(written)
    shared.write(written)
    read = load_file(shared.path)
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in written.items())
    assert shared.nbytes == sum(tensor.nbytes for tensor in written.values())
    shared.close()


def test_another_process_sees_each_version() -> None:
    """A reader that mapped it once sees what is written later, without opening it again."""
    first, second = weights(1), weights(2)
    shared = SharedWeights(first)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, shared.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    for version in (first, second):
        shared.write(version)
        reader.stdin.write("\n")
        reader.stdin.flush()
        expected = " ".join(f"{name}={float(tensor.float().sum())}" for name, tensor in sorted(version.items()))
        assert reader.stdout.readline() == expected + "\n"
    reader.stdin.close()
    assert reader.wait(10) == 0
    shared.close()


def test_non_contiguous_weights_and_what_does_not_fit() -> None:
    """A transposed weight is written in its own order; other dtypes and a closed file are refused."""
    transposed = {"w": torch.arange(6.0).view(2, 3).T}
    shared = SharedWeights(transposed)
    shared.write(transposed)
    assert torch.equal(open_shared(shared.path)["w"], transposed["w"])
    path = shared.path
    shared.close()
    with pytest.raises(OSError, match=Path(path).name):
        open_shared(path)
    with pytest.raises(KeyError):
        SharedWeights({"w": torch.zeros(2, dtype=torch.int64)})
