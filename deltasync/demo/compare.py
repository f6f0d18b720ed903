"""Are two sets of weights the same, bit for bit? Deliberately independent of codec, digests and catalog.

The trainer casts its own weights and writes them with safetensors; the rollout worker reads that file and compares it
with the weights it generates from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltasync.demo.rows import Comparison

_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dump_bf16(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write every tensor cast to bf16. Names that share one tensor are written one by one."""
    save_file(
        {name: t.detach().to(torch.bfloat16, copy=True).contiguous() for name, t in weights.items()}, path
    )


def compare(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> Comparison:
    """Compare names, dtypes, shapes and all bits. Counts only tensors whose bits were compared."""
    problems = [f"{name} is missing in the rollout" for name in expected.keys() - actual.keys()]
    problems += [f"{name} is only in the rollout" for name in actual.keys() - expected.keys()]
    tensors = elements = 0
    for name in expected.keys() & actual.keys():
        want, have = expected[name], actual[name].detach()
        if want.dtype != have.dtype or want.shape != have.shape:
            problems.append(f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
            continue
        differing = int((_bits(want) != _bits(have)).sum())
        if differing:
            problems.append(f"{name} differs in {differing} of {want.numel()} elements")
        tensors += 1
        elements += want.numel()
    return Comparison(tensors, elements, tuple(sorted(problems)))


def compare_with_file(path: Path, actual: Mapping[str, Tensor]) -> Comparison:
    """Compare live weights with a file of `dump_bf16`."""
    return compare(load_file(path), actual)


def _bits(tensor: Tensor) -> Tensor:
    """The bit patterns: −0.0 differs from 0.0, and a NaN equals itself."""
    return tensor.contiguous().view(_SIGNED[tensor.element_size()])
